"""Qwen3.5 with images: recurrent layers, and attention that rotates by row and column."""

from __future__ import annotations

import random
from collections.abc import Callable
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.test_parity import run_all
from tests.engine.vision_models import (
    BEGIN,
    IMAGE,
    PREPARED,
    build,
    config_of,
    inputs_of,
    load,
    save,
    shown_request,
)
from tests.long_parameters import with_long
from tidemill.engine.media.image_resize import decode_and_resize
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.vision.preprocessor_config import read_vision_config
from tidemill.engine.scheduling.images import ImageSpec, axes_of
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.engine.state import rows
from tidemill.protocol.in_flight import MemoryBudget

SMALL, WIDE, SQUARE = (56, 56), (60, 130), (128, 128)
DOT, STRIP = (1, 1), (2000, 10)
GREEDY = Sampling(temperature=0, logprobs=0)
TIGHT = {"num_pages": 9, "budget": 10, "steps_ahead": 1}

Ready = Callable[[str], tuple[Any, LoadedModel, Path]]


@pytest.fixture(autouse=True)
def fixture_short_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prefixes of one page be shared through snapshots."""
    monkeypatch.setattr(rows, "FEWEST_TOKENS", 16)


@pytest.fixture(name="ready", scope="module")
def fixture_ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    """Return a function that creates transformers' model, ours and the folder of both."""
    built: dict[str, tuple[Any, LoadedModel, Path]] = {}

    def ready(kind: str) -> tuple[Any, LoadedModel, Path]:
        if kind not in built:
            network, folder = build(kind), tmp_path_factory.mktemp(kind)
            network.lm_head.weight[IMAGE] = 0  # so that it is never generated
            save(network, folder)
            built[kind] = network, load(folder, torch.float32), folder
        return built[kind]

    return ready


def text(count: int, seed: int) -> list[int]:
    """Return random tokens of text."""
    return random.Random(seed).choices(range(3, BEGIN - 1), k=count)


def requests(image_spec: ImageSpec) -> list[SequenceRequest]:
    """Return prompts with extreme, repeated, several and no images, and text between them."""
    common = text(21, 0)
    prompt_parts: list[list[Any]] = [
        [text(9, 1), (DOT, 1), text(14, 2)],
        [common, (WIDE, 2), text(5, 3)],
        [text(30, 4)],
        [common, (WIDE, 2), text(8, 5)],
        [common, (WIDE, 3), text(5, 6)],
        [(STRIP, 4), text(2, 7), (WIDE, 2), (SMALL, 1), text(3, 8)],
        [common, (SQUARE, 4), text(7, 9), (STRIP, 2), text(1, 10)],
        [text(40, 11)],
    ]
    return [shown_request(image_spec, parts, 20, GREEDY) for parts in prompt_parts]


def spec_of(model: LoadedModel) -> ImageSpec:
    """Return the model's image specification."""
    assert model.vision_encoder is not None
    return model.vision_encoder.image_spec


def check_rows(
    network: Any, model: LoadedModel, folder: Path, work: list[SequenceRequest], **options: int
) -> tuple[int, int]:
    """Compare rows with transformers' greedy ones; return the preempted and the cached."""
    results, stats = run_all(model, work, **options)
    for request, result in zip(work, results, strict=True):
        ids, scores = judge(network, folder, request, result.token_ids)
        assert result.token_ids == ids
        own = [entry.logprob for entry in result.logprobs or () if entry]
        assert own == pytest.approx(scores, abs=1e-4)
    return stats.preemptions, stats.cached_tokens


@torch.inference_mode()
def judge(
    network: Any, folder: Path, request: SequenceRequest, generated: list[int]
) -> tuple[list[int], list[float]]:
    """Return what transformers predicts at each position of an output, in one pass."""
    inputs = inputs_of(folder, request)
    inputs["input_ids"] = torch.tensor([request.prompt_ids + generated])
    if request.images:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    logits = network(**inputs, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    best = logits.log_softmax(-1).max(dim=-1)
    return best.indices.tolist(), best.values.tolist()


@pytest.mark.parametrize(
    ("kind", "is_tight"),
    with_long([("qwen3_5", True)], [("qwen3_5", False), *product(["qwen3_5_moe"], [True, False])]),
)
def test_greedy_rows_match_transformers(ready: Ready, kind: str, *, is_tight: bool) -> None:
    """Tokens and log-probabilities are equal, also chunked, shared, preempted and ahead."""
    network, model, folder = ready(kind)
    options = TIGHT if is_tight else {"budget": 400}
    preempted, cached = check_rows(network, model, folder, requests(spec_of(model)), **options)
    assert cached == 32
    assert (preempted > 0) is is_tight


@pytest.mark.parametrize(("seed", "cached"), [(1, 16), (2, 0)], ids=["same", "different"])
def test_a_state_within_an_image_is_shared_only_by_the_same_image(
    ready: Ready, seed: int, cached: int
) -> None:
    """A page ends after six of sixteen image tokens, whose IDs are equal for every image."""
    network, model, folder = ready("qwen3_5")
    parts: list[list[Any]] = [
        [text(9, 0), (SQUARE, shown), text(3, later)] for shown, later in ((1, 1), (seed, 2))
    ]
    work = [shown_request(spec_of(model), own, 20, GREEDY) for own in parts]
    assert check_rows(network, model, folder, work) == (0, cached)


def test_positions_are_those_of_transformers(ready: Ready) -> None:
    """Each token has three, and text continues after an image's longer side."""
    network, model, folder = ready("qwen3_5")
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


@pytest.mark.parametrize("size", [DOT, STRIP, STRIP[::-1], (300, 170)], ids=str)
def test_pixels_and_token_counts_are_those_of_the_processor(
    ready: Ready, size: tuple[int, int]
) -> None:
    """An image of any shape is resized to the same squares of 32 pixels."""
    from transformers import AutoImageProcessor

    _, model, folder = ready("qwen3_5")
    processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
    levels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(levels).save(buffer, "PNG")
    spec, budget = spec_of(model), MemoryBudget(2**30)
    seen = decode_and_resize(buffer.getvalue(), spec, max_pixels=10**6, budget=budget)
    wanted = processor([Image.fromarray(levels)], return_tensors="pt")
    assert seen.num_tokens == int(wanted["image_grid_thw"].prod()) // 4
    shown = processor([seen.pixels], return_tensors="pt", do_resize=False)
    assert torch.equal(shown["pixel_values"], wanted["pixel_values"])


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_config_without_an_image_token_has_that_of_its_class(kind: str, tmp_path: Path) -> None:
    """It is not the one of Qwen3-VL's vocabulary."""
    import json

    import transformers

    config = config_of(kind).to_dict()
    del config["image_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPARED[kind]))
    vision = read_vision_config(read_hf_config(str(tmp_path)))
    assert vision is not None
    assert vision.image_spec.token == transformers.AutoConfig.for_model(kind).image_token_id
