"""Tiled attention: a step's tile plan and the workspace of split-KV parts, for any kind of pages.

A step's tiles (`tiles`) are copied to the device once and shared by layers of the same spec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Self

import torch
from torch import Tensor

from ..attention import ANY_PROGRAMS, AttentionShape, kv_width
from ..step import Step
from .combine import PartialOutputs
from .tile_buffers import TileBuffers
from .tiles import ProgramLimits, TileCounts, TileSpec

# Launches that only some steps need: for wide tiles, and to combine parts.
WIDE, JOINS = 1, 2
# The assumed number of multiprocessors if kernels are interpreted, or only compiled.
INTERPRETED = 2


class TiledAttention(ABC):
    """A backend that attends by tiles, with a trash page after the last; see `CapturableBackend`.

    `keys` are the pages of each layer.
    """

    page_size = 16
    copies_slots = False
    all_launches = WIDE | JOINS
    trash_slot: int
    keys: list[Tensor]

    @staticmethod
    @abstractmethod
    def _tile_spec(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> TileSpec:
        """Return the tile spec of a layer."""

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        return kv_width(shapes) * cls.page_size * dtype.itemsize

    def with_layers(self, shapes: Sequence[AttentionShape]) -> Self:
        """Return a backend of other layers over the same pages, with a separate workspace."""
        other = copy(self)
        other._set_layers(  # noqa: SLF001 - of the same class
            shapes, self.keys[0].dtype, self.keys[0].device
        )
        return other

    def _set_layers(
        self, shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self._specs = [self._tile_spec(shape, dtype, device) for shape in shapes]
        self._tile_buffers = TileBuffers(self._specs, self.page_size, device)
        # Of each kind of layer: its spec, and how many numbers a part has, sums and states.
        self._widths = {
            (spec, shape.num_query_heads * shape.value_dim, shape.num_query_heads * 2)
            for spec, shape in zip(self._specs, shapes, strict=True)
        }
        no_parts = torch.empty(0, dtype=torch.float32, device=device)
        self._parts = PartialOutputs(no_parts, no_parts)
        self._captured: dict[TileSpec, TileCounts] | None = None
        self.launches = self.programs = 0

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
    def capturing(
        self,
        num_tokens: int,
        launches: int,
        num_spans: int | None = None,
        programs: int = ANY_PROGRAMS,
    ) -> Iterator[None]:
        """Launch for any step of this kind; see `CapturableBackend`."""
        has_wide, has_joins = bool(launches & WIDE), bool(launches & JOINS)
        self._captured = {}
        for spec in dict.fromkeys(self._specs):
            most = TileCounts.upper_bound(spec, num_tokens, num_tokens, num_spans)
            most = most._replace(wide=most.wide * has_wide, joins=most.joins * has_joins)
            self._captured[spec] = ProgramLimits.unpack(programs).lowered(most, spec)
        try:
            yield
        finally:
            self._captured = None

    def prepare(self, step: Step) -> None:
        """Plan the tiles of the next forward pass; valid until the next call."""
        self._slots, self._pages, self._positions = step.slots, step.pages, step.positions
        self._tile_buffers.fill(step)
        counts = self._tile_buffers.counts
        self._grow_parts(counts)
        has_wide = any(of_spec.wide for of_spec in counts.values())
        has_joins = any(of_spec.joins for of_spec in counts.values())
        self.launches = WIDE * has_wide | JOINS * has_joins
        self.programs = ProgramLimits.of_step(counts).packed

    def _grow_parts(self, counts: Mapping[TileSpec, TileCounts]) -> None:
        """Allocate room for the parts of any layer; a larger workspace replaces the last one."""
        values, states = self._parts
        num_values = max((counts[spec].parts * width for spec, width, _ in self._widths), default=0)
        num_states = max((counts[spec].parts * width for spec, _, width in self._widths), default=0)
        if num_values > len(values) or num_states > len(states):
            self._parts = PartialOutputs(values.new_empty(num_values), values.new_empty(num_states))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
