"""Paged attention backend on the CPU: the KV cache, and flash attention by tiles.

Arithmetic is fp32. A row's sum over blocks is bit-identical whatever else is in the batch: if
sequences share a prefix (cascade attention), one tile attends their queries to it, and each row
resumes from its partial state.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import AttentionShape, HeadNorms
from ..host_memory import zeros
from ..step import Step
from .flash import BLOCK, LOWEST, PAGE_SIZE
from .qkv import store_kv, store_qkv
from .scalars import DTYPES, elements
from .simd import LANES
from .thread_pool import shared_pool
from .tile_plan import TilePlan, plan_tiles
from .tiles import attend_tiles

WORD_BYTES = 4
NO_NORM = (np.empty(0, np.float32), np.empty(0, np.float32), np.float32(0))


class CpuAttention:
    """Paged KV cache in words (see `qkv`), and kernels over it.

    Slots that no token has written do not count, NaN or not.
    """

    page_size = PAGE_SIZE
    copies_slots = True

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert self.supports(shapes, dtype, device)
        self._layers = [_Layer(shape, *_pages(shape, num_pages, dtype)) for shape in shapes]
        self.keys = [own.all_keys for own in self._layers]
        self.values = [own.all_values for own in self._layers]

    def with_layers(self, shapes: Sequence[AttentionShape]) -> Self:
        """Return a backend of other layers over the same pages."""
        other = copy(self)
        pages = zip(shapes, self.keys, self.values, strict=False)
        other._layers = [_Layer(*own) for own in pages]  # noqa: SLF001 - of the same class
        return other

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        widths = (
            shape.num_kv_heads * (shape.key_dim + _padded(shape.value_dim)) for shape in shapes
        )
        return sum(widths) * cls.page_size * dtype.itemsize

    @staticmethod
    def supports(
        shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Return whether the kernels can do all these layers in this dtype."""
        if device.type != "cpu" or dtype not in DTYPES:
            return False
        return all(shape.key_dim * dtype.itemsize % WORD_BYTES == 0 for shape in shapes)

    def prepare(self, step: Step) -> None:
        """Read the positions of the next forward pass's tokens; valid until the next call."""
        self._slots = step.slots.numpy()
        self._positions, self._pages = step.positions.numpy(), step.pages.numpy()
        self._steps = [step.for_layer(sees_ahead=sees_ahead) for sees_ahead in (False, True)]
        self._ends = [step.visible_ends.numpy() for step in self._steps]
        self._layouts: dict[tuple[int, ...], TilePlan] = {}
        self._copies = step.page_copies

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Split, norm, rotate and store; see `AttentionBackend.store_qkv`."""
        own = self._layers[layer]
        shape = own.shape
        query = qkv.new_empty(len(qkv), shape.num_query_heads, shape.key_dim)
        weights = NO_NORM
        if norms is not None:
            weights = (norms.query.numpy(), norms.key.numpy(), np.float32(norms.eps))
        store_qkv(
            *(
                shared_pool(),
                elements(qkv),
                _bits(qkv),
                _flat_words(qkv),
                cos_sin.numpy(),
                *weights,
            ),
            *(self._slots, elements(query), _flat_words(query), own.keys, own.values),
        )
        self._copy(own)
        return query

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
        own = self._layers[layer]
        words = _flat_words(key.contiguous())
        bits = _bits(value.contiguous().view(len(value), -1))
        store_kv(shared_pool(), words, bits, self._slots, own.keys, own.values)
        self._copy(own)

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend every token to its visible context: `[T, Hq, Dk]` → `[T, Hq, Dv]`."""
        own = self._layers[layer]
        shape, tokens = own.shape, len(query)
        out = query.new_empty(tokens, shape.num_query_heads, shape.value_dim)
        grouped = (tokens, shape.num_kv_heads, own.group, -1)
        layout = self._layout(own)
        share_of_sinks = own.no_sinks
        if sinks is not None:
            share_of_sinks = sinks.detach().float().view(own.no_sinks.shape).numpy()
        queries = query.contiguous().view(torch.int32).view(grouped).numpy()
        mixed = elements(out).reshape(grouped)
        for tiles in layout.phases:
            attend_tiles(
                *(
                    shared_pool(),
                    tiles,
                    layout.order,
                    self._positions,
                    self._ends[shape.sees_ahead],
                    self._pages,
                    queries,
                ),
                *(own.keys, own.values, layout.kept, *own.numbers, share_of_sinks, own.bias, mixed),
            )
        return out

    def _copy(self, own: _Layer) -> None:
        """Copy the beginnings of a layer's pages that the step names."""
        for source, target, count in self._copies:
            own.keys[target, ..., :count] = own.keys[source, ..., :count]
            units, rest = divmod(count, own.value_bits.shape[-1])
            own.values[target, :, :units] = own.values[source, :, :units]
            if rest:  # the last word has values of one token that is copied, and of one that is not
                last = own.value_bits[:, :, units, :, :rest]
                last[target] = last[source]

    def _layout(self, own: _Layer) -> TilePlan:
        """Return the step's tile plan for a layer, cached by shape."""
        shape = own.shape
        kind = (*own.kept_shape, shape.is_causal, shape.sees_ahead)
        layout = self._layouts.get(kind)
        if layout is None:
            step = self._steps[shape.sees_ahead]
            layout = plan_tiles(step, own.group, own.kept_shape, is_causal=shape.is_causal)
            self._layouts[kind] = layout
        return layout


