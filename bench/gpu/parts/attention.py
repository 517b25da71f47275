"""One layer's attention, replayed from a graph, compared with cuDNN's.

Ours reads random pages of random numbers, cuDNN's the same amount of contiguous numbers. A shape
that it refuses is a line with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.counts import Form, Spans, attention
from bench.gpu.parts.steps import PagedSequences, Piece
from bench.gpu.parts.task import Numbers, Place, Task
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.backends import choose_backend

# The goal for decodes, as a share of a copy, and for 4,096 tokens on Hopper.
DECODE_BOUND = 0.85
PREFILL_BOUND = 350e12
SHAPE_8B = AttentionShape(32, 8, 128, 128, 128**-0.5)
SHAPE_06B = AttentionShape(16, 8, 128, 128, 128**-0.5)
TINY = AttentionShape(4, 2, 16, 16, 0.25)

Attend = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """`count` sequences of `length` tokens, whose last `new` attend; `shared` are alike."""

    shape: AttentionShape
    count: int
    length: int
    new: int = 1
    shared: int = 0

    def __str__(self) -> str:
        """Return it in words."""
        many = f"{self.count} × " if self.count > 1 else ""
        heads = f"{self.shape.num_query_heads}/{self.shape.num_kv_heads}"
        if self.new == 1:
            shared = f", {self.shared} shared" if self.shared else ""
            return f"decodes {many}{self.length}{shared}, {heads} heads"
        behind = self.length - self.new
        return f"prefill {many}{self.new}{f' after {behind}' if behind else ''}, {heads} heads"

    @property
    def pieces(self) -> list[Piece]:
        """Return the spans that a step computes."""
        return [Piece(i, self.length - self.new, self.length) for i in range(self.count)]

    def numbers(self, place: Place, seconds: float) -> Numbers:
        """Return bytes or products per second; shared bytes count once."""
        spans = Spans(
            np.full(self.count, self.length - self.new),
            np.full(self.count, self.length),
            0,
            self.shared * (self.count - 1),
        )
        counted = attention(self.shape, spans, Form(itemsize=place.dtype.itemsize))
        if self.new == 1:
            rate = counted.bytes / seconds
            share = rate / place.card.bandwidth
            return {"seconds": seconds, "bytes_per_second": rate, "share_of_copy": share}
        return {"seconds": seconds, "flops_per_second": counted.flops / seconds}

    def tensors(self, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        """Return random queries `[B, T, Hq, D]`, and keys and values `[B, L, Hkv, D]`."""
        shape = self.shape
        sizes = [(self.new, shape.num_query_heads), *2 * [(self.length, shape.num_kv_heads)]]
        query, key, value = (
            torch.randn(self.count, *size, shape.key_dim, dtype=place.dtype, device=place.device)
            for size in sizes
        )
        return query, key, value


def cases(place: Place) -> tuple[Case, ...]:
    """Return the timed cases, the most informative first."""
    if place.is_tiny:
        return Case(TINY, 3, 40), Case(TINY, 3, 40, shared=16), Case(TINY, 1, 24, 24)
    return (
        Case(SHAPE_8B, 256, 1024),
        Case(SHAPE_8B, 1, 4096, 4096),
        Case(SHAPE_06B, 512, 512),
        Case(SHAPE_8B, 16, 8192),
        Case(SHAPE_8B, 256, 1024, shared=512),
        Case(SHAPE_8B, 1, 4096, 2048),
        Case(SHAPE_8B, 16, 256, 256),
    )


def tasks(place: Place) -> Iterator[Task]:
    """Yield ours in each case, then cuDNN's."""
    for case in cases(place):
        yield Task(f"{case}: ours", partial(ours, place, case), 1.5)
    for name, (prepare, seconds) in list(PEERS.items())[: 1 if place.is_tiny else None]:
        for case in cases(place):
            if not case.shared:
                yield Task(f"{case}: {name}", partial(peer, place, case, prepare), seconds)


def prepared(place: Place, case: Case) -> Attend:
    """Prepare our backend's kernels."""
    sequences = PagedSequences([case.length] * case.count, shared=case.shared)
    make = choose_backend([case.shape], place.dtype, place.device)
    backend: Any = make(
        [case.shape], sequences.num_pages(make.page_size), place.dtype, place.device
    )
    for pages in (*backend.keys, *backend.values):
        pages.normal_()
    step = sequences.step(case.pieces, make.page_size, place.device)
    backend.prepare(step)
    query = case.tensors(place)[0].flatten(0, 1)
    return lambda: backend.attend(0, query)


def ours(place: Place, case: Case) -> Numbers:
    """Time our backend's kernels."""
    numbers = case.numbers(place, place.replay_seconds(prepared(place, case)))
    if place.is_tiny or not place.card.name.startswith("h"):
        return numbers
    key, bound = "share_of_copy", DECODE_BOUND
    if case.new > 1:
        key, bound = "flops_per_second", PREFILL_BOUND
    return {**numbers, "bound": bound, "holds": numbers[key] >= bound}


def peer(place: Place, case: Case, prepare: Callable[[Place, Case], Attend]) -> Numbers:
    """Time another library's kernels; its failures are reported, and do not count as ours."""
    try:
        attend = prepare(place, case)
        seconds = place.replay_seconds(attend)
    except Exception as exc:  # noqa: BLE001 - its errors are another library's
        place.wait()
        return {"skipped": f"{type(exc).__name__}: {exc}"[:300]}
    return case.numbers(place, seconds)


def sdpa(place: Place, case: Case, backend: SDPBackend) -> Attend:
    """Prepare torch's attention by one of its backends."""
    query, key, value = (one.transpose(1, 2) for one in case.tensors(place))
    if case.new == case.length:
        masking: Mapping[str, Any] = {"is_causal": True}
    else:
        masking = {"attn_mask": causal_lower_right(case.new, case.length)} if case.new > 1 else {}

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                query, key, value, scale=case.shape.scaling, enable_gqa=True, **masking
            )

    return attend


def sdpa_of(backend: SDPBackend) -> Callable[[Place, Case], Attend]:
    """Return the preparation of one backend of torch's attention."""
    return partial(sdpa, backend=backend)


# By name: their preparation, and their usual seconds.
PEERS: Mapping[str, tuple[Callable[[Place, Case], Attend], float]] = {
    "torch's cuDNN": (sdpa_of(SDPBackend.CUDNN_ATTENTION), 1.5),
}
