"""One step as flat arrays: which tokens it computes, where they lie, and whose logits are wanted.

A step is a row of spans, each some consecutive tokens of one sequence: first the decodes, which are
spans of one token, then longer ones. All tokens are packed into one axis, span after span. What
attention, the network and the sampler need to know is in these arrays and nowhere else, so that one
copy carries a step to a device, and one broadcast to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Slots are int32.
MAX_SLOTS = 2**31
# Arrays begin at multiples of 16 bytes, which kernels are compiled for.
ALIGNED = 4


@dataclass(frozen=True, slots=True)
class Step:
    """`S` spans of `T` tokens on a device; all arrays are int32 and views of one buffer.

    Span `s` holds the packed tokens `query_starts[s] : query_starts[s + 1]`, which follow
    `context_lengths[s]` tokens of their sequence that were computed before. Its keys and values,
    the context's and its own, lie in `pages[page_starts[s] : page_starts[s + 1]]`. Token `t` is at
    place `positions[t]` of its sequence and its keys are stored at `slots[t]`, that is page times
    page size plus offset. `logit_rows` are the packed tokens whose logits are wanted, in order.
    The first `num_decodes` spans are of one token each.

    What is None is as in most steps. `ends`: a causal token sees what lies before place `ends[t]`,
    which grows along its span and not beyond it (None: up to itself). `axes`: it is turned by three
    numbers (None: thrice by its place). `shown`: the tokens `shown_rows`, packed ones, have these
    vectors and not those of their ids. `adapters`: span `s` runs through adapter `adapters[s]`, 0
    being none. `sampled_slots`: whose sequences, by their slots, get a token from it.
    """

    num_decodes: int
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    query_starts: Tensor  # [S + 1]
    context_lengths: Tensor  # [S]
    page_starts: Tensor  # [S + 1]
    pages: Tensor  # [P]
    logit_rows: Tensor  # [N]
    ends: Tensor | None = None  # [T]
    axes: Tensor | None = None  # [3 · T], axis after axis
    shown_rows: Tensor | None = None  # [M]
    shown: Tensor | None = None  # [M, H] of the network's dtype
    adapters: Tensor | None = None  # [S]
    sampled_slots: Tensor | None = None  # [K]
    copy_on_host: Step | None = None  # None where this is it

    @classmethod
    def pack(cls, num_decodes: int, device: torch.device, **arrays: NDArray[Any]) -> Step:
        """Put the arrays, given by their names, into one buffer and that onto the device."""
        names = [field.name for field in fields(cls) if field.name in arrays]
        places = places_of({name: len(arrays[name]) for name in names})

        def over(buffer: Tensor, host: Step | None = None) -> Step:
            views: dict[str, Any] = {name: buffer[place] for name, place in places.items()}
            return cls(num_decodes, copy_on_host=host, **views)

        buffer = host_buffer(places[names[-1]].stop, device)
        numbers = buffer.numpy()
        for name, place in places.items():
            np.copyto(numbers[place], arrays[name], casting="same_kind")
        host = over(buffer)
        if device.type == "cpu":
            return host
        return over(buffer.to(device, non_blocking=True), host)

    def with_ids(self, last_ids: Tensor) -> Step:
        """Return the step with `last_ids[-1 - id]` in place of each id below zero.

        Which is a slot whose last token only the device knows.
        """
        of_slots = last_ids[(-1 - self.token_ids).clamp(min=0)]
        return replace(self, token_ids=torch.where(self.token_ids < 0, of_slots, self.token_ids))

    @property
    def host(self) -> Step:
        """Return the step in the host's memory: to know its numbers waits for no device."""
        return self if self.copy_on_host is None else self.copy_on_host

    @property
    def visible_ends(self) -> Tensor:
        """Return the place `[T]` before which lies all that each causal token sees."""
        return self.positions + 1 if self.ends is None else self.ends

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the step computes."""
        return len(self.token_ids)


def host_buffer(length: int, device: torch.device) -> Tensor:
    """Return int32 numbers of the host that a copy to the device need not wait for.

    torch keeps them until such a copy is done, and takes them for the next ones then.
    """
    return torch.empty(length, dtype=torch.int32, pin_memory=device.type == "cuda")


def places_of(lengths: Mapping[str, int]) -> dict[str, slice]:
    """Return where arrays of so many int32 numbers lie in one buffer, in their order."""
    places, start = {}, 0
    for name, length in lengths.items():
        places[name] = slice(start, start + length)
        start += -(-length // ALIGNED) * ALIGNED
    return places


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array of the host on a device, which is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
