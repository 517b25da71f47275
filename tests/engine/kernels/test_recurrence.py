"""Recurrent backends: each span goes on from its row as if its sequence had been computed whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tidemill.engine.kernels.cpu.recurrence import CpuRecurrence
from tidemill.engine.kernels.recurrence import (
    GatedDelta,
    RecurrentBackend,
    RecurrentShape,
    ReferenceRecurrence,
    RuleWeights,
    StateSpace,
)
from tidemill.engine.kernels.step import Step
from tidemill.engine.kernels.triton.recurrence import TritonRecurrence

CPU = torch.device("cpu")
BACKENDS = {"reference": ReferenceRecurrence, "cpu": CpuRecurrence, "triton": TritonRecurrence}
DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12)
SPACE = StateSpace(num_heads=6, head_dim=20, num_groups=2, state_dim=5, dt_limit=(0.1, 2.0))
LENGTHS = [1, 2, 3, 9, 40]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start:stop` of a sequence, from a row (-1: zeros) to a row."""

    sequence: int
    start: int
    stop: int
    source: int
    row: int


def step_of(pieces: Sequence[Piece]) -> Step:
    """Return the step of some pieces, with the arrays that recurrences read."""
    counts = [piece.stop - piece.start for piece in pieces]
    total = sum(counts)
    anything = np.zeros(total, np.int64)
    return Step.pack(
        0,
        CPU,
        token_ids=anything,
        positions=anything,
        slots=anything,
        query_starts=np.cumsum([0, *counts]),
        context_lengths=np.array([piece.start for piece in pieces]),
        page_starts=np.arange(len(pieces) + 1),
        pages=np.arange(len(pieces)),
        logit_rows=np.arange(total),
        state_sources=np.array([piece.source for piece in pieces]),
        state_rows=np.array([piece.row for piece in pieces]),
    )


def backend_of(name: str, shape: RecurrentShape, dtype: torch.dtype) -> RecurrentBackend:
    """Return a backend of one layer whose rows contain random old states."""
    made = BACKENDS[name]([shape], 9, dtype, CPU)
    for rows in (*made.tails, *made.states):
        rows.fill_(torch.nan)
    return made


def shape_of(rule: GatedDelta | StateSpace | None) -> RecurrentShape:
    """Return a layer of a rule, or of a convolution of 30 channels alone."""
    channels = 30 if rule is None else sum(rule.widths)
    return RecurrentShape(channels, num_taps=4, has_silu=rule is not None, rule=rule)


class Inputs:
    """Random inputs of some sequences, and a layer's output for each whole sequence."""

    def __init__(self, rule: GatedDelta | StateSpace | None, dtype: torch.dtype) -> None:
        torch.manual_seed(3)
        self.shape = shape_of(rule)
        self.heads = 1 if rule is None else rule.state_shape[0]
        channels = self.shape.num_channels
        self.x = [torch.randn(n, channels).to(dtype) for n in LENGTHS]
        self.a, self.b = ([torch.randn(n, self.heads).to(dtype) for n in LENGTHS] for _ in "ab")
        self.taps, self.bias = torch.randn(channels, 4).to(dtype), torch.randn(channels).to(dtype)
        self.weights = RuleWeights(*torch.randn(3, self.heads).unbind())

    def run(self, backend: RecurrentBackend, pieces: Sequence[Piece]) -> list[Tensor]:
        """Run a step and return the output of each piece."""
        backend.prepare(step_of(pieces))
        x, a, b = (
            torch.cat([of[piece.sequence][piece.start : piece.stop] for piece in pieces])
            for of in (self.x, self.a, self.b)
        )
        out = backend.convolve(0, x, self.taps, self.bias)
        if isinstance(self.shape.rule, GatedDelta):
            out = backend.apply_delta_rule(0, out, a, b, self.weights)
        elif self.shape.rule is not None:
            out = backend.scan(0, out, a, self.weights)
        return list(out.float().flatten(1).split([piece.stop - piece.start for piece in pieces]))

    def expected(self, index: int) -> Tensor:
        """Return a whole sequence's outputs, in float64 and by the definition, token by token."""
        taps, bias = self.taps.double(), self.bias.double()
        padded = functional.pad(self.x[index].double().T, (3, 0))
        mixed = functional.conv1d(padded[None], taps[:, None], bias, groups=len(taps))[0].T
        if self.shape.rule is None:
            return mixed
        mixed = functional.silu(mixed)
        by = _delta if isinstance(self.shape.rule, GatedDelta) else _space
        weights = RuleWeights(*(weight.double() for weight in self.weights if weight is not None))
        return by(mixed, self.a[index].double(), self.b[index].double(), weights)


def _delta(x: Tensor, a: Tensor, b: Tensor, weights: RuleWeights) -> Tensor:
    query, key, value = x.split(list(DELTA.widths), dim=1)
    query, key = (functional.normalize(y.view(-1, 2, 8), dim=2) for y in (query, key))
    state, outs = torch.zeros(4, 8, 12).double(), []
    for t in range(len(x)):
        decay = (-weights.a_log.exp() * functional.softplus(a[t] + weights.dt_bias)).exp()
        k, q = (y[t].repeat_interleave(2, dim=0)[:, :, None] for y in (key, query))  # [Hv, Dk, 1]
        v = value[t].view(4, 1, 12)
        state = state * decay[:, None, None]
        state = state + k @ (b[t].sigmoid()[:, None, None] * (v - k.mT @ state))
        outs.append((q.mT @ state).flatten() / 8**0.5)
    return torch.stack(outs)


