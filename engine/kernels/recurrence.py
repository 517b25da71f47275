"""Recurrent layers (gated DeltaNet, Mamba-2, short convolutions): shapes, backend, reference.

The state of a sequence is a row. For each layer it has the last inputs of its causal convolution,
and a matrix per head, in fp32. A span starts from one row and leaves its state in another or the
same one, so a row that is no longer written is a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from .step import Step

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated delta rule (Yang et al., Gated Delta Networks, 2024).

    A value head's state is S `[Dk, Dv]`: S ← exp(g)·S; S ← S + k ⊗ β·(v − kᵀS); o = qᵀS.
    Queries and keys are L2-normed, queries scaled by Dk^-½; value head h reads key head
    h // (`num_value_heads` // `num_key_heads`). g = −exp(a_log)·softplus(a + dt_bias),
    β = sigmoid(b).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of a sequence's state."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of all queries, keys and values of a token."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Selective state space of Mamba-2 (Dao and Gu, Transformers are SSMs, 2024).

    A head's state is S `[P, N]`: S ← exp(dt·A)·S + dt·(x ⊗ B); y = S·C + D·x, where
    dt = softplus(dt + dt_bias), clamped to `dt_limit`, and A = −exp(a_log). Heads share the B and C
    of their group.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of a sequence's state."""
        return self.num_heads, self.head_dim, self.state_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of all inputs x, of all B and of all C of a token."""
        group = self.num_groups * self.state_dim
        return self.num_heads * self.head_dim, group, group


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Recurrence of one layer: a causal depthwise convolution, and the rule that follows it.

    A convolution of `num_taps` keeps the last `num_taps` − 1 inputs of its `num_channels`; with
    `has_silu` SiLU follows. The rule, if any, reads the channels as `rule.widths` split them.
    """

    num_channels: int
    num_taps: int
    has_silu: bool = True
    rule: GatedDelta | StateSpace | None = None


class RuleWeights(NamedTuple):
    """Weights of a rule, fp32, each `[heads]`; `d` is for a state space alone."""

    a_log: Tensor
    dt_bias: Tensor
    d: Tensor | None = None


class RecurrentBackend(Protocol):
    """Rows of all recurrent layers, in its own layout, and the layers' recurrences.

    `prepare` is called once per step, before the first layer. Span s starts from row
    `step.state_sources[s]`, or from zeros where that is -1, and leaves its state in row
    `step.state_rows[s]`; no span reads a row that another writes. There are `num_rows` rows, and
    one more for tokens of no span.
    """

    def prepare(self, step: Step) -> None:
        """Prepare for the next forward pass, that of `step`; valid until the next call."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve `x [T, C]` along each span, by `weight [C, K]`, and activate → `[T, C]`."""

    def apply_delta_rule(
        self, layer: int, qkv: Tensor, a: Tensor, b: Tensor, weights: RuleWeights
    ) -> Tensor:
        """Apply a `GatedDelta`: `qkv [T, sum(widths)]`, `a, b [T, Hv]` → `[T, Hv, Dv]`."""

    def scan(self, layer: int, xbc: Tensor, dt: Tensor, weights: RuleWeights) -> Tensor:
        """Apply a `StateSpace`: `xbc [T, sum(widths)]`, `dt [T, H]` → `[T, H, P]`."""

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
        """Return the RMS norm of each of `num_groups` of `x [T, W]`, times SiLU(`gate [T, W]`).

        The gate comes before the norm unless `is_norm_first`; without groups there is no norm. The
        `weight` is `[W]`, or of one group.
        """


@runtime_checkable
class CapturableRecurrence(RecurrentBackend, Protocol):
    """A backend whose launches a CUDA graph can replay; see `CapturableBackend`.

    Padding has no tokens in its spans; the outputs of tokens of no span are unused.
    """

    launches: int
    all_launches: int

    def capturing(self, launches: int) -> AbstractContextManager[None]:
        """Launch for any step with these `launches`, not only the prepared one."""


