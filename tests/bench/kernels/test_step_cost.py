"""What a step costs, and what of it is the weights' reading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.kernels.step_cost import WeightReader, measure
from tests.long_parameters import with_long
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model.kv_cache_size import compute_kv_cache_size
from tidemill.engine.model.loading import load_model


def test_matrices_are_read_in_the_dtype_of_the_steps(tmp_path: Path) -> None:
    """Norms are no part of the reading, and a step in fp32 reads twice the bytes of bf16."""
    tensors = {"matrix": torch.ones(6, 4), "norm": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert WeightReader(tmp_path, torch.bfloat16).num_bytes == 48
    assert WeightReader(tmp_path, torch.float32).num_bytes == 96


@pytest.mark.parametrize("context", with_long([3], [40]))
def test_a_step_is_told_by_its_parts(context: int) -> None:
    """Every part has its share of the demo model's step, whose sequences are gone afterwards."""
    config = EngineConfig(str(MODEL_PATH), dtype="float32", kv_cache_memory=1 << 26)
    model = load_model(config)
    work = make_core(model, compute_kv_cache_size(model, config), config)
    reader = WeightReader(MODEL_PATH, model.dtype)
    cost = measure(work, reader, model.vocab_size, 2, context)
    assert cost.milliseconds > 0
    assert all(part > 0 for part in cost.parts)
    assert work.stats().running == work.stats().waiting == 0
