"""Attention on the CPU: decodes by a kernel over the pages where they lie, the rest by `spans`.

torch's CPU flash attention wants each sequence's keys contiguous and one call a sequence; here one
parallel loop runs all decodes and key heads of a layer. bfloat16 is widened in registers,
arithmetic is fp32, and a row is summed in page order whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.cpu.compiling import compiled, parallel
from engine.kernels.cpu.scalars import DTYPES, elements, exp, narrow, prefetch, tanh, widen
from engine.kernels.cpu.spans import attend_span
from engine.kernels.reference import ReferenceAttention, Span, gather, spans_of
from engine.kernels.step import Step

LOWEST = np.float32(-1e30)
UNROLL = 4
PAGE_SIZE = 16  # one fp32 vector of AVX-512; a constant, so that loops over a page unroll


class CpuAttention(ReferenceAttention):
    """The reference's pages, with kernels that store tokens and attend the decodes of a step.

    Slots that no token has written do not count in a decode, NaN or not.
    """

    page_size = PAGE_SIZE

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shapes, num_pages, dtype, device)
        assert self.serves(shapes, dtype, device)
        # What no step changes is made once: a step of few sequences is mostly calls.
        self._stored = [
            (elements(keys), elements(values))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        self._masks = [_masks(shape) for shape in self.shapes]
        self._no_sinks = [
            np.full((shape.num_kv_heads, _group(shape)), LOWEST, np.float32)
            for shape in self.shapes
        ]

    @staticmethod
    def serves(shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether the kernels can do all these layers in this dtype."""
        fits = all(shape.key_dim % UNROLL == 0 for shape in shapes)
        return device.type == "cpu" and dtype in DTYPES and fits

    def prepare(self, step: Step) -> None:
        """Take in where the tokens of the coming forward pass lie; valid until the next call."""
        self._step = step
        self._spans = spans_of(step, first=step.num_decodes)
        self._slots = step.slots.numpy()
        lengths, starts, pages = step.context_lengths, step.page_starts, step.pages
        self._contexts = (lengths.numpy(), starts.numpy(), pages.numpy())

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
        self._own = (layer, key, value)
        _store_tokens(
            *self._stored[layer],
            elements(key.contiguous()),
            elements(value.contiguous()),
            self._slots,
        )

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend every token to its sequence up to itself: `[T, Hq, Dk]` → `[T, Hq, Dv]`."""
        shape, num_decodes = self.shapes[layer], self._step.num_decodes
        out = query.new_empty(query.shape[0], shape.num_query_heads, shape.value_dim)
        if num_decodes:
            self._decode(layer, query[:num_decodes], sinks, out[:num_decodes])
        is_plain = not shape.softcap and sinks is None
        for span in self._spans:
            packed = slice(span.start, span.stop)
            if is_plain:
                attend_span(query[packed], *self._seen(layer, span), shape, out[packed])
            else:
                out[packed] = self._attend_span(layer, query, span, sinks)
        return out

    def _seen(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """Return what a span sees, `[Hkv, L, D…]` twice: its own, which was just stored, or all."""
        stored, key, value = self._own
        if span.context == 0 and stored == layer:
            packed = slice(span.start, span.stop)
            return key[packed].transpose(0, 1), value[packed].transpose(0, 1)
        return gather(self.keys[layer], self.values[layer], span.pages, span.length)

    def _decode(self, layer: int, query: Tensor, sinks: Tensor | None, out: Tensor) -> None:
        shape = self.shapes[layer]
        heads, group, rows = shape.num_kv_heads, _group(shape), query.shape[0]
        sink = self._no_sinks[layer]
        if sinks is not None:
            sink = sinks.detach().float().view(heads, group).numpy()
        _decode_items(
            elements(query.contiguous()).reshape(rows, heads, group, shape.key_dim),
            *self._stored[layer],
            *self._contexts,
            *self._masks[layer],
            sink,
            elements(out).reshape(rows, heads, group, shape.value_dim),
        )


def _group(shape: AttentionShape) -> int:
    return shape.num_query_heads // shape.num_kv_heads


def _masks(shape: AttentionShape) -> tuple[np.float32, np.int32, np.float32]:
    """Return scaling, window and softcap as the kernel takes them."""
    window = np.int32(shape.window or np.iinfo(np.int32).max)
    return np.float32(shape.scaling), window, np.float32(shape.softcap)


@parallel
def _store_tokens(keys: Any, values: Any, key: Any, value: Any, slots: Any) -> None:
    for token in numba.prange(slots.shape[0]):
        page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
        for head in range(key.shape[1]):
            for d in range(key.shape[2]):
                keys[page, head, d, offset] = key[token, head, d]
            for d in range(value.shape[2]):
                values[page, head, offset, d] = value[token, head, d]


@compiled
def _decode_item(
    row: Any,
    head: Any,
    unscaled: Any,  # [N, Hkv, G, Dk]
    keys: Any,  # [pages, Hkv, Dk, PAGE_SIZE]
    values: Any,  # [pages, Hkv, PAGE_SIZE, Dv]
    context_lengths: Any,  # [S] int32, S >= N
    page_starts: Any,  # [S + 1] int32
    pages: Any,  # [P] int32
    scaling: Any,
    window: Any,
    softcap: Any,
    sinks: Any,  # [Hkv, G] float32
    mixed: Any,  # [N, Hkv, G, Dv]
) -> None:
    group, key_dim = unscaled.shape[2], unscaled.shape[3]
    value_dim = values.shape[3]
    highest, mass = PAGE_SIZE, PAGE_SIZE + 1
    query = np.empty((group, key_dim), np.float32)
    scratch = np.empty((group, PAGE_SIZE + 2), np.float32)
    out = np.empty((group, value_dim), np.float32)
    for g in range(group):
        for d in range(key_dim):
            query[g, d] = widen(unscaled[row, head, g, d]) * scaling
    pair = np.empty(PAGE_SIZE, np.float32)
    length = context_lengths[row] + 1
    start = page_starts[row]
    first = max(0, length - window)
    for g in range(group):
        scratch[g, highest] = LOWEST
        scratch[g, mass] = 0
        for d in range(value_dim):
            out[g, d] = 0
    last = (length - 1) // PAGE_SIZE
    for index in range(first // PAGE_SIZE, last + 1):
        page = pages[start + index]
        after = pages[start + min(index + 1, last)]
        base = index * PAGE_SIZE
        for g in range(0, group, 2):
            # A pair of query heads shares every widened key; an odd last head is its own pair.
            h = min(g + 1, group - 1)
            for t in range(PAGE_SIZE):
                scratch[g, t] = 0
                pair[t] = 0
            for d in range(0, key_dim, UNROLL):
                if g == 0:
                    prefetch(keys, after, head, d, 0)
                    prefetch(keys, after, head, d + 1, 0)
                    prefetch(keys, after, head, d + 2, 0)
                    prefetch(keys, after, head, d + 3, 0)
                a0, b0 = query[g, d], query[h, d]
                a1, b1 = query[g, d + 1], query[h, d + 1]
                a2, b2 = query[g, d + 2], query[h, d + 2]
                a3, b3 = query[g, d + 3], query[h, d + 3]
                for t in range(PAGE_SIZE):
                    k0 = widen(keys[page, head, d, t])
                    k1 = widen(keys[page, head, d + 1, t])
                    k2 = widen(keys[page, head, d + 2, t])
                    k3 = widen(keys[page, head, d + 3, t])
                    scratch[g, t] += (a0 * k0 + a1 * k1) + (a2 * k2 + a3 * k3)
                    pair[t] += (b0 * k0 + b1 * k1) + (b2 * k2 + b3 * k3)
            for t in range(PAGE_SIZE):
                scratch[h, t] = pair[t]
        for g in range(group):
            if softcap > 0:
                for t in range(PAGE_SIZE):
                    scratch[g, t] = softcap * tanh(scratch[g, t] / softcap)
            peak = scratch[g, highest]
            for t in range(PAGE_SIZE):
                seen = first <= base + t and base + t < length
                x = scratch[g, t] if seen else LOWEST
                scratch[g, t] = x
                peak = max(peak, x)
            shrink = exp(scratch[g, highest] - peak)
            scratch[g, highest] = peak
            added = np.float32(0)
            for t in range(PAGE_SIZE):
                weight = exp(scratch[g, t] - peak)
                scratch[g, t] = weight
                added += weight
            scratch[g, mass] = scratch[g, mass] * shrink + added
            for d in range(value_dim):
                out[g, d] *= shrink
        # Slots beyond the length are not read: what they hold, NaN even, is not ours.
        count = min(PAGE_SIZE, length - base)
        whole = count - count % UNROLL
        for g in range(0, group, 2):
            h = g + 1
            for t in range(0, whole, UNROLL):
                if g == 0:
                    for d in range(0, value_dim, 16):
                        prefetch(values, after, head, t, d)
                        prefetch(values, after, head, t + 1, d)
                        prefetch(values, after, head, t + 2, d)
                        prefetch(values, after, head, t + 3, d)
                a0, a1 = scratch[g, t], scratch[g, t + 1]
                a2, a3 = scratch[g, t + 2], scratch[g, t + 3]
                if h == group:
                    for d in range(value_dim):
                        v0 = widen(values[page, head, t, d])
                        v1 = widen(values[page, head, t + 1, d])
                        v2 = widen(values[page, head, t + 2, d])
                        v3 = widen(values[page, head, t + 3, d])
                        out[g, d] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
                    continue
                b0, b1 = scratch[h, t], scratch[h, t + 1]
                b2, b3 = scratch[h, t + 2], scratch[h, t + 3]
                for d in range(value_dim):
                    v0 = widen(values[page, head, t, d])
                    v1 = widen(values[page, head, t + 1, d])
                    v2 = widen(values[page, head, t + 2, d])
                    v3 = widen(values[page, head, t + 3, d])
                    out[g, d] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
                    out[h, d] += (b0 * v0 + b1 * v1) + (b2 * v2 + b3 * v3)
        for g in range(group):
            for t in range(whole, count):
                p = scratch[g, t]
                for d in range(value_dim):
                    out[g, d] += p * widen(values[page, head, t, d])
    for g in range(group):
        peak = max(scratch[g, highest], sinks[head, g])
        shrink = exp(scratch[g, highest] - peak)
        total = scratch[g, mass] * shrink + exp(sinks[head, g] - peak)
        for d in range(value_dim):
            mixed[row, head, g, d] = narrow(out[g, d] * (shrink / total), unscaled[row, head, g, 0])


# The parallel loop only calls: numba's analysis of a long parallel body takes many seconds.
@parallel
def _decode_items(
    query: Any,
    keys: Any,
    values: Any,
    context_lengths: Any,
    page_starts: Any,
    pages: Any,
    scaling: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    mixed: Any,
) -> None:
    heads = query.shape[1]
    for item in numba.prange(query.shape[0] * heads):
        _decode_item(
            item // heads,
            item % heads,
            query,
            keys,
            values,
            context_lengths,
            page_starts,
            pages,
            scaling,
            window,
            softcap,
            sinks,
            mixed,
        )
