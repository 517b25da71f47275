"""Hybrid backend: the paged attention and the recurrent rows of one model, prepared together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .attention import ANY_PROGRAMS, AttentionBackend, CapturableBackend, HeadNorms
from .recurrence import CapturableRecurrence, RecurrentBackend
from .step import Step


class HybridBackend:
    """An `AttentionBackend` and a `RecurrentBackend`; each counts its own layers."""

    def __init__(self, attention: AttentionBackend, recurrence: RecurrentBackend) -> None:
        self.page_size, self.copies_slots = attention.page_size, attention.copies_slots
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


class CapturableHybrid(HybridBackend):
    """A `CapturableBackend` of both; the recurrences' launches are the lowest `BITS`."""

    BITS = 4

    def __init__(self, attention: CapturableBackend, recurrence: CapturableRecurrence) -> None:
        super().__init__(attention, recurrence)
        self.trash_slot = attention.trash_slot
        self._captured = attention, recurrence

    @property
    def launches(self) -> int:
        """Return the launches that the prepared step needs, of both."""
        attention, recurrence = self._captured
        return attention.launches << self.BITS | recurrence.launches

    @property
    def all_launches(self) -> int:
        """Return the launches that any step may need."""
        attention, recurrence = self._captured
        return attention.all_launches << self.BITS | recurrence.all_launches

    @property
    def programs(self) -> int:
        """Return the prepared step's numbers of programs of attention."""
        return self._captured[0].programs

    def allocate_workspace(self, num_tokens: int, num_decodes: int) -> None:
        """Allocate the workspace of attention: recurrences have none."""
        self._captured[0].allocate_workspace(num_tokens, num_decodes)

    @contextmanager
    def capturing(
        self,
        num_tokens: int,
        launches: int,
        num_spans: int | None = None,
        programs: int = ANY_PROGRAMS,
    ) -> Iterator[None]:
        """Launch for any step of this kind, in both."""
        attention, recurrence = self._captured
        with (
            attention.capturing(num_tokens, launches >> self.BITS, num_spans, programs),
            recurrence.capturing(launches & (1 << self.BITS) - 1),
        ):
            yield


def make_hybrid(attention: AttentionBackend, recurrence: RecurrentBackend) -> HybridBackend:
    """Return the backend of both; graphs can capture it if each supports that."""
    if isinstance(attention, CapturableBackend) and isinstance(recurrence, CapturableRecurrence):
        return CapturableHybrid(attention, recurrence)
    return HybridBackend(attention, recurrence)
