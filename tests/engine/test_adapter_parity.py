"""Rows of several adapters and the base model in one step match merged weights."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapters import ALL, halves, merged, write_adapter
from tests.engine.families import build, judge
from tests.engine.test_parity import NEW_TOKENS, prompts, scores
from tidemill.engine.config import AdmissionName, EngineConfig, LoraModule
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

pytestmark = pytest.mark.usefixtures("proved")

# Adapters of all modules, of some modules at an odd rank, and of one half of a gate.
TARGETS = (ALL, ("q_proj", "v_proj", "qkv_proj"), ("up_proj", "down_proj"))
RANKS = (4, 3, 8)
ALPHA = 8


def models_of(
    family: str, folder: Path, dtype: str = "float32"
) -> tuple[list[Any], LoadedModel, EngineConfig]:
    """Return networks with each adapter merged, the base model first, and the engine's model."""
    network: Any = build(family)
    network.save_pretrained(folder / "model")
    networks, modules = [network], []
    for number, (targets, rank) in enumerate(zip(TARGETS, RANKS, strict=True)):
        own = halves(network, targets, rank=rank, seed=number)
        path = write_adapter(folder / f"adapter-{number}", own, lora_alpha=ALPHA)
        networks.append(merged(network, own, ALPHA / rank))
        modules.append(LoraModule(path.name, str(path)))
    config = EngineConfig(
        str(folder / "model"), dtype=dtype, device="cpu", lora_modules=tuple(modules)
    )  # type: ignore[arg-type]
    return networks, load_model(config), config


@pytest.mark.parametrize("admission", ["arrival", "prefix"])
@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("family", ["Qwen3Config", "Glm4Config"])
def test_greedy_tokens_are_those_of_merged_weights(
    tmp_path: Path, family: str, steps_ahead: int, admission: AdmissionName
) -> None:
    """Prompts are chunked, shared and preempted, and run with the base model and each adapter."""
    networks, model, _ = models_of(family, tmp_path)
    config = EngineConfig(
        "tiny",
        max_num_seqs=8,
        max_num_batched_tokens=16,
        steps_ahead=steps_ahead,
        admission=admission,
    )
    core = make_core(model, KVCacheSize(21, model.max_model_len), config)
    work = [(prompt, number) for prompt in prompts(8) for number in range(len(networks))]
    sampling = Sampling(temperature=0, logprobs=0)
    sequences = [
        core.add(SequenceRequest(prompt, NEW_TOKENS, sampling, adapter=number))
        for prompt, number in work
    ]
    while core.step() is not None:
        pass
    assert core.stats().preemptions > 0
    assert core.stats().cached_tokens > 0
    for (prompt, number), sequence in zip(work, sequences, strict=True):
        got = sequence.result()
        ids, logprobs = judge(networks[number], prompt, got.token_ids)
        assert got.token_ids == ids
        assert got.logprobs is not None
        assert [entry.logprob for entry in got.logprobs] == pytest.approx(logprobs, abs=1e-3)
    texts = {tuple(sequence.result().token_ids) for sequence in sequences}
    assert len(texts) > 3 * len(prompts(8))


@torch.inference_mode()
def test_in_bf16_scores_are_as_near_to_fp32_as_those_of_merged_weights(tmp_path: Path) -> None:
    """Both round; the base and every adapter run next to each other."""
    networks, model, _ = models_of("Qwen3Config", tmp_path, "bfloat16")
    sampled = [prompt for prompt in prompts(8) if len(prompt) > 10]
    config = EngineConfig("tiny", max_num_seqs=8, max_num_batched_tokens=64)
    work = make_core(model, KVCacheSize(400, model.max_model_len), config)
    sampling = Sampling(temperature=0)
    sequences = [
        [
            work.add(SequenceRequest(ids, 0, sampling, prompt_logprobs=0, adapter=number))
            for ids in sampled
        ]
        for number in range(len(networks))
    ]
    while work.step() is not None:
        pass
    for network, own in zip(networks, sequences, strict=True):
        results = [sequence.result().prompt_logprobs or [] for sequence in own]
        got = torch.tensor([entry.logprob for entries in results for entry in entries if entry])
        rounded = deepcopy(network).bfloat16()
        truth, near = (
            torch.cat([scores(judge_, ids) for ids in sampled]) for judge_ in (network, rounded)
        )
        assert (got - truth).norm() <= 1.2 * (near - truth).norm()