def _space(x: Tensor, dt: Tensor, _: Tensor, weights: RuleWeights) -> Tensor:
    assert weights.d is not None
    inputs, b, c = x.split(list(SPACE.widths), dim=1)
    state, outs = torch.zeros(6, 20, 5).double(), []
    for t in range(len(x)):
        step = functional.softplus(dt[t] + weights.dt_bias).clamp(0.1, 2.0)[:, None]  # [H, 1]
        own = inputs[t].view(6, 20)
        in_b, in_c = (y[t].view(2, 5).repeat_interleave(3, dim=0) for y in (b, c))
        decay = (-weights.a_log.exp()[:, None] * step).exp()
        state = state * decay[:, :, None] + (step * own)[:, :, None] * in_b[:, None]
        outs.append(((state @ in_c[:, :, None])[:, :, 0] + weights.d[:, None] * own).flatten())
    return torch.stack(outs)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rule", [DELTA, SPACE, None], ids=["delta", "space", "convolution"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_of_any_length_are_the_sequence_computed_whole(
    name: str, rule: GatedDelta | StateSpace | None, dtype: torch.dtype
) -> None:
    """Other sequences run in the same step, in place or from row to row, over any old contents."""
    if name == "triton" and dtype == torch.bfloat16:
        dtype = torch.float16  # bf16 has no products where kernels are interpreted
    inputs = Inputs(rule, dtype)
    backend = backend_of(name, inputs.shape, dtype)
    got: list[list[Tensor]] = [[] for _ in LENGTHS]
    done, rows = [0] * len(LENGTHS), [-1] * len(LENGTHS)
    rng, free = np.random.default_rng(5), list(range(9))
    while any(stop < length for stop, length in zip(done, LENGTHS, strict=True)):
        pieces = []
        for index in rng.permutation(len(LENGTHS)).tolist():
            if done[index] == LENGTHS[index] or rng.random() < 0.3:
                continue
            stop = min(LENGTHS[index], done[index] + int(rng.choice([1, 1, 2, 5, 17])))
            has_moved = rows[index] < 0 or rng.random() < 0.3
            row = free.pop(0) if has_moved else rows[index]
            pieces.append(Piece(index, done[index], stop, rows[index], row))
        if not pieces:
            continue
        for piece, out in zip(pieces, inputs.run(backend, pieces), strict=True):
            got[piece.sequence].append(out)
            if piece.source not in (-1, piece.row):
                free.append(piece.source)
            done[piece.sequence], rows[piece.sequence] = piece.stop, piece.row
    bound = 1e-4 if dtype == torch.float32 else 0.06
    for index, outs in enumerate(got):
        torch.testing.assert_close(
            torch.cat(outs).double(), inputs.expected(index), atol=bound, rtol=bound
        )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rule", [DELTA, SPACE], ids=["delta", "space"])
def test_a_row_that_is_only_read_stays_a_snapshot(name: str, rule: GatedDelta | StateSpace) -> None:
    """Two sequences go on from it in the same step, and a third later, all as from the first."""
    inputs = Inputs(rule, torch.float32)
    backend = backend_of(name, inputs.shape, torch.float32)
    inputs.run(backend, [Piece(4, 0, 13, -1, 2)])
    first, second = inputs.run(backend, [Piece(4, 13, 40, 2, 5), Piece(4, 13, 40, 2, 7)])
    (third,) = inputs.run(backend, [Piece(4, 13, 40, 2, 2)])
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, third)
    torch.testing.assert_close(first.double(), inputs.expected(4)[13:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize("is_norm_first", [False, True])
def test_gated_norms_agree(groups: int, *, is_norm_first: bool) -> None:
    """Weights are one per number, or shared by groups of any size."""
    torch.manual_seed(1)
    x, gate = torch.randn(2, 7, 24).unbind()
    for weight in (torch.randn(24), torch.randn(24 // max(groups, 1))):
        plain, *others = (
            backend_of(name, shape_of(DELTA), torch.float32).gate_and_norm(
                x, gate, weight if groups else None, groups, 1e-5, is_norm_first=is_norm_first
            )
            for name in BACKENDS
        )
        for own in others:
            torch.testing.assert_close(own, plain)


def test_keys_that_repeat_lose_no_digits_in_a_chunk() -> None:
    """One token repeats without decay, so that sums of powers would be large."""
    inputs = Inputs(DELTA, torch.float32)
    inputs.x[4] = inputs.x[4][:1].expand(40, -1).contiguous()
    inputs.b[4] = torch.full_like(inputs.b[4], 9.0)
    inputs.a[4] = torch.full_like(inputs.a[4], -30.0)
    (got,) = inputs.run(backend_of("triton", inputs.shape, torch.float32), [Piece(4, 0, 40, -1, 0)])
    torch.testing.assert_close(got.double(), inputs.expected(4), atol=1e-5, rtol=1e-5)
