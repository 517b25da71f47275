"""The engine's output equals that of transformers' eager attention for any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import (
    BY_TRANSFORMERS,
    FAMILIES,
    LATENTS,
    ONLY_OURS,
    RECURRENT,
    SPARSE,
    VARIANTS,
    VOCAB,
    build,
    judge,
)
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf.forward import ATTENTION
from tidemill.engine.model.hf.model import prepare
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest, SequenceResult
from tidemill.engine.state import rows
from tidemill.protocol.contract import EngineStats

NEW_TOKENS = 24
OURS = [("ours", family) for family in FAMILIES]
OUR_VARIANTS = [("ours", variant) for variant in VARIANTS]
# Only attention is ours in transformers' network; these families have every form of it.
THEIRS = [("transformers", family) for family in BY_TRANSFORMERS]
THEIR_VARIANTS = [
    ("transformers", variant)
    for variant, (config, _) in VARIANTS.items()
    if config not in ONLY_OURS
]
# Their mechanisms are those of other families.
BREADTH = [("ours", "HYV3Config"), ("ours", "North, RMS norms")]
IN_BF16 = [*OURS[::9], *THEIRS[::4]]
# These have layers with windows or chunks.
SHORT_SIGHTED = {"Gemma3TextConfig", "GptOssConfig", "Llama4TextConfig"}
# Rows of these are also computed in turn, where all are computed ahead: the order of steps does not
# depend on the family.
IN_TURN = set(BY_TRANSFORMERS)
CPU = torch.device("cpu")

EXPERT_WORDS = (
    *("Mo", "Mixtral", "GptOss", "MiniMax", "Dots", "Deepseek", "Qwen3Next", "Llama4"),
    *("SolarOpen", "Afmoe", "HYV3", "North"),
)
# Pages for one group of layers, so few that sequences are preempted; fewer if most layers have a
# window.
FEW_PAGES = {"GptOssConfig": 17, "Llama4TextConfig": 11}

Ready = Callable[..., tuple[Any, LoadedModel]]


@pytest.fixture(autouse=True)
def fixture_short_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prefixes of one page be shared through snapshots."""
    monkeypatch.setattr(rows, "FEWEST_TOKENS", 16)


def run_all(
    model: LoadedModel,
    requests: list[SequenceRequest],
    *,
    num_pages: int = 400,
    max_num_seqs: int = 8,
    budget: int = 16,
    steps_ahead: int = 0,
) -> tuple[list[SequenceResult], EngineStats]:
    """Run requests with a budget that forces chunks, mixed steps and queueing."""
    config = EngineConfig(
        "tiny",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        steps_ahead=steps_ahead,
    )
    num_pages *= len(model.layer_groups)
    room = KVCacheSize(num_pages, model.max_model_len, max_num_seqs + 1)
    work = make_core(model, room, config)
    sequences = [work.add(request) for request in requests]
    while work.step() is not None:
        pass
    return [sequence.result() for sequence in sequences], work.stats()


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Make prompts of 1 to 70 tokens, half of them with a common prefix."""
    rng = random.Random(seed)
    common = rng.choices(range(3, VOCAB), k=27)
    result = []
    for index in range(count):
        own = rng.choices(range(3, VOCAB), k=rng.randint(1, 43))
        result.append(common + own if index % 2 else own)
    return result


@pytest.fixture(name="ready", params=["ours", "transformers"])
def fixture_ready(request: pytest.FixtureRequest, tmp_path: Path) -> Ready:
    """Return a function that creates the eager model and the engine's model on either network."""

    def ready(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, LoadedModel]:
        eager: Any = build(family)
        for parameter in eager.parameters():  # not rope frequencies: they stay fp32 when loaded
            parameter.data = parameter.to(dtype)
        if request.param == "ours":
            eager.save_pretrained(tmp_path)
            return eager, run_by_ours(tmp_path, dtype)
        network = deepcopy(eager)
        network.config._attn_implementation = ATTENTION
        return eager, prepare(network, EngineConfig(family), dtype, CPU)

    return ready


