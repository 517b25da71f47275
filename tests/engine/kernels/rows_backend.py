"""The smallest backend with a separate layout: the code of a new device, without its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tidemill.engine.kernels.attention import AttentionShape, HeadNorms, kv_width
from tidemill.engine.kernels.elementwise import qk_norm_rope
from tidemill.engine.kernels.reference import attend, step_spans
from tidemill.engine.kernels.step import Step


class RowsAttention:
    """Keys and values are stored token after token, `[slots, Hkv, D]`, in pages of eight."""

    page_size = 8
    copies_slots = False

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        slots = num_pages * self.page_size

        def rows(heads: int, width: int) -> Tensor:
            return torch.zeros(slots, heads, width, dtype=dtype, device=device)

        self.shapes = tuple(shapes)
        self.keys = [rows(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.values = [rows(shape.num_kv_heads, shape.value_dim) for shape in shapes]

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        return kv_width(shapes) * cls.page_size * dtype.itemsize

    def prepare(self, step: Step) -> None:
        """Read the slots of each span's sequence, its own tokens last."""
        self._slots = step.slots
        self._causal_ends, self._span_ends = step.visible_ends, step.span_ends
        self._own_ends = step.for_layer(sees_ahead=False).visible_ends
        offsets = torch.arange(self.page_size, device=step.slots.device)
        self._spans = []
        for start, stop, context, pages in step_spans(step):
            slots = (pages[:, None] * self.page_size + offsets).flatten()  # [n · page size]
            self._spans.append((slice(start, stop), slots[: context + stop - start]))

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Split, norm, rotate and store."""
        query, key, value = qk_norm_rope(qkv, cos_sin, self.shapes[layer], norms)
        self.store(layer, key, value)
        return query

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
        self.keys[layer][self._slots] = key
        self.values[layer][self._slots] = value

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend every token to its sequence up to itself: `[T, Hq, Dk]` → `[T, Hq, Dv]`."""
        shape = self.shapes[layer]
        ends = self._causal_ends if shape.sees_ahead else self._own_ends
        ends = ends if shape.is_causal else self._span_ends
        keys, values = (rows[layer].transpose(0, 1) for rows in (self.keys, self.values))
        return torch.cat(
            [
                attend(
                    *(query[span], keys[:, slots], values[:, slots], shape, sinks),
                    ends[span],
                )
                for span, slots in self._spans
            ]
        )
