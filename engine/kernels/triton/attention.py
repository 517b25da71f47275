"""The GPU's attention over pages; the reference is `engine.kernels.reference`.

One layer's pages are `keys [pages, Hkv, page_size, Dk]` and `values [pages, Hkv, page_size, Dv]`.
A step's tiles (`tiles`) go to the device once, layers of one kind share them, and one kernel goes
through them: what is summed, is so in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape, HeadNorms, width_of_token
from engine.kernels.quantised import FP8
from engine.kernels.step import Step
from engine.kernels.triton import entry
from engine.kernels.triton.flash import attend_tiles, choose_tiles
from engine.kernels.triton.joining import Parts, join
from engine.kernels.triton.launching import arch_of
from engine.kernels.triton.lists import Lists
from engine.kernels.triton.tiles import Kind, Limits

DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
# The widest heads whose tiles fit the cards, and the most query heads to a key head.
WIDEST = 256
MOST_IN_GROUP = 64
# So many programs for each multiprocessor, that one which takes longer finds others at work.
PROGRAMS = 4
# What stands for multiprocessors where kernels are interpreted, or only compiled.
INTERPRETED = 2


class TritonAttention:
    """Pages on a GPU, one more than asked for, and kernels over them."""

    page_size = 16

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert self.serves(shapes, dtype)
        self.shapes = tuple(shapes)
        self.trash_slot = num_pages * self.page_size
        self.keys, self.values = [], []
        for shape in shapes:
            rows = (num_pages + 1, shape.num_kv_heads, self.page_size)
            self.keys.append(torch.zeros(*rows, shape.key_dim, dtype=dtype, device=device))
            self.values.append(torch.zeros(*rows, shape.value_dim, dtype=dtype, device=device))
        self._kinds = [_kind(shape, dtype, device) for shape in shapes]
        self._lists = Lists(self._kinds, self.page_size, device)
        self._captured: int | None = None

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        return width_of_token(shapes) * cls.page_size * dtype.itemsize

    @staticmethod
    def serves(shapes: Sequence[AttentionShape], dtype: torch.dtype) -> bool:
        """Say whether the kernels can do all these layers in this dtype."""
        return dtype in DTYPES and all(
            max(shape.key_dim, shape.value_dim) <= WIDEST
            and shape.num_query_heads // shape.num_kv_heads <= MOST_IN_GROUP
            for shape in shapes
        )

    @contextmanager
    def capturing(self, num_tokens: int) -> Iterator[None]:
        """Launch as any step of so many tokens would need it; see `CapturableBackend`."""
        self._lists.stay(num_tokens)
        self._captured = num_tokens
        try:
            yield
        finally:
            self._captured = None

    def prepare(self, step: Step) -> None:
        """Take in where the tokens of the coming forward pass lie; valid until the next call."""
        self._slots, self._pages = step.slots, step.pages
        self._lists.fill(step)

    def enter(self, layer: int, qkv: Tensor, turns: Tensor, norms: HeadNorms | None) -> Tensor:
        """Split, norm, turn and store; see `AttentionBackend.enter`."""
        cache = (self._slots, self.keys[layer], self.values[layer])
        return entry.enter(qkv, turns, norms, self.shapes[layer], *cache)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
        entry.store(key, value, self._slots, self.keys[layer], self.values[layer])

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend every token to what it sees: `[T, Hq, Dk]` → `[T, Hq, Dv]`.

        Moves the keys and values of each tile's places, the queries and the outputs, once, and for
        each part twice Hq · (Dv + 2) fp32 numbers.
        """
        shape, kind = self.shapes[layer], self._kinds[layer]
        counts = self._lists.counts(kind)
        if self._captured is not None:
            counts = Limits.of(kind, self._captured)
        heads = shape.num_query_heads
        out = query.new_empty(len(query), heads, shape.value_dim)
        parts = Parts(
            query.new_empty(counts.parts, heads, shape.value_dim, dtype=torch.float32),
            query.new_empty(counts.parts, heads, 2, dtype=torch.float32),
        )
        lists = (self._lists.numbers, self._lists.header(kind))
        cache = (self._pages, self.keys[layer], self.values[layer])
        arrays = (shape, query.contiguous(), cache, sinks, out, parts)
        attend_tiles(lists, counts.wide, *arrays, is_wide=True)
        attend_tiles(lists, counts.narrow, *arrays, is_wide=False)
        join(lists, counts.joins, parts, sinks, out)
        return out


def _kind(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Kind:
    """Return what a layer's tiles depend on."""
    wide, narrow = (
        choose_tiles(shape, dtype, arch_of(device), is_wide=is_wide).sizes["ROWS"]
        for is_wide in (True, False)
    )
    return Kind(
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
