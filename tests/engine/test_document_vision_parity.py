"""GLM-V, GLM-OCR and PaddleOCR-VL with images: attention that rotates by row and column."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.engine.test_hybrid_vision_parity import (
    TIGHT,
    Ready,
    check_rows,
    fixture_ready,
    requests,
    spec_of,
)
from tests.engine.vision_models import PREPARED, config_of, inputs_of
from tests.long_parameters import with_long
from tidemill.engine.media.image_resize import ResizedImage, decode_and_resize
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.vision.preprocessor_config import VisionConfig, read_vision_config
from tidemill.engine.scheduling.images import axes_of
from tidemill.protocol.in_flight import MemoryBudget

KINDS = ["glm4v", "glm46v", "glm4v_moe", "glm_ocr", "paddleocr_vl"]
BUDGET = MemoryBudget(2**30)

# Creates transformers' model, ours and the folder of both.
ready = fixture_ready


@pytest.mark.parametrize(
    ("kind", "is_tight"),
    with_long(
        [("glm4v", False)],
        [*((kind, False) for kind in KINDS[1:]), *((kind, True) for kind in KINDS)],
    ),
)
def test_greedy_rows_match_transformers(ready: Ready, kind: str, *, is_tight: bool) -> None:
    """Tokens and log-probabilities are equal, also chunked, shared, preempted and ahead."""
    network, model, folder = ready(kind)
    options = TIGHT if is_tight else {"budget": 400}
    preempted, cached = check_rows(network, model, folder, requests(spec_of(model)), **options)
    assert cached == 64
    assert (preempted > 0) is is_tight


@pytest.mark.parametrize("kind", with_long(["glm4v", "paddleocr_vl"], KINDS[1:-1]))
def test_positions_are_those_of_transformers(ready: Ready, kind: str) -> None:
    """Each token has three, and text continues after an image's longer side."""
    network, model, folder = ready(kind)
    for request in requests(spec_of(model)):
        inputs = inputs_of(folder, request)
        if not request.images:
            continue
        positions, _ = network.model.get_rope_index(
            input_ids=inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
        )
        axes = axes_of(request.images, len(request.prompt_ids))
        assert torch.equal(torch.from_numpy(axes), positions[:, 0].int())


def vision_of(kind: str, folder: Path, prepared: dict[str, Any]) -> VisionConfig:
    """Return the image settings of a kind with a preprocessor config."""
    config_of(kind).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    vision = read_vision_config(read_hf_config(str(folder)))
    assert vision is not None
    return vision


def noise(height: int, width: int) -> Image.Image:
    """Return an image of noise."""
    levels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def resized(vision: VisionConfig, image: Image.Image, form: str, **options: Any) -> ResizedImage:
    """Return an image as a model sees it, after it was saved in a form."""
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return decode_and_resize(buffer.getvalue(), vision.image_spec, max_pixels=10**6, budget=BUDGET)


def check_pixels(folder: Path, seen: ResizedImage, expected: Image.Image) -> None:
    """Compare an image and its number of tokens with those of the folder's processor."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    wanted = processor([expected], return_tensors="pt")
    assert wanted["image_grid_thw"].tolist() == [[1, 2 * seen.rows, 2 * seen.columns]]
    shown = processor([seen.pixels], return_tensors="pt", do_resize=False)
    assert torch.equal(shown["pixel_values"], wanted["pixel_values"])


@pytest.mark.parametrize("size", [(1, 1), (2000, 10), (10, 2000), (300, 170)], ids=str)
@pytest.mark.parametrize("kind", ["glm4v", "paddleocr_vl"])
def test_pixels_and_token_counts_are_those_of_the_processor(
    tmp_path: Path, kind: str, size: tuple[int, int]
) -> None:
    """An image of any shape is resized to the same squares of 28 pixels."""
    vision = vision_of(kind, tmp_path, PREPARED[kind])
    check_pixels(tmp_path, resized(vision, noise(*size), "PNG"), noise(*size))


def exif() -> Image.Exif:
    """Return an EXIF block that turns an image by a quarter."""
    block = Image.Exif()
    block[0x0112] = 6
    return block


def wide() -> Image.Image:
    """Return a grey image of 16 bits."""
    levels = np.random.default_rng(1).integers(0, 2**16, (60, 90), dtype=np.uint16)
    return Image.fromarray(levels)


FORMS: dict[str, Callable[[], tuple[Image.Image, Image.Image, str, dict[str, Any]]]] = {
    "grey": lambda: (noise(60, 90).convert("L"), noise(60, 90).convert("L"), "PNG", {}),
    "opaque": lambda: (noise(60, 90).convert("RGBA"), noise(60, 90), "PNG", {}),
    "CMYK": lambda: (
        noise(60, 90).convert("CMYK"),
        noise(60, 90).convert("CMYK"),
        "TIFF",
        {},
    ),
    "16 bits": lambda: (
        wide(),
        Image.fromarray((np.asarray(wide()) >> 8).astype(np.uint8)),
        "PNG",
        {},
    ),
    "rotated": lambda: (
        noise(60, 90),
        noise(60, 90).transpose(Image.Transpose.ROTATE_270),
        "PNG",
        {"exif": exif()},
    ),
    "animated": lambda: (
        noise(60, 90),
        noise(60, 90),
        "WEBP",
        {"save_all": True, "append_images": [noise(60, 90).rotate(180)], "lossless": True},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_is_seen_as_its_colours(tmp_path: Path, form: str) -> None:
    """GLM's processor sees the same in the image without that form."""
    image, expected, saved_as, options = FORMS[form]()
    vision = vision_of("glm4v", tmp_path, PREPARED["glm4v"])
    seen = resized(vision, image, saved_as, **options)
    check_pixels(tmp_path, seen, expected.convert("RGB"))


def test_limits_of_glm_count_both_frames_of_a_patch(tmp_path: Path) -> None:
    """Its published config allows 6,144 tokens, which are 9.6 million pixels of two frames."""
    prepared = {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}}
    prepared |= {"image_processor_type": "Glm46VImageProcessor"}
    sizes = vision_of("glm_ocr", tmp_path, prepared).image_spec.sizes
    assert sizes.fit(4000, 6000)[2:] == (64, 96)
    assert sizes.fit(100, 100)[2:] == (4, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_without_an_image_token_has_that_of_its_class(kind: str, tmp_path: Path) -> None:
    """It is not the one of Qwen's vocabulary, and limits are its processor's."""
    vision_of(kind, tmp_path, PREPARED[kind])
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["image_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    named = {"image_processor_type": PREPARED[kind]["image_processor_type"]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(named))
    vision = read_vision_config(read_hf_config(str(tmp_path)))
    assert vision is not None
    assert vision.image_spec.token == transformers.AutoConfig.for_model(kind).image_token_id
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, use_fast=False)
    fit = vision.image_spec.sizes.fit(4000, 3100)
    assert processor.get_number_of_image_patches(4000, 3100) == 4 * fit.rows * fit.columns
    fit = vision.image_spec.sizes.fit(90, 100)
    assert processor.get_number_of_image_patches(90, 100) == 4 * fit.rows * fit.columns