class _Layer:
    """One layer's pages and constant arguments, because call overhead dominates small steps."""

    def __init__(self, shape: AttentionShape, keys: Tensor, values: Tensor) -> None:
        heads, width = shape.num_kv_heads, _padded(shape.value_dim)
        self.all_keys, self.all_values = keys, values
        self.shape = shape
        self.group = shape.num_query_heads // heads
        self.keys, self.values = (_words(numbers_) for numbers_ in (keys, values))
        self.value_bits = _bits(values)
        before = (shape.window or np.iinfo(np.int32).max) - 1
        after = 0 if shape.is_causal else before
        chunk = shape.chunk or np.iinfo(np.int32).max
        reach = (np.int64(before), np.int64(after), np.int64(chunk))
        self.numbers = ((np.float32(shape.scaling), np.float32(shape.softcap)), reach)
        self.no_sinks = np.full((heads, self.group), LOWEST, np.float32)
        self.bias = np.empty((heads, self.group, 0), np.float32)
        if (bias := shape.position_bias) is not None:
            logits = torch.nn.functional.pad(bias.logits.float(), (0, BLOCK))
            self.bias = logits.view(heads, self.group, -1).contiguous().numpy()
        self.kept_shape = (heads, self.group, width + 2)


def _pages(shape: AttentionShape, num_pages: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the pages of a layer's keys and values."""
    numbers = WORD_BYTES // dtype.itemsize
    heads, width = shape.num_kv_heads, _padded(shape.value_dim)
    keys = zeros((num_pages, heads, shape.key_dim // numbers, PAGE_SIZE, numbers), dtype)
    values = zeros((num_pages, heads, PAGE_SIZE // numbers, width, numbers), dtype)
    return keys, values


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _bits(numbers: Tensor) -> NDArray[Any]:
    """Return numbers as integers of their size."""
    kind = torch.uint16 if numbers.dtype == torch.bfloat16 else torch.int32
    return numbers.view(kind).numpy()


def _flat_words(numbers: Tensor) -> NDArray[np.int32]:
    """Return the words of a contiguous tensor, one after the other."""
    words: NDArray[np.int32] = numbers.view(-1).view(torch.int32).numpy()
    return words


def _words(numbers: Tensor) -> NDArray[np.int32]:
    """Return `[…, numbers to a word]` as words `[…]`."""
    words: NDArray[np.int32] = numbers.view(torch.int32).squeeze(-1).numpy()
    return words
