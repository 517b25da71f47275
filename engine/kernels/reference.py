"""Paged attention in torch: the reference, on any device.

One layer's pages are `keys [pages, Hkv, Dk, page_size]` and `values [pages, Hkv, page_size, Dv]`.
Keys are transposed so that the scores of 16 neighbouring tokens are one vector operation. Query
heads `h·G … h·G+G-1` read key head `h` (grouped-query attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .attention import AttentionShape, HeadNorms, kv_width
from .elementwise import qk_norm_rope
from .host_memory import zeros
from .quantised import FP8, FP8_MAX
from .step import Step


class Span(NamedTuple):
    """Packed tokens `start:stop` of one sequence, after `context` cached ones in `pages`."""

    start: int
    stop: int
    context: int
    pages: Tensor  # [n] int64; they cover the context and the span itself

    @property
    def length(self) -> int:
        """Return the sequence length up to the span's last token."""
        return self.context + self.stop - self.start


def step_spans(step: Step) -> list[Span]:
    """Return the step's spans."""
    starts, contexts, page_starts = (
        array.tolist()
        for array in (step.host.query_starts, step.host.context_lengths, step.host.page_starts)
    )
    return [
        Span(
            starts[index],
            starts[index + 1],
            context,
            step.pages[page_starts[index] : page_starts[index + 1]].long(),
        )
        for index, context in enumerate(contexts)
    ]


