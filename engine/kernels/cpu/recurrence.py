"""Recurrent backend on the CPU: rows of states, and recurrences over them, a span and head each.

Arithmetic is fp32, token after token, so that a row is bit-identical whatever else is in the batch.
The state of a head stays in the cache from one token of a span to the next; a decode reads and
writes it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..host_memory import zeros
from ..recurrence import L2_EPS, GatedDelta, RecurrentShape, RuleWeights, StateSpace, row_bytes
from ..step import Step
from .jit_cache import compiled, inlined
from .scalars import DTYPES, elements, exp, narrow, sigmoid, widen
from .simd import LANES
from .state_update import update_delta, update_space
from .thread_pool import parallel_for, shared_pool

# Channels of one item of a convolution, and numbers of one of a gated norm.
CHANNELS = 512
NUMBERS = 4096
# Tokens whose inputs a convolution has in fp32 at a time.
TOKENS = 16
NOTHING = np.zeros(0, np.float32)


class CpuRecurrence:
    """Rows of tails `[K - 1, C]` and states, those of a state space `[H, N, P]`, and kernels."""

    def __init__(
        self,
        shapes: Sequence[RecurrentShape],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert self.supports(dtype, device)
        self.shapes = tuple(shapes)
        rows = num_rows + 1
        self.tails = [
            zeros((rows, shape.num_taps - 1, shape.num_channels), dtype) for shape in shapes
        ]
        self.states = [_states(shape, rows) for shape in shapes]

    @classmethod
    def row_bytes(cls, shapes: Sequence[RecurrentShape], dtype: torch.dtype) -> int:
        """Return the bytes that one row takes over all layers."""
        return row_bytes(shapes, dtype)

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the kernels compute in this dtype."""
        return device.type == "cpu" and dtype in DTYPES

    def prepare(self, step: Step) -> None:
        """Read the rows of the next forward pass's spans; valid until the next call."""
        assert step.state_rows is not None
        assert step.state_sources is not None
        self._starts = step.query_starts.numpy()
        self._rows = (step.state_sources.numpy(), step.state_rows.numpy())

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve each span after the inputs stored in its row; see `RecurrentBackend`."""
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        added = NOTHING if bias is None else bias.float().numpy()
        _convolve(
            *(shared_pool(), self._starts, *self._rows, elements(x)),
            *(weight.float().T.contiguous().numpy(), added, self.shapes[layer].has_silu),
            *(elements(self.tails[layer]), elements(out)),
        )
        return out

    def apply_delta_rule(
        self, layer: int, qkv: Tensor, a: Tensor, b: Tensor, weights: RuleWeights
    ) -> Tensor:
        """Apply the gated delta rule to each span; see `RecurrentBackend`."""
        rule = self.shapes[layer].rule
        assert isinstance(rule, GatedDelta)
        out = torch.empty(len(qkv), rule.num_value_heads, rule.value_dim, dtype=qkv.dtype)
        _delta_rule(
            *(shared_pool(), self._starts, *self._rows, elements(qkv.contiguous())),
            *(a.float().contiguous().numpy(), b.float().contiguous().numpy()),
            *(weights.a_log.numpy(), weights.dt_bias.numpy(), rule.num_key_heads),
            *(self.states[layer].numpy(), elements(out)),
        )
        return out

    def scan(self, layer: int, xbc: Tensor, dt: Tensor, weights: RuleWeights) -> Tensor:
        """Apply the state space to each span; see `RecurrentBackend`."""
        rule = self.shapes[layer].rule
        assert isinstance(rule, StateSpace)
        out = torch.empty(len(xbc), rule.num_heads, rule.head_dim, dtype=xbc.dtype)
        skip = torch.zeros(rule.num_heads) if weights.d is None else weights.d
        limits = np.array(rule.dt_limit, np.float32)
        _scan(
            *(shared_pool(), self._starts, *self._rows, elements(xbc.contiguous())),
            *(dt.float().contiguous().numpy(), weights.a_log.numpy(), weights.dt_bias.numpy()),
            *(skip.numpy(), limits, rule.num_groups),
            *(self.states[layer].numpy(), elements(out)),
        )
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
        by = NOTHING if weight is None else weight.float().numpy()
        _gate_and_norm(
            *(shared_pool(), elements(x), elements(gate.contiguous()), by, num_groups),
            *(np.float32(eps), is_norm_first, elements(out)),
        )
        return out


def _states(shape: RecurrentShape, rows: int) -> Tensor:
    """Return the states of a layer's rows, the last axis padded to whole vectors."""
    if shape.rule is None:
        return torch.empty(0)
    heads, height, width = shape.rule.state_shape
    if isinstance(shape.rule, StateSpace):
        height, width = width, height
    return zeros((rows, heads, height, -(-width // LANES) * LANES), torch.float32)


@compiled
def _convolve(
    words: Any,
    starts: Any,
    sources: Any,
    rows: Any,
    x: Any,  # [T, C]
    weight: Any,  # [K, C]
    bias: Any,  # [C], or none
    has_silu: Any,
    tails: Any,  # [rows, K - 1, C]
    out: Any,
) -> None:
    blocks = (x.shape[1] + CHANNELS - 1) // CHANNELS
    arguments = (starts, sources, rows, x, weight, bias, has_silu, tails, out)
    parallel_for(words, (len(starts) - 1) * blocks, _convolve_block, arguments)


@compiled
def _convolve_block(
    item: Any,
    starts: Any,
    sources: Any,
    rows: Any,
    x: Any,
    weight: Any,
    bias: Any,
    has_silu: Any,
    tails: Any,
    out: Any,
) -> None:
    """Convolve some channels of a span, and keep its last inputs."""
    blocks = (x.shape[1] + CHANNELS - 1) // CHANNELS
    span, first = item // blocks, item % blocks * CHANNELS
    width, kept = min(CHANNELS, x.shape[1] - first), tails.shape[1]
    start, stop = starts[span], starts[span + 1]
    inputs = np.empty((kept + min(TOKENS, stop - start), width), np.float32)
    inputs[:kept] = 0
    total = np.empty(width, np.float32)
    if sources[span] >= 0:
        for k in range(kept):
            _widen_row(tails[sources[span], k, first : first + width], inputs[k])
    while start < stop:
        count = min(TOKENS, stop - start)
        for t in range(count):
            _widen_row(x[start + t, first : first + width], inputs[kept + t])
        for t in range(count):
            _mix_taps(inputs[t : t + kept + 1], weight[:, first : first + width], total)
            if len(bias):
                for c in range(width):
                    total[c] += bias[first + c]
            if has_silu:
                for c in range(width):
                    total[c] *= sigmoid(total[c])
            _narrow_row(total, out[start + t, first : first + width])
        for k in range(kept):
            inputs[k] = inputs[count + k]
        start += count
    for k in range(kept):
        _narrow_row(inputs[k], tails[rows[span], k, first : first + width])


@inlined
def _mix_taps(inputs: Any, weight: Any, total: Any) -> None:
    """Write the weighted sum of the inputs `[K, C]` under the taps."""
    if len(inputs) == 4:
        for c in range(len(total)):
            before = weight[0, c] * inputs[0, c] + weight[1, c] * inputs[1, c]
            total[c] = before + weight[2, c] * inputs[2, c] + weight[3, c] * inputs[3, c]
        return
    total[:] = 0
    for k in range(len(inputs)):
        for c in range(len(total)):
            total[c] += weight[k, c] * inputs[k, c]


@inlined
def _widen_row(row: Any, out: Any) -> None:
    for c in range(len(out)):
        out[c] = widen(row[c])


@inlined
def _narrow_row(row: Any, out: Any) -> None:
    for c in range(len(row)):
        out[c] = narrow(row[c], out[0])


@inlined
def _begin(states: Any, source: Any, row: Any, head: Any) -> None:
    """Copy the initial state of a span to its row."""
    if source < 0:
        states[row, head] = 0
    elif source != row:
        states[row, head] = states[source, head]


@inlined
def _softplus(x: Any) -> Any:
    return max(x, np.float32(0)) + np.log1p(exp(-abs(x)))


@compiled
def _delta_rule(
    words: Any,
    starts: Any,
    sources: Any,
    rows: Any,
    qkv: Any,  # [T, sum(widths)]
    a: Any,  # [T, Hv]
    b: Any,  # [T, Hv]
    a_log: Any,  # [Hv]
    dt_bias: Any,  # [Hv]
    num_key_heads: Any,
    states: Any,  # [rows, Hv, Dk, Dv]
    out: Any,  # [T, Hv, Dv]
) -> None:
    arguments = (starts, sources, rows, qkv, a, b, a_log, dt_bias, num_key_heads, states, out)
    parallel_for(words, (len(starts) - 1) * states.shape[1], _delta_head, arguments)


@compiled
def _delta_head(
    item: Any,
    starts: Any,
    sources: Any,
    rows: Any,
    qkv: Any,
    a: Any,
    b: Any,
    a_log: Any,
    dt_bias: Any,
    num_key_heads: Any,
    states: Any,
    out: Any,
) -> None:
    """Apply the rule to one head of a span."""
    heads, height, stride = states.shape[1:]
    width = out.shape[2]
    span, head = item // heads, item % heads
    key_at = head // (heads // num_key_heads) * height
    keys = num_key_heads * height
    value_at = 2 * keys + head * width
    _begin(states, sources[span], rows[span], head)
    flat, at = states.reshape(-1), (rows[span] * heads + head) * height * stride
    rate = -np.exp(a_log[head])
    scaling = np.float32(1) / np.sqrt(np.float32(height))
    query, key = np.empty(height, np.float32), np.empty(height, np.float32)
    value, mixed = np.zeros(stride, np.float32), np.empty(stride, np.float32)
    for t in range(starts[span], starts[span + 1]):
        token = qkv[t]
        _normed(token, key_at, scaling, query)
        _normed(token, keys + key_at, np.float32(1), key)
        decay = exp(rate * _softplus(a[t, head] + dt_bias[head]))
        for j in range(width):
            value[j] = widen(token[value_at + j])
        beta = sigmoid(b[t, head])
        update_delta(flat, at, height, stride, key, query, value, mixed, decay, beta)
        for j in range(width):
            out[t, head, j] = narrow(mixed[j], qkv[0, 0])


@inlined
def _normed(token: Any, first: Any, scaling: Any, out: Any) -> None:
    """Write the L2 norm of a head's numbers, scaled."""
    total = np.float32(0)
    for i in range(len(out)):
        out[i] = widen(token[first + i])
        total += out[i] * out[i]
    scale = scaling / np.sqrt(total + np.float32(L2_EPS))
    for i in range(len(out)):
        out[i] *= scale


@compiled
def _scan(
    words: Any,
    starts: Any,
    sources: Any,
    rows: Any,
    xbc: Any,  # [T, sum(widths)]
    dt: Any,  # [T, H]
    a_log: Any,  # [H]
    dt_bias: Any,  # [H]
    skip: Any,  # [H]
    limits: Any,  # the least dt, and the most
    num_groups: Any,
    states: Any,  # [rows, H, N, P]
    out: Any,  # [T, H, P]
) -> None:
    arguments = (starts, sources, rows, xbc, dt, a_log, dt_bias, skip, limits, num_groups)
    parallel_for(words, (len(starts) - 1) * states.shape[1], _scan_head, (*arguments, states, out))


@compiled
def _scan_head(
    item: Any,
    starts: Any,
    sources: Any,
    rows: Any,
    xbc: Any,
    dt: Any,
    a_log: Any,
    dt_bias: Any,
    skip: Any,
    limits: Any,
    num_groups: Any,
    states: Any,
    out: Any,
) -> None:
    """Apply the state space to one head of a span."""
    heads, height, stride = states.shape[1:]
    width = out.shape[2]
    span, head = item // heads, item % heads
    b_at = heads * width + head // (heads // num_groups) * height
    c_at = b_at + num_groups * height
    _begin(states, sources[span], rows[span], head)
    flat, at = states.reshape(-1), (rows[span] * heads + head) * height * stride
    rate = -np.exp(a_log[head])
    b, c = np.empty(height, np.float32), np.empty(height, np.float32)
    x, y = np.zeros(stride, np.float32), np.zeros(stride, np.float32)
    for t in range(starts[span], starts[span + 1]):
        token = xbc[t]
        step = min(max(_softplus(dt[t, head] + dt_bias[head]), limits[0]), limits[1])
        for i in range(height):
            b[i], c[i] = widen(token[b_at + i]), widen(token[c_at + i])
        for j in range(width):
            value = widen(token[head * width + j])
            y[j] = skip[head] * value
            x[j] = step * value
        update_space(flat, at, height, stride, b, c, x, y, exp(rate * step))
        for j in range(width):
            out[t, head, j] = narrow(y[j], xbc[0, 0])


@compiled
def _gate_and_norm(
    words: Any,
    x: Any,  # [T, W]
    gate: Any,  # [T, W]
    weight: Any,  # [W], or of one group, or none
    num_groups: Any,
    eps: Any,
    is_norm_first: Any,
    out: Any,
) -> None:
    at_once = max(1, NUMBERS // x.shape[1])
    arguments = (at_once, x, gate, weight, num_groups, eps, is_norm_first, out)
    parallel_for(words, (len(x) + at_once - 1) // at_once, _gate_rows, arguments)


@compiled
def _gate_rows(
    item: Any,
    at_once: Any,
    x: Any,
    gate: Any,
    weight: Any,
    num_groups: Any,
    eps: Any,
    is_norm_first: Any,
    out: Any,
) -> None:
    groups = max(num_groups, 1)
    width = x.shape[1] // groups
    both = np.empty(width, np.float32)
    for t in range(item * at_once, min((item + 1) * at_once, len(x))):
        for group in range(groups):
            first, total = group * width, np.float32(0)
            for i in range(width):
                value, opened = widen(x[t, first + i]), widen(gate[t, first + i])
                opened *= sigmoid(opened)
                gated = value * opened
                both[i] = gated
                seen = value if is_norm_first else gated
                total += seen * seen
            scale = np.float32(1)
            if num_groups:
                scale /= np.sqrt(total / np.float32(width) + eps)
                at = first % len(weight)
                for i in range(width):
                    out[t, first + i] = narrow(both[i] * scale * weight[at + i], x[0, 0])
            else:
                for i in range(width):
                    out[t, first + i] = narrow(both[i], x[0, 0])
