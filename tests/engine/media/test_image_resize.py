"""Images as models see them: transformers' own pixels, and digests that distinguish them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from PIL import Image

from tests.engine.vision_models import PREPARED, config_of
from tidemill.engine.media import image_resize
from tidemill.engine.media.image_resize import decode_and_resize
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.vision.preprocessor_config import (
    ShortestEdge,
    VisionConfig,
    read_vision_config,
)
from tidemill.engine.scheduling.images import ImageForm
from tidemill.protocol.in_flight import MemoryBudget

KINDS = ["gemma3", "qwen2_5_vl"]
BUDGET = MemoryBudget(2**30)


def vision_of(kind: str, folder: Path) -> VisionConfig:
    """Return the vision config of the tiny model of a kind."""
    import json

    config_of(kind).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARED[kind]))
    vision = read_vision_config(read_hf_config(str(folder)))
    assert vision is not None
    return vision


def png(width: int, height: int, seed: int = 1) -> bytes:
    """Return an image of noise."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(levels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (56, 56), (57, 200), (301, 40), (640, 480)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers_processor(
    kind: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """They are equal to the bit, after the tower's normalization."""
    from transformers import AutoImageProcessor

    vision = vision_of(kind, tmp_path)
    data = png(*size)
    seen = decode_and_resize(data, vision.image_spec, max_pixels=10**6, budget=BUDGET)
    processor = AutoImageProcessor.from_pretrained(tmp_path, use_fast=False)
    expected = processor(Image.open(BytesIO(data)), return_tensors="np")
    channels = np.moveaxis(seen.pixels, -1, 0)
    shades = np.stack([vision.shades[i][channels[i]] for i in range(3)])
    if kind == "gemma3":
        assert np.array_equal(shades, np.asarray(expected["pixel_values"])[0])
        return
    grid = expected["image_grid_thw"][0].tolist()
    assert [1, 2 * seen.rows, 2 * seen.columns] == grid
    patches = shades.reshape(3, seen.rows, 2, 14, seen.columns, 2, 14).transpose(
        1, 4, 2, 5, 0, 3, 6
    )
    patches = np.repeat(patches[:, :, :, :, :, None], 2, axis=5).reshape(
        len(expected["pixel_values"]), -1
    )
    assert np.array_equal(patches, np.asarray(expected["pixel_values"]))


@pytest.mark.parametrize("size", [(9, 9), (31, 400), (400, 31)], ids=str)
def test_a_crop_of_a_huge_image_is_computed_alone(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It differs from the crop of the whole by rounding: Pillow may begin with the other axis."""
    form, data = ImageForm(ShortestEdge(36), 3, crop=32), png(*size)
    whole = decode_and_resize(data, form, max_pixels=10**6, budget=BUDGET).pixels
    monkeypatch.setattr(image_resize, "_MOST_RESIZED_PIXELS", 0)
    alone = decode_and_resize(data, form, max_pixels=10**6, budget=BUDGET).pixels
    assert whole.shape == alone.shape == (32, 32, 3)
    assert np.abs(whole.astype(int) - alone).mean() < 1


def test_a_line_of_pixels_is_cropped_within_memory() -> None:
    """Resized as a whole it would have a billion pixels."""
    form, data = ImageForm(ShortestEdge(224), 3, crop=224), png(20_000, 1)
    assert decode_and_resize(data, form, max_pixels=10**6, budget=BUDGET).pixels.shape[0] == 224


def test_a_digest_identifies_the_pixels(tmp_path: Path) -> None:
    """The same pixels in another file are the same image; another shape is another."""
    image_spec = vision_of("qwen2_5_vl", tmp_path).image_spec
    one, other = (
        decode_and_resize(png(60, 60, seed), image_spec, max_pixels=10**6, budget=BUDGET)
        for seed in (1, 2)
    )
    buffer = BytesIO()
    Image.open(BytesIO(png(60, 60))).save(buffer, "BMP")
    again = decode_and_resize(buffer.getvalue(), image_spec, max_pixels=10**6, budget=BUDGET)
    assert one.digest == again.digest != other.digest
    flat = [Image.new("RGB", size, (9, 9, 9)) for size in ((56, 112), (112, 56))]
    digests = set()
    for image in flat:
        buffer = BytesIO()
        image.save(buffer, "PNG")
        digests.add(
            decode_and_resize(buffer.getvalue(), image_spec, max_pixels=10**6, budget=BUDGET).digest
        )
    assert len(digests) == 2


def test_an_image_waits_for_memory_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is that of the decoded image, regardless of its bytes."""
    image_spec = vision_of("qwen2_5_vl", tmp_path).image_spec
    begun = Event()
    decoded = image_resize.decode
    monkeypatch.setattr(
        image_resize,
        "decode",
        lambda data, **options: (begun.set(), decoded(data, **options))[1],
    )
    buffer = BytesIO()
    Image.new("RGB", (500, 500)).save(buffer, "WEBP", lossless=True)
    budget = MemoryBudget(500 * 500 * 4)
    with ThreadPoolExecutor(1) as threads:
        with budget.reserve(1):
            seen = threads.submit(
                decode_and_resize, buffer.getvalue(), image_spec, max_pixels=10**6, budget=budget
            )
            assert not begun.wait(0.05)
        assert seen.result(120).pixels.shape[2] == 3


def test_memory_of_a_large_image_is_freed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads retain freed memory: four of them would retain four images."""
    budget, held = MemoryBudget(10**9), []
    monkeypatch.setattr(image_resize, "trim_heap", lambda: held.append(budget._free_bytes))
    image_spec = vision_of("qwen2_5_vl", tmp_path).image_spec
    decode_and_resize(png(60, 60), image_spec, max_pixels=10**6, budget=budget)
    assert held == []
    monkeypatch.setattr(image_resize, "_LARGE_BYTES", 60 * 60)
    decode_and_resize(png(60, 60), image_spec, max_pixels=10**6, budget=budget)
    assert len(held) == 1
    assert held[0] < 10**9