def run_by_ours(folder: Path, dtype: torch.dtype) -> LoadedModel:
    """Return the model in a folder, run by our decoder."""
    description = read_hf_config(str(folder))
    checkpoint = find_checkpoint(str(folder))
    return native.load(checkpoint, description, architecture_of(description), dtype, CPU)


@torch.inference_mode()
def scores(network: Any, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities of a prompt's tokens after the first, from the network."""
    logprobs = network(torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize(
    ("ready", "family"),
    with_long(
        [each for each in (*OURS, *OUR_VARIANTS, *THEIRS) if each not in BREADTH],
        [*BREADTH, *THEIR_VARIANTS],
    ),
    indirect=["ready"],
)
def test_greedy_tokens_and_logprobs_match_eager_attention(ready: Ready, family: str) -> None:
    """Each family gives its eager output: packed, chunked, shared, preempted, drafted and ahead."""
    eager, model = ready(family)
    work = prompts(10)
    sampling = Sampling(temperature=0, logprobs=0)
    requests = [SequenceRequest(prompt, NEW_TOKENS, sampling) for prompt in work]
    for steps_ahead in (0, 1) if family in IN_TURN else (1,):
        results, stats = run_all(
            model, requests, num_pages=FEW_PAGES.get(family, 21), steps_ahead=steps_ahead
        )
        # If many drafts are right, sequences end before pages run out.
        assert stats.preemptions > 0 or stats.accepted_tokens > 50
        assert stats.cached_tokens > 0
        check_greedy(eager, work, results)


def test_selected_tokens_are_those_of_eager_attention(tmp_path: Path) -> None:
    """Sequences outgrow a selection of 8 tokens in chunks, next to each other and preempted."""
    eager: Any = build("GlmMoeDsaConfig", num_hidden_layers=3)
    eager.save_pretrained(tmp_path)
    work = prompts(6)
    sampling = Sampling(temperature=0, logprobs=0)
    requests = [SequenceRequest(prompt, NEW_TOKENS, sampling) for prompt in work]
    model = run_by_ours(tmp_path, torch.float32)
    results, stats = run_all(model, requests, num_pages=14, steps_ahead=1)
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    check_greedy(eager, work, results)


def check_greedy(eager: Any, work: list[list[int]], results: list[SequenceResult]) -> None:
    """Compare tokens and log-probabilities with those of the eager model."""
    for prompt, got in zip(work, results, strict=True):
        assert len(got.token_ids) == NEW_TOKENS
        ids, logprobs = judge(eager, prompt, got.token_ids)
        assert got.token_ids == ids
        assert got.logprobs is not None
        assert [entry.logprob for entry in got.logprobs] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*RECURRENT, *LATENTS, *SHORT_SIGHTED} - SPARSE))
def test_greedy_tokens_match_eager_attention_at_8k_tokens(tmp_path: Path, family: str) -> None:
    """Chunks have 700 tokens; the second prompt shares half of the first, the third equals it."""
    eager = build(family, max_position_embeddings=16_384)
    eager.save_pretrained(tmp_path)
    model = run_by_ours(tmp_path, torch.float32)
    whole = random.Random(1).choices(range(3, VOCAB), k=8180)
    work = [whole, whole[:4000] + whole[100:200], whole]
    sampling = Sampling(temperature=0, logprobs=0)
    requests = [SequenceRequest(prompt, NEW_TOKENS, sampling) for prompt in work]
    results, stats = run_all(model, requests, num_pages=1600, budget=700, steps_ahead=1)
    assert stats.cached_tokens > 4000
    check_greedy(eager, work, results)


