"""Vision models give the output of transformers' own classes for any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.families import VOCAB
from tests.engine.test_parity import run_all
from tests.engine.vision_models import BEGIN, build, generated, inputs_of, load, save, shown_request
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.scheduling.images import ImageSpec
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.protocol.errors import InternalError

KINDS = ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"]
# These are also compared in `tasks/test_image_processors`.
OTHERS = ["gemma4", "internvl"]
NEW_TOKENS = 20
SMALL, WIDE, TALL = (56, 56), (60, 130), (120, 80)
GREEDY = Sampling(temperature=0)

Ready = Callable[..., tuple[Any, LoadedModel, Path]]


@pytest.fixture(name="ready", scope="module")
def fixture_ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    """Return a function that creates transformers' model, ours and the folder of both."""
    built: dict[str, tuple[Any, Path]] = {}

    def ready(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, LoadedModel, Path]:
        if kind not in built:
            built[kind] = build(kind), tmp_path_factory.mktemp(kind)
            save(*built[kind])
        network, folder = built[kind]
        return network, load(folder, dtype), folder

    return ready


def requests(image_spec: ImageSpec, sampling: Sampling = GREEDY) -> list[SequenceRequest]:
    """Return prompts with no image, one or several, and repeats with the same prefix."""
    rng = random.Random(3)

    def text(count: int) -> list[int]:
        return rng.choices(range(3, BEGIN - 1), k=count)

    common = text(21)
    prompt_parts: list[list[Any]] = [
        [text(9), (SMALL, 1), text(14)],
        [common, (WIDE, 2), text(5)],
        [text(30)],
        [common, (WIDE, 2), text(8)],
        [common, (WIDE, 3), text(5)],
        [(TALL, 4), text(2), (WIDE, 2), (SMALL, 1), text(3)],
        [common, (TALL, 4), text(7), (WIDE, 2), text(1)],
        [text(40)],
    ]
    return [shown_request(image_spec, parts, NEW_TOKENS, sampling) for parts in prompt_parts]


def sight_of(model: LoadedModel) -> ImageSpec:
    """Return the model's image specification."""
    assert model.vision_encoder is not None
    return model.vision_encoder.image_spec


@pytest.mark.parametrize("steps_ahead", with_long([1], [0]))
@pytest.mark.parametrize("kind", with_long(KINDS, OTHERS))
def test_greedy_tokens_match_generate(ready: Ready, kind: str, steps_ahead: int) -> None:
    """Chunked, mixed with text rows, shared, preempted or ahead, results equal those alone."""
    network, model, folder = ready(kind)
    work = requests(sight_of(model))
    pages = 16 if kind == "gemma4" else 9  # its smallest image has 70 tokens
    results, stats = run_all(model, work, num_pages=pages, budget=10, steps_ahead=steps_ahead)
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    for request, result in zip(work, results, strict=True):
        assert result.token_ids == generated(network, folder, request)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_scores_are_as_close_to_fp32_as_transformers(ready: Ready, kind: str) -> None:
    """Both round, and ours no more than transformers."""
    network, model, folder = ready(kind, torch.bfloat16)
    with_images = [request for request in requests(sight_of(model)) if request.images]
    scored = [replace(request, max_tokens=0, prompt_logprobs=0) for request in with_images]
    results, _ = run_all(model, scored)
    got = [entry.logprob for row in results for entry in (row.prompt_logprobs or ()) if entry]
    rounded = deepcopy(network).bfloat16()
    truth, theirs = (
        torch.cat([_scores(judge, folder, request) for request in with_images])
        for judge in (network, rounded)
    )
    assert (torch.tensor(got) - truth).norm() <= 1.2 * (theirs - truth).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_scores_match_eager_attention(ready: Ready, kind: str) -> None:
    """Chunks cover all of a prompt's tokens, including image tokens."""
    network, model, folder = ready(kind)
    with_images = [request for request in requests(sight_of(model)) if request.images]
    results, _ = run_all(
        model, [replace(one, max_tokens=0, prompt_logprobs=0) for one in with_images]
    )
    for request, row in zip(with_images, results, strict=True):
        got = [entry.logprob for entry in (row.prompt_logprobs or ()) if entry]
        assert got == pytest.approx(_scores(network, folder, request).tolist(), abs=1e-3)


@pytest.mark.parametrize("kind", with_long(KINDS[:1], KINDS[1:]))
def test_choices_and_other_rows_do_not_change_sampled_rows(ready: Ready, kind: str) -> None:
    """With several choices of one prompt, alone or preempted among many, the seed decides."""
    _, model, _ = ready(kind)
    work = [
        replace(request, sampling=Sampling(temperature=0.9, top_p=0.95, seed=seed))
        for request in requests(sight_of(model))
        for seed in (1, 2)
    ]
    together, stats = run_all(model, work, num_pages=9, budget=10)
    assert stats.preemptions > 0
    for request, row in [*zip(work, together, strict=True)][::3]:
        (alone,), _ = run_all(model, [request], budget=256, steps_ahead=1)
        assert alone.token_ids == row.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_is_served(ready: Ready, kind: str) -> None:
    """A vision model also generates from prompts without images, for every token of its text."""
    network, model, folder = ready(kind)
    rng = random.Random(5)
    work = [
        SequenceRequest(rng.choices(range(3, BEGIN - 1), k=count), NEW_TOKENS, GREEDY)
        for count in (1, 17, 60)
    ]
    assert max(max(request.prompt_ids) for request in work) < VOCAB
    results, _ = run_all(model, work)
    for request, result in zip(work, results, strict=True):
        assert result.token_ids == generated(network, folder, request)


@pytest.mark.parametrize("failure", [RuntimeError("a bad eye"), torch.OutOfMemoryError()], ids=repr)
def test_a_tower_failure_fails_only_its_request(ready: Ready, failure: Exception) -> None:
    """Other requests give the same results as without it."""
    network, model, folder = ready("gemma3")
    assert model.vision_encoder is not None
    work = requests(sight_of(model))
    worst = work[0].images[0].pixels
    tower = model.vision_encoder.tower

    class Failing:
        """A tower that fails for one image."""

        def encode(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
            """Return an image's vectors, or fail."""
            if np.array_equal(pixels, worst):
                raise failure
            return tower.encode(pixels)

    broken = replace(model, vision_encoder=model.vision_encoder._replace(tower=Failing()))
    config = EngineConfig("tiny", max_num_seqs=8, max_num_batched_tokens=64)
    core = make_core(broken, KVCacheSize(100, model.max_model_len), config)
    sequences = [core.add(request) for request in work]
    while core.step() is not None:
        pass
    for request, sequence in zip(work, sequences, strict=True):
        if any(np.array_equal(one.pixels, worst) for one in request.images):
            assert isinstance(sequence.error, InternalError)
        else:
            assert sequence.result().token_ids == generated(network, folder, request)


@torch.inference_mode()
def _scores(network: Any, folder: Path, request: SequenceRequest) -> torch.Tensor:
    inputs = inputs_of(folder, request)
    dtype = next(network.parameters()).dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    logprobs = network(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
    tokens = inputs["input_ids"][0, 1:]
    return logprobs[:-1].gather(1, tokens[:, None]).squeeze(1)
