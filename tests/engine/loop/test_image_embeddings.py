"""Image embeddings of steps: each image is encoded once while it is cached."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.engine.loop.runner import ImageEmbeddings, StepImages
from tidemill.engine.model.network.loaded_model import VisionEncoder
from tidemill.engine.model.vision.preprocessor_config import OneSize
from tidemill.engine.scheduling.admission import ArrivalOrder
from tidemill.engine.scheduling.images import ImageSpec, PromptImage
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import Sequence, SequenceRequest
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.pages import PagePool

SIGHT = ImageSpec(1, 2, (2,), OneSize(2, 3, 2), 2, is_bidirectional=True, has_axes=True)


class CountingTower:
    """A tower whose vectors count up from the first pixel, and that counts its calls."""

    def __init__(self) -> None:
        self.num_looks = 0

    def encode(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return six vectors of two numbers."""
        self.num_looks += 1
        return torch.arange(6.0)[:, None].expand(-1, 2) + float(pixels[0, 0, 0])


def request(*levels: int) -> SequenceRequest:
    """Return a prompt with three tokens of text and one image per level."""
    ids: list[int] = []
    images = []
    for level in levels:
        ids += [5, 6, 7]
        pixels = np.full((2, 3, 3), level, np.uint8)
        images.append(PromptImage(pixels, bytes([level]), len(ids), 2, 3, is_whole=True))
        ids += [2] * 6
    return SequenceRequest([*ids, 8], 4, images=tuple(images))


class Bench:
    """A scheduler over a table, and the images of its steps."""

    def __init__(self, budget: int = 100, *, max_bytes: int = 2**20) -> None:
        table = SequenceTable(4, 64, 4)
        self.scheduler = Scheduler(table, PagePool(64), ArrivalOrder(), budget)
        self.tower = CountingTower()
        self.images = ImageEmbeddings(VisionEncoder(SIGHT, self.tower), table, max_bytes=max_bytes)

    def add(self, *requests: SequenceRequest) -> None:
        """Queue some requests."""
        for number, one in enumerate(requests):
            self.scheduler.add(Sequence(one, number))

    def step(self) -> StepImages | None:
        """Plan a step, launch it, and return its images."""
        plan = self.scheduler.plan()
        assert plan is not None
        shown = self.images.embed(plan)
        self.scheduler.launch(plan)
        return shown


def test_a_step_without_images_has_none() -> None:
    """Nothing is encoded either."""
    bench = Bench()
    bench.add(SequenceRequest([5, 6, 7], 4))
    assert bench.step() is None
    assert bench.tower.num_looks == 0


def test_vectors_replace_an_images_tokens() -> None:
    """A text comes first here; the images of both sequences are included."""
    bench = Bench()
    bench.add(SequenceRequest([5, 6], 4), request(40, 80))
    shown = bench.step()
    assert shown is not None
    assert shown.vectors is not None
    assert shown.arrays["shown_rows"].tolist() == [*range(5, 11), *range(14, 20)]
    assert shown.vectors[:, 0].tolist() == [*range(40, 46), *range(80, 86)]
    ends = shown.arrays["ends"].tolist()
    assert ends == [1, 2, 1, 2, 3, *[9] * 6, 10, 11, 12, *[18] * 6, 19]
    axes = shown.arrays["axes"].reshape(3, -1)
    assert axes[:, :2].tolist() == [[0, 1]] * 3
    assert axes[1, 2:].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 9, 9, 10, 10, 10, 12]


def test_an_image_is_encoded_once_for_all_prompts() -> None:
    """It appears twice in a prompt, in another one, and in the next chunk."""
    bench = Bench(budget=12)
    bench.add(request(40, 40), request(40))
    while bench.scheduler.num_waiting or bench.scheduler.table.has_images.sum() < 2:
        bench.step()
    assert bench.tower.num_looks == 1


def test_a_dropped_image_is_encoded_again() -> None:
    """The cache has a byte limit, but always contains the last image."""
    bench = Bench(max_bytes=1)
    bench.add(request(40, 80, 40))
    assert bench.step() is not None
    assert bench.tower.num_looks == 3
    bench.images.clear()
    bench.add(request(40))
    bench.step()
    assert bench.tower.num_looks == 4
