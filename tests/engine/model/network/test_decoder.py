"""The rows that a step of our decoder computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.families import build
from tidemill.engine.kernels.step import Step
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.weights.checkpoint import find_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(name="model")
def fixture_model(tmp_path: Path) -> LoadedModel:
    """Return a tiny Qwen3, run by our decoder."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config = read_hf_config(str(tmp_path))
    checkpoint = find_checkpoint(str(tmp_path))
    return native.load(checkpoint, hf_config, architecture_of(hf_config), torch.float32, CPU)


def prompt_step(count: int, rows: list[int]) -> Step:
    """Return a step of one prompt."""
    return Step.pack(
        0,
        CPU,
        token_ids=np.arange(3, 3 + count),
        positions=np.arange(count),
        slots=np.arange(count),
        query_starts=np.array([0, count]),
        context_lengths=np.array([0]),
        page_starts=np.array([0, 1]),
        pages=np.array([0]),
        logit_rows=np.array(rows, np.int64),
    )


@torch.inference_mode()
def run(model: LoadedModel, steps: list[Step]) -> list[torch.Tensor]:
    """Return the logits of steps that follow each other."""
    attention = model.attention(2)
    logits = []
    for step in steps:
        attention.prepare(step)
        logits.append(model.network.forward(step, attention))
    return logits


def test_logits_are_those_of_the_requested_rows_in_order(model: LoadedModel) -> None:
    """Some rows, all rows, or one of them twice are requested; others do not affect them."""
    (every,) = run(model, [prompt_step(9, list(range(9)))])
    (some,) = run(model, [prompt_step(9, [7, 2, 2])])
    torch.testing.assert_close(some, every[[7, 2, 2]], atol=1e-5, rtol=1e-5)


def test_a_step_without_rows_still_leaves_its_keys_and_values(model: LoadedModel) -> None:
    """A prompt's chunk before its last has no logits, but all layers' state."""
    (expected,) = run(model, [prompt_step(9, [8])])
    first = prompt_step(8, [])
    last = replace(
        prompt_step(1, [0]),
        token_ids=torch.tensor([11], dtype=torch.int32),
        positions=torch.tensor([8], dtype=torch.int32),
        slots=torch.tensor([8], dtype=torch.int32),
        context_lengths=torch.tensor([8], dtype=torch.int32),
    )
    nothing, got = run(model, [first, last])
    assert nothing.shape == (0, 320)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_layers_are_counted_as_they_begin(model: LoadedModel) -> None:
    """Four a step, whether anybody wants its logits or not."""
    run(model, [prompt_step(9, [8]), prompt_step(9, [])])
    assert model.network.num_layers_started == 8
