"""One step's input batch as flat arrays: its tokens, their KV slots, and the logits it wants.

A step is a list of spans, each some consecutive tokens of one sequence: first the decodes, which
are spans of one token, then prefill chunks. All tokens are packed into one axis, span after span.
These arrays contain everything that attention, the network and the sampler need, so that one copy
transfers a step to a device, and one broadcast to other ranks.
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
# In int32: arrays begin at multiples of 16 bytes, an alignment that kernels are compiled for.
ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class Step:
    """`S` spans of `T` tokens on a device; all arrays are int32 and views of one buffer.

    Span `s` holds the packed tokens `query_starts[s] : query_starts[s + 1]`, which follow
    `context_lengths[s]` tokens of their sequence that were computed before. Its keys and values,
    the context's and its own, are in `pages[page_starts[s] : page_starts[s + 1]]`, followed by the
    lists of further groups of layers, described in `of_group`. Token `t` is at position
    `positions[t]` of its sequence and its keys are stored at `slots[t]`, that is page times page
    size plus offset. `logit_rows` are the packed tokens whose logits are wanted, in order. The
    first `num_decodes` spans have one token each.

    Optional arrays are None in most steps. `ends`: a causal token sees positions before `ends[t]`,
    which grows along its span and stays within it (None: up to itself). `unseen`: no token of a
    bidirectional span sees the last `unseen[s]` (None: it sees all). `axes`: the three M-RoPE
    positions of each token (None: its position, three times). `long_rope`: 1 for tokens that use a
    rope's long frequencies (None: none do). `shown`: input embeddings of images, which replace
    those of the ids of the packed tokens `shown_rows`, and D further vectors each, which are added
    to the residual after the first D layers (DeepStack). `adapters`: span `s` runs through adapter
    `adapters[s]`, 0 meaning none. `sampled_slots`: slots of the sequences that sample a token.
    `more_slots`: `slots` of the groups of layers after the first. `copies`: for each group, rows of
    two pages and the number of first tokens that each layer copies from one to the other, once
    those of the step are stored.
    `state_sources`, `state_rows`: the rows of recurrent state that span `s` starts from, -1 being
    zeros, and that it leaves its state in.
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
    unseen: Tensor | None = None  # [S]
    axes: Tensor | None = None  # [3 · T], axis after axis
    long_rope: Tensor | None = None  # [T]
    shown_rows: Tensor | None = None  # [M]
    shown: Tensor | None = None  # [M, (1 + D) · H] of the network's dtype
    adapters: Tensor | None = None  # [S]
    sampled_slots: Tensor | None = None  # [K]
    state_sources: Tensor | None = None  # [S]
    state_rows: Tensor | None = None  # [S]
    more_slots: Tensor | None = None  # [(G - 1) · slot_stride(T)]
    copies: Tensor | None = None  # [G · C · 3]
    copy_on_host: Step | None = None  # None if this is the copy

    @classmethod
    def pack(cls, num_decodes: int, device: torch.device, **arrays: NDArray[Any]) -> Step:
        """Pack the named arrays into one buffer and copy that to the device."""
        names = [field.name for field in fields(cls) if field.name in arrays]
        views, known = pack_arrays(device, {name: arrays[name] for name in names})
        host = cls(num_decodes, **known)
        return host if views is known else cls(num_decodes, copy_on_host=host, **views)

    def with_ids(self, last_ids: Tensor) -> Step:
        """Return the step with `last_ids[-1 - id]` in place of each negative id.

        A negative id names a slot whose last token only the device knows.
        """
        of_slots = last_ids[(-1 - self.token_ids).clamp(min=0)]
        return replace(self, token_ids=torch.where(self.token_ids < 0, of_slots, self.token_ids))

    def of_group(self, group: int) -> Step:
        """Return a group of layers' view of the step: its page lists and slots.

        On a device, page lists start at the host's offsets.
        """
        assert self.more_slots is not None
        host = self.host
        stride = slot_stride(len(self.slots))
        copies = self.copies
        if copies is not None:
            copies = copies.view(1 + len(self.more_slots) // stride, -1)[group]
        if not group:
            return self if copies is None else replace(self, copies=copies)
        first = (group - 1) * stride
        num_pages = int(host.page_starts[-1])
        return replace(
            self,
            page_starts=host.page_starts + group * num_pages,
            slots=self.more_slots[first : first + len(self.slots)],
            copies=copies,
            copy_on_host=None if self is host else host.of_group(group),
        )

    @property
    def host(self) -> Step:
        """Return the step in host memory: reading it does not wait for a device."""
        return self if self.copy_on_host is None else self.copy_on_host

    @property
    def visible_ends(self) -> Tensor:
        """Return, for each causal token, the position `[T]` after the last one that it sees."""
        return self.positions + 1 if self.ends is None else self.ends

    def for_layer(self, *, sees_ahead: bool) -> Step:
        """Return a layer's view of the step: without `ends` unless it sees ahead."""
        return self if sees_ahead or self.ends is None else replace(self, ends=None)

    @property
    def span_ends(self) -> Tensor:
        """Return, for each token, the position `[T]` after the last one that its span sees."""
        counts = self.query_starts.diff()
        ends = self.context_lengths + counts
        ends = ends if self.unseen is None else ends - self.unseen
        return ends.repeat_interleave(counts)

    @property
    def page_copies(self) -> list[list[int]]:
        """Return the copies of the one group: source page, target page, number of tokens."""
        copies = self.host.copies
        return [] if copies is None else copies.view(-1, 3).tolist()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return len(self.token_ids)


def pack_arrays(
    device: torch.device, arrays: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pack arrays into one int32 buffer and copy that to a device → its views, and the host's.

    Both are the same dict on a CPU.
    """
    places = buffer_slices({name: len(array) for name, array in arrays.items()})
    buffer = host_buffer(max(place.stop for place in places.values()), device)
    numbers = buffer.numpy()
    for name, place in places.items():
        np.copyto(numbers[place], arrays[name], casting="same_kind")
    known = {name: buffer[place] for name, place in places.items()}
    if device.type == "cpu":
        return known, known
    copied = buffer.to(device, non_blocking=True)
    return {name: copied[place] for name, place in places.items()}, known


class StaticArrays:
    """Arrays of steps at fixed addresses of a device, which CUDA graphs read.

    A step's arrays are padded to the lengths of its bucket; `most` is the largest total length.
    """

    def __init__(self, most: Mapping[str, int], device: torch.device) -> None:
        total = max(place.stop for place in buffer_slices(most).values())
        self._numbers = torch.zeros(total, dtype=torch.int32, device=device)
        self._views: dict[int, dict[str, Tensor]] = {}  # by bucket

    def fill(
        self,
        bucket: int,
        lengths: Mapping[str, int],
        arrays: Mapping[str, NDArray[Any]],
        filling: Mapping[str, int],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Overwrite the previous step → the padded views of the device, and those of the host.

        An array of a bucket always has the same one of `lengths`, except the last one, which is not
        padded; its view extends to the end of all.
        """
        *names, last = lengths
        places = buffer_slices({**lengths, last: len(arrays[last])})
        host = host_buffer(places[last].stop, self._numbers.device)
        numbers = host.numpy()
        known: dict[str, Any] = {}
        for name, place in places.items():
            stop = place.start + len(arrays[name])
            numbers[place.start : stop] = arrays[name]
            numbers[stop : place.stop] = filling.get(name, 0)
            known[name] = host[place.start : stop]
        self._numbers[: len(host)].copy_(host, non_blocking=True)
        if bucket not in self._views:
            self._views[bucket] = {name: self._numbers[places[name]] for name in names}
            self._views[bucket][last] = self._numbers[places[last].start :]
        return dict(self._views[bucket]), known


def slot_stride(num_tokens: int) -> int:
    """Return the offset of one group's slots from another's in `more_slots`."""
    return -(-num_tokens // ALIGNMENT) * ALIGNMENT


def host_buffer(length: int, device: torch.device) -> Tensor:
    """Return an int32 buffer of the host, pinned so that copies to a GPU are asynchronous.

    torch's pinned allocator reuses the memory once such a copy is done.
    """
    return torch.empty(length, dtype=torch.int32, pin_memory=device.type == "cuda")


def buffer_slices(lengths: Mapping[str, int]) -> dict[str, slice]:
    """Return the slices of one buffer that hold int32 arrays of these lengths, in order."""
    places, start = {}, 0
    for name, length in lengths.items():
        places[name] = slice(start, start + length)
        start += -(-length // ALIGNMENT) * ALIGNMENT
    return places


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array of the host to a device, asynchronously."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
