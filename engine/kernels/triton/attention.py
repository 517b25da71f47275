"""Paged attention backend on GPUs: KV cache, tile plan, flash attention, split-KV combine.

The reference is `engine.kernels.reference`. One layer's pages are `keys [pages, Hkv, page_size,
Dk]` and `values [pages, Hkv, page_size, Dv]`. A step's tiles (`tiles`) are copied to the device
once and shared by layers of the same spec; sums are in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

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
# The widest heads whose tiles fit in shared memory, and the most query heads to a key head.
WIDEST = 256
MOST_IN_GROUP = 64
# Programs for each multiprocessor: enough that a long one overlaps with others.
PROGRAMS = 4
# The number of multiprocessors to assume where kernels are interpreted, or only compiled.
INTERPRETED = 2


class TritonAttention:
    """Paged KV cache on a GPU, with a trash page behind the last, and attention over it."""

    page_size = 16

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert self.supports(shapes, dtype)
        self.shapes = tuple(shapes)
        self.trash_slot = num_pages * self.page_size
        self.keys, self.values = [], []
        for shape in shapes:
            rows = (num_pages + 1, shape.num_kv_heads, self.page_size)
            self.keys.append(torch.zeros(*rows, shape.key_dim, dtype=dtype, device=device))
            self.values.append(torch.zeros(*rows, shape.value_dim, dtype=dtype, device=device))
        self._specs = [_tile_spec(shape, dtype, device) for shape in shapes]
        self._tile_buffers = TileBuffers(self._specs, self.page_size, device)
        self._captured: int | None = None

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        return kv_width(shapes) * cls.page_size * dtype.itemsize

    @staticmethod
    def supports(shapes: Sequence[AttentionShape], dtype: torch.dtype) -> bool:
        """Say whether the kernels can do all these layers in this dtype."""
        return dtype in DTYPES and all(
            max(shape.key_dim, shape.value_dim) <= WIDEST
            and shape.num_query_heads // shape.num_kv_heads <= MOST_IN_GROUP
            for shape in shapes
        )

    @contextmanager
    def capturing(self, num_tokens: int) -> Iterator[None]:
        """Launch for any step of `num_tokens` tokens; see `CapturableBackend`."""
        self._tile_buffers.make_static(num_tokens)
        self._captured = num_tokens
        try:
            yield
        finally:
            self._captured = None

    def prepare(self, step: Step) -> None:
        """Plan the tiles of the next forward pass; valid until the next call."""
        self._slots, self._pages = step.slots, step.pages
        self._tile_buffers.fill(step)

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
        shape, spec = self.shapes[layer], self._specs[layer]
        counts = self._tile_buffers.counts(spec)
        if self._captured is not None:
            counts = TileCounts.upper_bound(spec, self._captured)
        heads = shape.num_query_heads
        out = query.new_empty(len(query), heads, shape.value_dim)
        parts = PartialOutputs(
            query.new_empty(counts.parts, heads, shape.value_dim, dtype=torch.float32),
            query.new_empty(counts.parts, heads, 2, dtype=torch.float32),
        )
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
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
