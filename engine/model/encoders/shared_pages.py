"""Shared pages: attention of layers without a past, which use the same pages in turn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.attention import AttentionBackend, HeadNorms
from ...kernels.step import Step


class SharedPages:
    """A backend whose layers have no past: those of one shape share the pages of `backend`."""

    def __init__(self, backend: AttentionBackend, places: Sequence[int]) -> None:
        self.page_size, self.copies_slots = backend.page_size, backend.copies_slots
        self.backend = backend
        self._places = places

    def prepare(self, step: Step) -> None:
        """See `AttentionBackend.prepare`."""
        self.backend.prepare(step)

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """See `AttentionBackend.store_qkv`."""
        return self.backend.store_qkv(self._places[layer], qkv, cos_sin, norms)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend.store`."""
        self.backend.store(self._places[layer], key, value)

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        return self.backend.attend(self._places[layer], query, sinks)