# Each load also checks its model in the dtype that is served.
@pytest.mark.parametrize(
    ("ready", "family"),
    with_long(IN_BF16, [each for each in (*OURS, *OUR_VARIANTS, *THEIRS) if each not in IN_BF16]),
    indirect=["ready"],
)
def test_in_bf16_scores_are_as_close_to_fp32_as_eager_attention(ready: Ready, family: str) -> None:
    """Both round, and ours no more than eager; with few prompts, a changed expert is just luck."""
    has_experts = any(word in family for word in EXPERT_WORDS)
    sampled = [prompt for prompt in prompts(24 if has_experts else 8, seed=4) if len(prompt) > 10]
    eager, model = ready(family, torch.bfloat16)
    exact = deepcopy(eager).float()
    sampling = Sampling(temperature=0)
    results, _ = run_all(
        model, [SequenceRequest(prompt, 0, sampling, prompt_logprobs=0) for prompt in sampled]
    )
    got = [entry.logprob for result in results for entry in (result.prompt_logprobs or ()) if entry]
    truth, own_ = (torch.cat([scores(judge, ids) for ids in sampled]) for judge in (exact, eager))
    errors, own = (torch.tensor(got) - truth).abs(), (own_ - truth).abs()
    if has_experts:
        assert errors.median() <= 2 * own.median()
    else:
        assert errors.norm() <= 1.2 * own.norm()


@pytest.mark.parametrize("family", with_long(["Qwen3Config"], ["Gemma2Config"]))
def test_a_sampled_row_does_not_depend_on_other_rows(ready: Ready, family: str) -> None:
    """The same seed gives the same row alone, ahead, packed, chunked, shared and preempted."""
    _, model = ready(family)
    requests = [
        SequenceRequest(
            prompt,
            NEW_TOKENS,
            Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=index, frequency_penalty=penalty),
        )
        for index, prompt in enumerate(prompts(10, seed=5))
        for penalty in (0.0, 0.3)
    ]
    together, stats = run_all(model, requests, num_pages=14)
    assert stats.preemptions > 0
    for request, got in [*zip(requests, together, strict=True)][::3]:
        (alone,), _ = run_all(model, [request], budget=256, steps_ahead=1)
        assert alone.token_ids == got.token_ids


@pytest.mark.parametrize(
    "family", with_long(["GptOssConfig"], ["Qwen3Config", "Gemma3, near and far"])
)
def test_sampled_rows_do_not_depend_on_the_network(tmp_path: Path, family: str) -> None:
    """Our decoder and transformers' classes give the same rows."""
    eager: Any = build(family)
    eager.save_pretrained(tmp_path)
    by_ours = run_by_ours(tmp_path, torch.float32)
    eager.config._attn_implementation = ATTENTION
    by_transformers = prepare(eager, EngineConfig(family), torch.float32, CPU)
    requests = [
        SequenceRequest(prompt, NEW_TOKENS, Sampling(temperature=0.9, top_p=0.95, seed=index))
        for index, prompt in enumerate(prompts(10, seed=8))
    ]
    ours, theirs = (run_all(model, requests)[0] for model in (by_ours, by_transformers))
    assert [row.token_ids for row in ours] == [row.token_ids for row in theirs]


def test_another_seed_gives_another_row(ready: Ready) -> None:
    """Only the seed distinguishes two sampled rows of one prompt."""
    _, model = ready("Qwen3Config")
    prompt = prompts(1)[0]
    rows, _ = run_all(
        model,
        [SequenceRequest(prompt, NEW_TOKENS, Sampling(seed=seed)) for seed in (1, 2, 1)],
    )
    assert rows[0].token_ids == rows[2].token_ids
    assert rows[0].token_ids != rows[1].token_ids


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_prompt_logprobs_match_eager_attention(
    ready: Ready, steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are scored in chunks and tiles, next to another with the same prefix."""
    monkeypatch.setattr("tidemill.engine.loop.logprobs.MAX_SCORED_ROWS", 5)
    eager, model = ready("LlamaConfig")
    prompt = prompts(2)[1]
    request = SequenceRequest(prompt, 0, Sampling(temperature=0), prompt_logprobs=2)
    rows, _ = run_all(model, [request, request], steps_ahead=steps_ahead)
    expected = scores(eager, prompt)
    for row in rows:
        assert row.token_ids == []
        assert row.prompt_logprobs is not None
        assert row.prompt_logprobs[0] is None
        got = [entry.logprob for entry in row.prompt_logprobs[1:] if entry]
        assert got == pytest.approx(expected.tolist(), abs=1e-4)
        assert all(len(entry.top) == 2 for entry in row.prompt_logprobs[1:] if entry)
