"""What a step shows: vectors of images in place of tokens, made when a step first wants them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.network import Eye
from engine.scheduling.pictures import Picture, shown_between
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.table import SequenceTable

# What chunks, choices and repeats of an image come back for; what was dropped is made again.
MAX_KEPT_BYTES = 2**28


class Shown(NamedTuple):
    """What a plan's images come to: arrays of its `Step` by their names, and the vectors there."""

    arrays: dict[str, NDArray[Any]]
    vectors: Tensor | None


class ShownPictures:
    """The images of steps, looked at one by one, so that none depends on what is beside it.

    Of what the tower made last it keeps up to `max_bytes`.
    """

    def __init__(self, eye: Eye, table: SequenceTable, *, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._sight, self._tower = eye
        self._table = table
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # by digest, the last used last

    def of(self, plan: StepPlan) -> Shown | None:
        """Return what a plan shows; None where none of its sequences has an image."""
        has_pictures = self._table.has_pictures[plan.slots]
        if not has_pictures.any():
            return None
        lengths = plan.stops - plan.starts
        first = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(first - plan.starts, lengths)
        axes, ends = np.tile(positions, (3, 1)), positions + 1
        rows, vectors = [], []
        for span in np.flatnonzero(has_pictures).tolist():
            start, stop = int(plan.starts[span]), int(plan.stops[span])
            sequence = self._table.sequence(int(plan.slots[span]))
            assert sequence.axes is not None
            shown = shown_between(sequence.request.pictures, sequence.axes, start, stop)
            place = int(first[span])
            axes[:, place : place + stop - start] = shown.axes
            ends[place : place + stop - start] = shown.ends
            rows.append(place + shown.rows)
            vectors += [self._vectors(picture)[i:j] for picture, i, j in shown.parts]
        arrays: dict[str, NDArray[Any]] = {}
        if self._sight.has_axes:
            arrays["axes"] = axes.ravel()
        if vectors:
            arrays["shown_rows"] = np.concatenate(rows)
        if vectors and self._sight.sees_whole:
            arrays["ends"] = ends
        return Shown(arrays, torch.cat(vectors) if vectors else None)

    def forget(self) -> None:
        """Keep nothing that can be made again."""
        self._kept.clear()
        self._num_bytes = 0

    def _vectors(self, picture: Picture) -> Tensor:
        made = self._kept.get(picture.digest)
        if made is None:
            made = self._kept[picture.digest] = self._tower.look(picture.pixels)
            self._num_bytes += made.nbytes
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(picture.digest)
        return made
