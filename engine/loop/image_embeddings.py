"""Image embeddings of a step, made by the vision encoder when a step first needs them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..model.network.loaded_model import VisionEncoder
from ..scheduling.images import PromptImage, image_span
from ..scheduling.step_plan import StepPlan
from ..scheduling.table import SequenceTable

# What chunks, choices and repeats of an image come back for; what was dropped is made again.
MAX_KEPT_BYTES = 2**28


class StepImages(NamedTuple):
    """Images of a plan: arrays of its `Step` by their names, and the embeddings."""

    arrays: dict[str, NDArray[Any]]
    vectors: Tensor | None


class ImageEmbeddings:
    """Encodes the images of steps one by one, so that none depends on what is beside it.

    A cache keeps up to `max_bytes` of the embeddings used last.
    """

    def __init__(
        self,
        vision_encoder: VisionEncoder,
        table: SequenceTable,
        *,
        max_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._sight, self._tower = vision_encoder
        self._table = table
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # by digest, the last used last

    def embed(self, plan: StepPlan) -> StepImages | None:
        """Return what a plan shows; None where none of its sequences has an image."""
        has_images = self._table.has_images[plan.slots]
        if not has_images.any():
            return None
        lengths = plan.stops - plan.starts
        first = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(first - plan.starts, lengths)
        axes, ends = np.tile(positions, (3, 1)), positions + 1
        rows, vectors = [], []
        for span in np.flatnonzero(has_images).tolist():
            start, stop = int(plan.starts[span]), int(plan.stops[span])
            sequence = self._table.sequence(int(plan.slots[span]))
            assert sequence.axes is not None
            shown = image_span(sequence.request.images, sequence.axes, start, stop)
            place = int(first[span])
            axes[:, place : place + stop - start] = shown.axes
            ends[place : place + stop - start] = shown.ends
            rows.append(place + shown.rows)
            vectors += [self._vectors(image)[i:j] for image, i, j in shown.parts]
        arrays: dict[str, NDArray[Any]] = {}
        if self._sight.has_axes:
            arrays["axes"] = axes.ravel()
        if vectors:
            arrays["shown_rows"] = np.concatenate(rows)
        if vectors and self._sight.is_bidirectional:
            arrays["ends"] = ends
        return StepImages(arrays, torch.cat(vectors) if vectors else None)

    def clear(self) -> None:
        """Keep nothing that can be made again."""
        self._kept.clear()
        self._num_bytes = 0

    def _vectors(self, image: PromptImage) -> Tensor:
        made = self._kept.get(image.digest)
        if made is None:
            made = self._kept[image.digest] = self._tower.encode(image.pixels)
            self._num_bytes += made.nbytes
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(image.digest)
        return made
