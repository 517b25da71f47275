"""Hybrid backend: the paged attention and the recurrent rows of one model, prepared together."""

from __future__ import annotations

from torch import Tensor

from .attention import AttentionBackend, HeadNorms
from .recurrence import RecurrentBackend
from .step import Step


class HybridBackend:
    """An `AttentionBackend` beside a `RecurrentBackend`; either counts layers of its own kind."""

    def __init__(self, attention: AttentionBackend, recurrence: RecurrentBackend) -> None:
        self.page_size = attention.page_size
        self.recurrence = recurrence
        self._attention = attention

    def prepare(self, step: Step) -> None:
        """Prepare for the next forward pass, that of `step`; valid until the next call."""
        self._attention.prepare(step)
        self.recurrence.prepare(step)

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """See `AttentionBackend.store_qkv`."""
        return self._attention.store_qkv(layer, qkv, cos_sin, norms)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend.store`."""
        self._attention.store(layer, key, value)

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        return self._attention.attend(layer, query, sinks)
