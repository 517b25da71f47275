"""`--batch-invariant`: rows are the same bytes whatever runs next to them, or it is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.endpoints.decisions.spelled_labels import byte_level, save_model
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels.cpu import linear
from tidemill.engine.load import load_served
from tidemill.engine.model.batch_invariance import check_batch_invariance
from tidemill.engine.model.loading import load_model

pytestmark = pytest.mark.usefixtures("proved")

# Steps of parts of a prompt, and of all of them.
BUDGETS = (40, 2048)
AT_ONCE = (1, 8)
CHOICES = [{"value": str(number)} for number in range(6)]
QUESTIONS = [
    {"type": "predicate", "instructions": "Does it rain?"},
    {"type": "choice", "instructions": "Which?", "choices": CHOICES},
]


def bodies(layout: str) -> list[dict[str, Any]]:
    """Return decisions of different lengths, some of which begin alike."""
    states = ["It rains. " * (number % 4 * 6) + f"Row {number}." for number in range(8)]
    return [{"input": state, "questions": QUESTIONS, "question_layout": layout} for state in states]


def answers(folder: Path, dtype: str, layout: str) -> list[list[str]]:
    """Return all answers, in each of several ways."""
    every = []
    for budget in BUDGETS:
        config = EngineConfig(
            str(folder),
            dtype=dtype,  # type: ignore[arg-type] # a name
            device="cpu",
            max_num_batched_tokens=budget,
            max_num_seqs=32,
            max_model_len=2048,
            batch_invariant=True,
        )
        served = load_served(config, served_names=("tiny",))
        for at_once in AT_ONCE:
            salted = [body | {"cache_salt": str(at_once)} for body in bodies(layout)]
            for _ in ("not cached", "cached"):
                every.append(asyncio.run(read(served, salted, at_once)))  # noqa: PERF401
        served.close()
    return every


async def read(served: Any, requests: Sequence[dict[str, Any]], at_once: int) -> list[str]:
    """Return the answers to decisions, with `at_once` of them in flight."""
    places = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any]) -> str:
        async with places:
            reply = await served.respond("/v1/decisions", body, "r", 0)
        assert reply.status_code == 200, reply.body
        return json.dumps(reply.body["answers"])

    return await asyncio.gather(*map(one, requests))


@pytest.mark.parametrize(
    ("family", "dtype", "layout"),
    [
        ("LlamaConfig", "bfloat16", "row_first"),
        ("LlamaConfig", "float32", "questions_first"),
        ("MistralConfig", "bfloat16", "questions_first"),
        ("Qwen3_5TextConfig", "bfloat16", "row_first"),
        ("BambaConfig", "float32", "row_first"),
        ("GptOssConfig", "bfloat16", "row_first"),
        ("Glm4MoeConfig", "float32", "row_first"),
        ("BambaConfig", "bfloat16", "row_first"),
    ],
)
def test_reads_are_the_same_bytes_in_all_ways(
    tmp_path: Path, family: str, dtype: str, layout: str
) -> None:
    """Neither rows next to them, nor chunks, nor cached pages change a bit."""
    save_model(tmp_path, family, byte_level())
    alone, *others = answers(tmp_path, dtype, layout)
    assert all(other == alone for other in others)


def test_a_processor_without_own_products_multiplies_tiles_of_fixed_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then torch and oneDNN compute, whose sums depend on the number of rows."""
    monkeypatch.setattr(linear, "supports", lambda _: False)
    save_model(tmp_path, "LlamaConfig", byte_level())
    alone, *others = answers(tmp_path, "float32", "row_first")
    assert all(other == alone for other in others)


def test_models_and_devices_with_other_sums_are_refused(tmp_path: Path) -> None:
    """The message says why, and what to do about it where something helps."""
    save_model(tmp_path / "latent", "DeepseekV3Config", byte_level())
    latent = EngineConfig(str(tmp_path / "latent"), device="cpu", batch_invariant=True)
    with pytest.raises(ModelRefused, match="its attention runs in torch"):
        load_model(latent)
    save_model(tmp_path / "plain", "LlamaConfig", byte_level())
    plain = EngineConfig(str(tmp_path / "plain"), device="cpu", batch_invariant=True)
    loaded = load_model(plain)
    with pytest.raises(ModelRefused, match="add --device cpu"):
        check_batch_invariance(plain, replace(loaded, device=torch.device("cuda")))
    others = type("Network", (), {"needs_torch": True})()
    with pytest.raises(ModelRefused, match="transformers runs this model"):
        check_batch_invariance(plain, replace(loaded, network=others))


def test_a_network_whose_bits_change_is_refused(tmp_path: Path) -> None:
    """The last defence is a prompt that is computed in several ways."""
    save_model(tmp_path, "LlamaConfig", byte_level())
    config = EngineConfig(str(tmp_path), device="cpu", batch_invariant=True)
    loaded = load_model(config)
    head = loaded.network._head  # type: ignore[attr-defined]
    loaded.network._head = lambda x: head(x) + 1e-4 * len(x)  # type: ignore[attr-defined]
    with pytest.raises(ModelRefused, match="depend on other rows on this machine"):
        check_batch_invariance(config, loaded)