class ReferenceAttention:
    """Attention backend in plain torch, a span at a time.

    Plain attention runs torch's scaled_dot_product_attention; a softcap, sinks, a position bias, or
    keys and values of unequal width run `attend`.
    """

    page_size = 16
    copies_slots = True

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        page_size: int | None = None,
    ) -> None:
        self.shapes = tuple(shapes)
        self.page_size = size = page_size or self.page_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            pages_heads = (num_pages, shape.num_kv_heads)
            self.keys.append(zeros((*pages_heads, shape.key_dim, size), dtype, device))
            self.values.append(zeros((*pages_heads, size, shape.value_dim), dtype, device))

    def with_layers(self, shapes: Sequence[AttentionShape]) -> Self:
        """Return a backend of other layers over the same pages."""
        other = copy(self)
        other.shapes = tuple(shapes)
        return other

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        return kv_width(shapes) * cls.page_size * dtype.itemsize

    def prepare(self, step: Step) -> None:
        """Read the positions of the next forward pass's tokens; valid until the next call."""
        self._spans, self._ends = step_spans(step), step.ends
        if step.unseen is not None:  # a step of bidirectional spans
            self._ends = step.span_ends
        slots = step.slots.long()
        self._places = (slots // self.page_size, slots % self.page_size)
        self._copies = step.page_copies

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Split, norm, rotate and store; see `AttentionBackend.store_qkv`."""
        query, key, value = qk_norm_rope(qkv, cos_sin, self.shapes[layer], norms)
        self.store(layer, key, value)
        return query

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
        keys, values = self.keys[layer], self.values[layer]
        _bits(keys).permute(0, 3, 1, 2)[self._places] = _bits(to_storage(key, keys.dtype))
        _bits(values).transpose(1, 2)[self._places] = _bits(to_storage(value, values.dtype))
        for source, target, count in self._copies:
            keys[target, ..., :count] = keys[source, ..., :count]
            values[target, :, :count] = values[source, :, :count]

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend every token to its visible context: `[T, Hq, Dk]` → `[T, Hq, Dv]`."""
        parts = [self._attend_span(layer, query, span, sinks) for span in self._spans]
        if num_of_none := len(query) - self._spans[-1].stop:
            shape = self.shapes[layer]
            parts.append(query.new_zeros(num_of_none, shape.num_query_heads, shape.value_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_span(self, layer: int, query: Tensor, span: Span, sinks: Tensor | None) -> Tensor:
        shape = self.shapes[layer]
        query = query[span.start : span.stop]  # [t, Hq, Dk]
        ends = self._ends if shape.sees_ahead else None
        ends = None if ends is None else ends[span.start : span.stop]
        length = span.length
        pages = (_bits(self.keys[layer]), _bits(self.values[layer]))
        key, value = (
            numbers.view(self.keys[layer].dtype).to(query.dtype)
            for numbers in gather(*pages, span.pages, length)
        )
        is_uneven = shape.key_dim != shape.value_dim
        if shape.softcap or sinks is not None or shape.position_bias is not None or is_uneven:
            return attend(query, key, value, shape, sinks, ends)
        is_whole = not shape.most_visible or length <= shape.most_visible
        is_plain = is_whole and ends is None and (span.context == 0 or not shape.is_causal)
        mask = (
            None if is_plain else attention_mask(query.shape[0], length, shape, query.device, ends)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],  # [1, Hq, t, D]
            key[None],
            value[None],
            attn_mask=mask,
            is_causal=is_plain and shape.is_causal,
            scale=shape.scaling,
            enable_gqa=shape.num_query_heads != shape.num_kv_heads,
        )
        return out[0].transpose(0, 1)


def to_storage(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values to the cache's dtype; fp8 saturates."""
    if dtype == FP8:
        numbers = numbers.clamp(-FP8_MAX, FP8_MAX)
    return numbers.to(dtype)


def _bits(numbers: Tensor) -> Tensor:
    """View fp8 as uint8, which torch can gather and scatter on every device."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers


def gather(keys: Tensor, values: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copy the first `length` tokens of `pages` out: `[Hkv, length, Dk]`, `[Hkv, length, Dv]`."""
    heads, key_dim = keys.shape[1], keys.shape[2]
    key = keys[pages].permute(1, 0, 3, 2).reshape(heads, -1, key_dim)  # [Hkv, n·page, Dk]
    value = values[pages].transpose(0, 1).reshape(heads, -1, values.shape[3])
    return key[:, :length], value[:, :length]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: AttentionShape,
    sinks: Tensor | None,
    ends: Tensor | None = None,
) -> Tensor:
    """Attend the last `t` positions to all `L`: `[t, Hq, Dk]`, `[Hkv, L, D…]` → `[t, Hq, Dv]`.

    The shape and `ends [t]` give the mask; scores and softmax are in fp32.
    """
    tokens, length = query.shape[0], key.shape[1]
    group = shape.num_query_heads // shape.num_kv_heads
    grouped = query.view(tokens, shape.num_kv_heads, group, -1).permute(1, 2, 0, 3)
    scores = grouped.float() @ key.float()[:, None].transpose(-1, -2)  # [Hkv, G, t, L]
    scores *= shape.scaling
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    if shape.position_bias is not None:
        scores += shape.position_bias.between(tokens, length).view_as(scores)
    scores.masked_fill_(~attention_mask(tokens, length, shape, query.device, ends), float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(shape.num_kv_heads, group, 1, 1).expand(-1, -1, tokens, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    if ends is not None and not shape.is_causal:
        weights = weights.nan_to_num()  # a window may end before the tokens that are seen begin
    mixed = weights @ value.float()[:, None]  # [Hkv, G, t, Dv]
    return mixed.permute(2, 0, 1, 3).reshape(tokens, shape.num_query_heads, -1).to(query.dtype)


def attention_mask(
    tokens: int,
    length: int,
    shape: AttentionShape,
    device: torch.device,
    ends: Tensor | None = None,
) -> Tensor:
    """Return which of `length` keys the last `tokens` queries see: bool `[tokens, length]`.

    Queries see the keys before `ends [tokens]`; without it, causal ones see those up to themselves.
    """
    queries = torch.arange(length - tokens, length, device=device)[:, None]
    positions = torch.arange(length, device=device)[None]
    window = shape.window or length
    firsts = queries - window + 1
    if shape.chunk:
        firsts = torch.maximum(firsts, queries // shape.chunk * shape.chunk)
    if shape.is_causal:
        stops = queries + 1 if ends is None else ends[:, None]
    else:
        stops = queries + window
        stops = stops if ends is None else torch.minimum(stops, ends[:, None])
    return (positions >= firsts) & (positions < stops)