class RecurrentBackendType(Protocol):
    """A class of recurrent backends. `dtype` is the network's, and that of convolutions' rows."""

    def __call__(
        self,
        shapes: Sequence[RecurrentShape],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RecurrentBackend:
        """Allocate the rows of every layer."""

    def row_bytes(self, shapes: Sequence[RecurrentShape], dtype: torch.dtype) -> int:
        """Return the bytes that one row takes over all layers."""


class _Span(NamedTuple):
    """Packed tokens `start:stop` of one sequence, its rows before (-1: zeros) and after."""

    start: int
    stop: int
    source: int
    row: int


class ReferenceRecurrence:
    """Recurrent backend in plain torch, a span and a token at a time."""

    def __init__(
        self,
        shapes: Sequence[RecurrentShape],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = tuple(shapes)
        rows = num_rows + 1
        self.tails = [  # [rows, C, K - 1]
            torch.zeros(rows, shape.num_channels, shape.num_taps - 1, dtype=dtype, device=device)
            for shape in shapes
        ]
        self.states = [  # [rows, *state_shape] fp32
            torch.zeros(rows, *(shape.rule.state_shape if shape.rule else (0,)), device=device)
            for shape in shapes
        ]
        self._spans: list[_Span] = []

    @classmethod
    def row_bytes(cls, shapes: Sequence[RecurrentShape], dtype: torch.dtype) -> int:
        """Return the bytes that one row takes over all layers."""
        return row_bytes(shapes, dtype)

    def prepare(self, step: Step) -> None:
        """Read the rows of the next forward pass's spans; valid until the next call."""
        host = step.host
        assert host.state_rows is not None
        assert host.state_sources is not None
        starts = host.query_starts.tolist()
        sources, rows = host.state_sources.tolist(), host.state_rows.tolist()
        self._spans = list(map(_Span, starts[:-1], starts[1:], sources, rows))

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve each span after the inputs stored in its row."""
        shape, tails = self.shapes[layer], self.tails[layer]
        out = torch.zeros_like(x)
        for span in self._spans:
            tail = tails[span.source] if span.source >= 0 else torch.zeros_like(tails[0])
            inputs = torch.cat([tail, x[span.start : span.stop].T], dim=1)  # [C, K - 1 + t]
            tails[span.row] = inputs[:, inputs.shape[1] - tail.shape[1] :]
            mixed = functional.conv1d(
                inputs[None].float(),
                weight[:, None].float(),
                None if bias is None else bias.float(),
                groups=shape.num_channels,
            )[0].T
            out[span.start : span.stop] = functional.silu(mixed) if shape.has_silu else mixed
        return out

    def apply_delta_rule(
        self, layer: int, qkv: Tensor, a: Tensor, b: Tensor, weights: RuleWeights
    ) -> Tensor:
        """Apply the gated delta rule token by token, in fp32."""
        rule = self.shapes[layer].rule
        assert isinstance(rule, GatedDelta)
        tokens, group = len(qkv), rule.num_value_heads // rule.num_key_heads
        query, key, value = torch.split(qkv.float(), list(rule.widths), dim=1)
        query, key = (  # [T, Hv, Dk]
            _l2_norm(x.view(tokens, -1, rule.key_dim)).repeat_interleave(group, dim=1)
            for x in (query, key)
        )
        query, value = query * rule.key_dim**-0.5, value.view(tokens, -1, rule.value_dim)
        decay = delta_decay(a, weights).exp()  # [T, Hv]
        beta = b.float().sigmoid()
        out = torch.zeros_like(value)
        for span, state in self._states(layer):
            for t in range(span.start, span.stop):
                state.mul_(decay[t, :, None, None])
                error = value[t] - torch.einsum("hk,hkv->hv", key[t], state)
                state.add_(key[t, :, :, None] * (beta[t, :, None] * error)[:, None])
                out[t] = torch.einsum("hk,hkv->hv", query[t], state)
        return out.to(qkv.dtype)

    def scan(self, layer: int, xbc: Tensor, dt: Tensor, weights: RuleWeights) -> Tensor:
        """Apply the state space token by token, in fp32."""
        rule = self.shapes[layer].rule
        assert isinstance(rule, StateSpace)
        tokens, group = len(xbc), rule.num_heads // rule.num_groups
        x, b, c = torch.split(xbc.float(), list(rule.widths), dim=1)
        x = x.view(tokens, rule.num_heads, rule.head_dim)
        b, c = (  # [T, H, N]
            y.view(tokens, rule.num_groups, -1).repeat_interleave(group, dim=1) for y in (b, c)
        )
        dt = state_space_dt(dt, rule, weights)  # [T, H]
        decay = (-weights.a_log.exp() * dt).exp()
        out = torch.zeros_like(x)
        for span, state in self._states(layer):
            for t in range(span.start, span.stop):
                state.mul_(decay[t, :, None, None])
                state.add_((dt[t, :, None] * x[t])[:, :, None] * b[t, :, None])
                out[t] = torch.einsum("hpn,hn->hp", state, c[t])
        if weights.d is not None:
            out += weights.d[:, None] * x
        return out.to(xbc.dtype)

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
        """Gate and norm a rule's output, in fp32."""
        wide, gate = x.float(), functional.silu(gate.float())
        if not is_norm_first or not num_groups:
            wide = wide * gate
        if num_groups:
            assert weight is not None
            groups = wide.view(len(x), num_groups, -1)
            mean = groups.square().mean(dim=-1, keepdim=True)
            scaled = groups * torch.rsqrt(mean + eps) * weight.float().view(-1, groups.shape[2])
            wide = scaled.flatten(1)
            if is_norm_first:
                wide = wide * gate
        return wide.to(x.dtype)

    def _states(self, layer: int) -> Iterator[tuple[_Span, Tensor]]:
        """Yield each span with its initial state, and store its final one."""
        states = self.states[layer]
        for span in self._spans:
            state = states[span.source].clone() if span.source >= 0 else torch.zeros_like(states[0])
            yield span, state
            states[span.row] = state


def row_bytes(shapes: Sequence[RecurrentShape], dtype: torch.dtype) -> int:
    """Return the bytes of a sequence's tails and states over all layers."""
    total = 0
    for shape in shapes:
        total += shape.num_channels * (shape.num_taps - 1) * dtype.itemsize
        if shape.rule is not None:
            heads, height, width = shape.rule.state_shape
            total += heads * height * width * torch.float32.itemsize
    return total


def delta_decay(a: Tensor, weights: RuleWeights) -> Tensor:
    """Return the logarithm `[T, Hv]` of the share of the state that a token keeps."""
    return -weights.a_log.exp() * functional.softplus(a.float() + weights.dt_bias)


def state_space_dt(dt: Tensor, rule: StateSpace, weights: RuleWeights) -> Tensor:
    """Return the steps `[T, H]` of a state space."""
    return functional.softplus(dt.float() + weights.dt_bias).clamp(*rule.dt_limit)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)
