"""Paged attention backend on GPUs: KV cache, tile plan, flash attention, split-KV combine.

The reference is `engine.kernels.reference`. One layer's pages are `keys [pages, Hkv, page_size,
Dk]` and `values [pages, Hkv, page_size, Dv]`. A step's tiles (`tiles`) are copied to the device
once and shared by layers of the same spec; sums are in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Self

import torch
from torch import Tensor

from ..attention import AttentionShape, HeadNorms, kv_width
from ..quantised import FP8
from ..step import Step
from . import qkv as qkv_kernels
from .combine import PartialOutputs, combine
from .flash import attend_tiles, attention_config
from .launch import arch_of
from .tile_buffers import TileBuffers
from .tiles import TileCounts, TileSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
# The widest heads whose tiles fit in shared memory, the most query heads to a key head, and the
# most numbers of these: half as many heads where they are twice as wide as 256.
WIDEST = 512
MOST_IN_GROUP = 64
MOST_IN_ROWS = 64 * 256
# Programs for each multiprocessor: enough that a long one overlaps with others.
PROGRAMS = 4
# Launches that only some steps need: of wide tiles, and to combine parts.
WIDE, JOINS = 1, 2
# The number of multiprocessors to assume where kernels are interpreted, or only compiled.
INTERPRETED = 2


class TritonAttention:
    """Paged KV cache on a GPU, with a trash page behind the last, and attention over it."""

    page_size = 16
    all_launches = WIDE | JOINS

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert self.supports(shapes, dtype)
        self.trash_slot = num_pages * self.page_size
        self.keys, self.values = [], []
        for shape in shapes:
            rows = (num_pages + 1, shape.num_kv_heads, self.page_size)
            self.keys.append(torch.zeros(*rows, shape.key_dim, dtype=dtype, device=device))
            self.values.append(torch.zeros(*rows, shape.value_dim, dtype=dtype, device=device))
        self._set_layers(shapes, dtype, device)

    def with_layers(self, shapes: Sequence[AttentionShape]) -> Self:
        """Return a backend of other layers over the same pages, with a workspace of its own."""
        other = copy(self)
        other._set_layers(  # noqa: SLF001 - of its own class
            shapes, self.keys[0].dtype, self.keys[0].device
        )
        return other

    def _set_layers(
        self, shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self._specs = [_tile_spec(shape, dtype, device) for shape in shapes]
        self._tile_buffers = TileBuffers(self._specs, self.page_size, device)
        # Of each kind of layer: its spec, and how many numbers a part has, sums and states.
        self._widths = {
            (spec, shape.num_query_heads * shape.value_dim, shape.num_query_heads * 2)
            for spec, shape in zip(self._specs, shapes, strict=True)
        }
        no_parts = torch.empty(0, dtype=torch.float32, device=device)
        self._parts = PartialOutputs(no_parts, no_parts)
        self._captured: dict[TileSpec, TileCounts] | None = None
        self.launches = 0

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        return kv_width(shapes) * cls.page_size * dtype.itemsize

    @staticmethod
    def supports(shapes: Sequence[AttentionShape], dtype: torch.dtype) -> bool:
        """Say whether the kernels can do all these layers in this dtype."""
        return dtype in DTYPES and all(
            (width := max(shape.key_dim, shape.value_dim)) <= WIDEST
            and (group := shape.num_query_heads // shape.num_kv_heads) <= MOST_IN_GROUP
            and group * width <= MOST_IN_ROWS
            for shape in shapes
        )

    def allocate_workspace(self, num_tokens: int, num_decodes: int) -> None:
        """Allocate the tile buffer and the partial outputs; see `CapturableBackend`."""
        self._tile_buffers.allocate_static(num_tokens, num_decodes)
        self._grow_parts(
            {
                spec: TileCounts.upper_bound(spec, num_tokens, num_decodes)
                for spec in dict.fromkeys(self._specs)
            }
        )

    @contextmanager
    def capturing(self, num_tokens: int, launches: int) -> Iterator[None]:
        """Launch for any step of such a kind; see `CapturableBackend`."""
        has_wide, has_joins = bool(launches & WIDE), bool(launches & JOINS)
        self._captured = {}
        for spec in dict.fromkeys(self._specs):
            most = TileCounts.upper_bound(spec, num_tokens, num_tokens)
            most = most._replace(wide=most.wide * has_wide, joins=most.joins * has_joins)
            self._captured[spec] = most
        try:
            yield
        finally:
            self._captured = None

    def prepare(self, step: Step) -> None:
        """Plan the tiles of the next forward pass; valid until the next call."""
        self._slots, self._pages = step.slots, step.pages
        self._tile_buffers.fill(step)
        counts = self._tile_buffers.counts
        self._grow_parts(counts)
        has_wide = any(of_spec.wide for of_spec in counts.values())
        has_joins = any(of_spec.joins for of_spec in counts.values())
        self.launches = WIDE * has_wide | JOINS * has_joins

    def _grow_parts(self, counts: Mapping[TileSpec, TileCounts]) -> None:
        """Have room for the parts of any layer; a larger workspace takes the place of the last."""
        values, states = self._parts
        num_values = max(counts[spec].parts * width for spec, width, _ in self._widths)
        num_states = max(counts[spec].parts * width for spec, _, width in self._widths)
        if num_values > len(values) or num_states > len(states):
            self._parts = PartialOutputs(values.new_empty(num_values), values.new_empty(num_states))

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Split, norm, rotate and store; see `AttentionBackend.store_qkv`."""
        cache = (self._slots, self.keys[layer], self.values[layer])
        return qkv_kernels.store_qkv(qkv, cos_sin, norms, self.shapes[layer], *cache)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
        qkv_kernels.store_kv(key, value, self._slots, self.keys[layer], self.values[layer])

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend every token to what it sees: `[T, Hq, Dk]` → `[T, Hq, Dv]`.

        Moves the keys and values of each tile's places, the queries and the outputs, once, and for
        each split-KV part twice Hq · (Dv + 2) fp32 numbers.
        """
        shape, spec, parts = self.shapes[layer], self._specs[layer], self._parts
        counts = (self._captured or self._tile_buffers.counts)[spec]
        out = query.new_empty(len(query), shape.num_query_heads, shape.value_dim)
        lists = (self._tile_buffers.numbers, self._tile_buffers.header(spec))
        cache = (self._pages, self.keys[layer], self.values[layer])
        arrays = (shape, query.contiguous(), cache, sinks, out, parts)
        attend_tiles(lists, counts.wide, *arrays, is_wide=True)
        attend_tiles(lists, counts.narrow, *arrays, is_wide=False)
        combine(lists, counts.joins, parts, sinks, out)
        return out


def _tile_spec(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> TileSpec:
    """Return the tile spec of a layer."""
    wide, narrow = (
        attention_config(shape, dtype, arch_of(device), is_wide=is_wide).sizes["ROWS"]
        for is_wide in (True, False)
    )
    return TileSpec(
        shape.num_query_heads // shape.num_kv_heads,
        shape.window,
        shape.is_causal,
        wide,
        narrow,
        max(1, PROGRAMS * _multiprocessors(device) // shape.num_kv_heads),
        shape.chunk,
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
