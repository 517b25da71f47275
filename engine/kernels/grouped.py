"""Grouped attention: layers in groups, each with its own page lists, over the same pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from .attention import (
    ANY_PROGRAMS,
    PROGRAM_BITS,
    AttentionBackendType,
    AttentionShape,
    CapturableBackend,
    HeadNorms,
)
from .layer_groups import LayerGroup
from .step import Step


class GroupedAttention:
    """An `AttentionBackend` of several: group g attends over a step's page lists number g."""

    def __init__(
        self,
        backend: AttentionBackendType,
        shapes: Sequence[AttentionShape],
        groups: Sequence[LayerGroup],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        of_groups = [[shapes[layer] for layer in group.layers] for group in groups]
        first = backend(max(of_groups, key=len), num_pages, dtype, device)
        self.page_size, self.copies_slots = first.page_size, first.copies_slots
        self._backends = [first.with_layers(own) for own in of_groups]
        self._places = {
            layer: (self._backends[number], place)
            for number, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }

    def prepare(self, step: Step) -> None:
        """Prepare each group for the next forward pass, that of `step`."""
        for number, backend in enumerate(self._backends):
            backend.prepare(step.of_group(number))

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """See `AttentionBackend.store_qkv`."""
        backend, place = self._places[layer]
        return backend.store_qkv(place, qkv, cos_sin, norms)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend.store`."""
        backend, place = self._places[layer]
        backend.store(place, key, value)

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        backend, place = self._places[layer]
        return backend.attend(place, query, sinks)


class CapturableGroups(GroupedAttention):
    """A `CapturableBackend` of several; the launches of group g are bits from `g · BITS` on."""

    BITS = 8

    def __init__(
        self,
        backend: AttentionBackendType,
        shapes: Sequence[AttentionShape],
        groups: Sequence[LayerGroup],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(backend, shapes, groups, num_pages, dtype, device)
        self._captured = [one for one in self._backends if isinstance(one, CapturableBackend)]
        assert len(self._captured) == len(groups)
        self.trash_slot = self._captured[0].trash_slot

    @property
    def launches(self) -> int:
        """Return the launches that the prepared step needs, of all groups."""
        return self._joined([backend.launches for backend in self._captured])

    @property
    def all_launches(self) -> int:
        """Return the launches that any step may need."""
        return self._joined([backend.all_launches for backend in self._captured])

    @property
    def programs(self) -> int:
        """Return the prepared step's numbers of programs, of all groups."""
        each = enumerate(backend.programs for backend in self._captured)
        return sum(own << number * PROGRAM_BITS for number, own in each)

    def allocate_workspace(self, num_tokens: int, num_decodes: int) -> None:
        """Allocate each group's workspace."""
        for backend in self._captured:
            backend.allocate_workspace(num_tokens, num_decodes)

    @contextmanager
    def capturing(
        self,
        num_tokens: int,
        launches: int,
        num_spans: int | None = None,
        programs: int = ANY_PROGRAMS,
    ) -> Iterator[None]:
        """Launch for any step of this kind, in all groups."""
        with ExitStack() as stack:
            for number, backend in enumerate(self._captured):
                own = launches >> number * self.BITS & (1 << self.BITS) - 1
                limits = programs >> number * PROGRAM_BITS & (1 << PROGRAM_BITS) - 1
                stack.enter_context(backend.capturing(num_tokens, own, num_spans, limits))
            yield

    def _joined(self, launches: Sequence[int]) -> int:
        return sum(own << number * self.BITS for number, own in enumerate(launches))


def make_grouped(
    backend: AttentionBackendType,
    shapes: Sequence[AttentionShape],
    groups: Sequence[LayerGroup],
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
) -> GroupedAttention:
    """Return the backend of layers in groups; graphs can capture it if each supports that."""
    parts = (backend, shapes, groups, num_pages, dtype, device)
    is_capturable = hasattr(backend, "allocate_workspace")
    return CapturableGroups(*parts) if is_capturable else GroupedAttention(*parts)
