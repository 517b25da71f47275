"""Recurrent backend on GPUs: rows of states, causal convolution, gated norm.

The rules are `delta_rule` and `state_space`. The reference is `engine.kernels.recurrence`; sums and
states are fp32. Each kernel has a program for a span and some of its channels or of a head's state,
so that no program reads what another writes. Spans of one token, and longer ones, have separate
launches: a step that consists of decodes skips the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..recurrence import GatedDelta, RecurrentShape, RuleWeights, StateSpace, row_bytes
from ..step import Step
from .delta_rule import apply_delta_rule
from .launch import DTYPES, arch_of, cdiv, launch, next_power_of_2
from .spans import SpanRows
from .state_space import scan
from .tuned_tiles import config_for

# A launch that only some steps need: for spans of several tokens.
CHUNKS = 1
# Numbers of a row that one program gates if there is no norm over them.
GATED = 1024
WIDEST_HEAD = 256


class TritonRecurrence:
    """Rows of tails `[K - 1, C]` and states on a GPU, one more for tokens of no span."""

    all_launches = CHUNKS

    def __init__(
        self,
        shapes: Sequence[RecurrentShape],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert self.supports(shapes, dtype)
        self.shapes = tuple(shapes)
        rows = num_rows + 1
        self.tails = [
            torch.zeros(rows, shape.num_taps - 1, shape.num_channels, dtype=dtype, device=device)
            for shape in shapes
        ]
        self.states = [
            torch.zeros(rows, *(shape.rule.state_shape if shape.rule else (0,)), device=device)
            for shape in shapes
        ]
        self.launches = 0
        self._captured: int | None = None

    @classmethod
    def row_bytes(cls, shapes: Sequence[RecurrentShape], dtype: torch.dtype) -> int:
        """Return the bytes that one row takes over all layers."""
        return row_bytes(shapes, dtype)

    @staticmethod
    def supports(shapes: Sequence[RecurrentShape], dtype: torch.dtype) -> bool:
        """Return whether the kernels support all these layers in this dtype."""
        rules = (shape.rule for shape in shapes)
        return dtype in DTYPES and all(
            max(rule.state_shape[1:]) <= WIDEST_HEAD for rule in rules if rule is not None
        )

    @contextmanager
    def capturing(self, launches: int) -> Iterator[None]:
        """Launch for any step that needs such launches, padded by tokens of no span."""
        self._captured = launches
        try:
            yield
        finally:
            self._captured = None

    def prepare(self, step: Step) -> None:
        """Read the rows of the next forward pass's spans; valid until the next call."""
        assert step.state_rows is not None
        assert step.state_sources is not None
        starts = step.host.query_starts
        self._rows = SpanRows(step.query_starts, step.state_sources, step.state_rows)
        self._num_tokens = int(starts[-1])
        counts = starts.diff()
        self.launches = CHUNKS * bool((counts > 1).any())

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve each span after the inputs stored in its row; see `RecurrentBackend`."""
        shape, tails = self.shapes[layer], self.tails[layer]
        assert weight.is_contiguous()
        out = self._empty(x, x.shape)
        arch, channels = arch_of(x.device), shape.num_channels
        for kind in self._kinds():
            config = config_for("convolution", arch, kind=kind)
            grid = (len(self._rows.rows), cdiv(channels, config.sizes["CHANNELS"]))
            launch(
                *(_convolve, grid, *self._rows, x, weight, bias, tails, out),
                *(x.stride(0), channels),
                config=config,
                TAPS=shape.num_taps, HAS_BIAS=bias is not None, HAS_SILU=shape.has_silu,
            )  # fmt: skip
        return out

    def apply_delta_rule(
        self, layer: int, qkv: Tensor, a: Tensor, b: Tensor, weights: RuleWeights
    ) -> Tensor:
        """Apply the gated delta rule to each span; see `RecurrentBackend`."""
        rule = self.shapes[layer].rule
        assert isinstance(rule, GatedDelta)
        out = self._empty(qkv, (len(qkv), rule.num_value_heads, rule.value_dim))
        for kind in self._kinds():
            parts = (self._rows, qkv, a, b, weights, rule, self.states[layer], out)
            apply_delta_rule(kind, *parts)
        return out

    def scan(self, layer: int, xbc: Tensor, dt: Tensor, weights: RuleWeights) -> Tensor:
        """Apply the state space to each span; see `RecurrentBackend`."""
        rule = self.shapes[layer].rule
        assert isinstance(rule, StateSpace)
        out = self._empty(xbc, (len(xbc), rule.num_heads, rule.head_dim))
        for kind in self._kinds():
            scan(kind, self._rows, xbc, dt, weights, rule, self.states[layer], out)
        return out

    def gate_and_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        num_groups: int,
        eps: float,
        *,
        is_norm_first: bool,
    ) -> Tensor:
        """Gate and norm a rule's output; see `RecurrentBackend`."""
        out = torch.empty_like(x)
        width = x.shape[1] // num_groups if num_groups else GATED
        config = config_for("gated_norm", arch_of(x.device), block=next_power_of_2(width))
        launch(
            *(_gate_and_norm, (len(x), cdiv(x.shape[1], width)), x, gate, weight, out),
            *(gate.stride(0), x.shape[1], width, 0 if weight is None else len(weight), eps),
            config=config,
            BLOCK=next_power_of_2(width), HAS_NORM=num_groups > 0, IS_NORM_FIRST=is_norm_first,
        )  # fmt: skip
        return out

    def _kinds(self) -> Iterator[str]:
        """Yield the kinds of spans that need a launch."""
        launches = self.launches if self._captured is None else self._captured
        yield "decodes"
        if launches & CHUNKS:
            yield "chunks"

    def _empty(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate the outputs of spans; tokens of no span have zeros."""
        if self._captured is None and len(x) == self._num_tokens:
            return x.new_empty(shape)
        return x.new_zeros(shape)


@triton.jit(do_not_specialize=["channels"])
def _convolve(
    starts,
    sources,
    rows,
    x,  # [T, C], its rows `stride` apart
    weight,  # [C, TAPS]
    bias,  # [C]
    tails,  # [rows, TAPS - 1, C]
    out,  # [T, C]
    stride,
    channels,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolve some channels of a span, TOKENS at a time (1: only spans of one token)."""
    span = tl.program_id(0)
    begin, end = tl.load(starts + span), tl.load(starts + span + 1)
    if TOKENS == 1:
        if end - begin != 1:
            return
    elif end - begin < 2:
        return
    KEPT: tl.constexpr = TAPS - 1
    source = tl.load(sources + span).to(tl.int64)
    row = tl.load(rows + span).to(tl.int64)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_column = columns < channels
    before = tails + source * KEPT * channels + columns
    for first in range(begin, end, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        is_number = (tokens < end)[:, None] & is_column[None, :]
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS):
            places = (tokens - KEPT + tap)[:, None]
            is_own = places >= begin
            own = tl.load(
                x + places.to(tl.int64) * stride + columns[None, :], is_number & is_own, other=0.0
            )
            kept = tl.load(
                before[None, :] + (places - begin + KEPT) * channels,
                is_number & (places < begin) & (source >= 0),
                other=0.0,
            )
            taps = tl.load(weight + columns * TAPS + tap, is_column, other=0.0).to(tl.float32)
            total += tl.where(is_own, own, kept).to(tl.float32) * taps[None, :]
        if HAS_BIAS:
            total += tl.load(bias + columns, is_column, other=0.0).to(tl.float32)[None, :]
        if HAS_SILU:
            total *= tl.sigmoid(total)
        at = tokens.to(tl.int64)[:, None] * channels + columns[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), is_number)
    tl.debug_barrier()  # all may have read from this row
    for number in tl.static_range(KEPT):
        place = end - KEPT + number
        own = tl.load(x + place.to(tl.int64) * stride + columns, is_column & (place >= begin))
        is_kept = is_column & (place < begin) & (source >= 0)
        kept = tl.load(before + (place - begin + KEPT) * channels, is_kept, other=0.0)
        last = tl.where(place >= begin, own, kept)
        tl.store(tails + (row * KEPT + number) * channels + columns, last, is_column)


@triton.jit(do_not_specialize=["total", "num_weights", "eps"])
def _gate_and_norm(
    x,  # [T, total]
    gate,  # [T, total], its rows `stride` apart
    weight,
    out,
    stride,
    total,
    width,
    num_weights,
    eps,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_NORM_FIRST: tl.constexpr,
):
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * width
    columns = tl.arange(0, BLOCK)
    is_number = (columns < width) & (first + columns < total)
    numbers = tl.load(x + token * total + first + columns, is_number, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * stride + first + columns, is_number, other=0.0).to(tl.float32)
    opened *= tl.sigmoid(opened)
    if not (IS_NORM_FIRST and HAS_NORM):
        numbers *= opened
    if HAS_NORM:
        factors = tl.load(weight + first % num_weights + columns, is_number, other=0.0)
        mean = tl.sum(numbers * numbers, 0) / width
        numbers = numbers / tl.sqrt(mean + eps) * factors.to(tl.float32)
        if IS_NORM_FIRST:
            numbers *= opened
    at = out + token * total + first + columns
    tl.store(at, numbers.to(out.dtype.element_ty), is_number)
