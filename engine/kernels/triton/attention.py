"""Paged attention backend on GPUs: KV cache, tile plan, flash attention, split-KV combine.

The reference is `engine.kernels.reference`. One layer's pages are `keys [pages, Hkv, page_size,
Dk]` and `values [pages, Hkv, page_size, Dv]`; sums are in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import AttentionShape, HeadNorms
from ..quantised import FP8
from . import qkv as qkv_kernels
from .combine import combine
from .flash import attend_tiles, attention_config
from .launch import arch_of
from .tiled import TiledAttention, multiprocessors
from .tiles import TileSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
# The widest heads whose tiles fit in shared memory, the most query heads to a key head, and the
# most numbers of these: half as many heads where they are twice as wide as 256.
WIDEST = 512
MOST_IN_GROUP = 64
MOST_IN_ROWS = 64 * 256
# Programs for each multiprocessor: enough that a long one overlaps with others.
PROGRAMS = 4


class TritonAttention(TiledAttention):
    """Paged KV cache on a GPU, with a trash page after the last, and attention over it."""

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

    @staticmethod
    def supports(shapes: Sequence[AttentionShape], dtype: torch.dtype) -> bool:
        """Return whether the kernels support all these layers in this dtype."""
        return dtype in DTYPES and all(
            (width := max(shape.key_dim, shape.value_dim)) <= WIDEST
            and (group := shape.num_query_heads // shape.num_kv_heads) <= MOST_IN_GROUP
            and group * width <= MOST_IN_ROWS
            for shape in shapes
        )

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
        """Attend every token to its visible context: `[T, Hq, Dk]` → `[T, Hq, Dv]`.

        Moves the keys and values of each tile's places, the queries and the outputs, once, and for
        each split-KV part twice Hq · (Dv + 2) fp32 numbers.
        """
        shape, spec, parts = self.shapes[layer], self._specs[layer], self._parts
        counts = (self._captured or self._tile_buffers.counts)[spec]
        out = query.new_empty(query.shape[0], shape.num_query_heads, shape.value_dim)
        lists = (self._tile_buffers.numbers, self._tile_buffers.header(spec))
        cache = (self._pages, self.keys[layer], self.values[layer])
        arrays = (shape, query.contiguous(), cache, sinks, out, parts)
        positions = self._positions
        attend_tiles(lists, counts.wide, *arrays, positions=positions, is_wide=True)
        attend_tiles(lists, counts.narrow, *arrays, positions=positions, is_wide=False)
        combine(lists, counts.joins, parts, sinks, out)
        return out

    @staticmethod
    def _tile_spec(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> TileSpec:
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
            max(1, PROGRAMS * multiprocessors(device) // shape.num_kv_heads),
            shape.chunk,
            shape.sees_ahead,
        )
