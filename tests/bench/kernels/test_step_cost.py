"""Cost of a step, and the share of reading weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.kernels.step_cost import ATTENTION, PRODUCTS, TORCH, WeightReader, measure
from tests.long_parameters import with_long
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.kv_cache_size import compute_kv_cache_size


def test_matrices_are_read_in_the_dtype_of_the_steps(tmp_path: Path) -> None:
    """Norms do not count, and a step in fp32 reads twice the bytes of bf16."""
    tensors = {"matrix": torch.ones(6, 4), "norm": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert WeightReader(tmp_path, torch.bfloat16).num_bytes == 48
    assert WeightReader(tmp_path, torch.float32).num_bytes == 96


@pytest.mark.parametrize("context", with_long([3], [40]))
def test_a_step_is_described_by_its_parts(context: int) -> None:
    """A step calls torch or compiled kernels, and its sequences are gone afterwards.

    No time is compared with zero: a clock or a profiler may be too coarse for it.
    """
    config = EngineConfig(str(MODEL_PATH), dtype="float32", kv_cache_memory=1 << 26)
    model = load_model(config)
    work = make_core(model, compute_kv_cache_size(model, config), config)
    reader = WeightReader(MODEL_PATH, model.dtype)
    cost = measure(work, reader, model.vocab_size, 2, context)
    assert cost.num_sequences == 2
    assert cost.parts.num_calls > 0
    assert work.stats().running == work.stats().waiting == 0


@pytest.mark.parametrize(
    ("name", "is_product", "is_attention"),
    [
        ("<built-in method torch._C._nn.linear>", True, False),
        ("<built-in method torch.mm>", True, False),
        ("<built-in method torch._C._nn.scaled_dot_product_attention>", False, True),
        ("<built-in method torch.cat>", False, False),
        ("<method 'add_' of 'torch._C.TensorBase' objects>", False, False),
    ],
)
def test_functions_of_torch_belong_to_a_part(
    name: str, *, is_product: bool, is_attention: bool
) -> None:
    """The names are those in the profiler's output."""
    assert TORCH.search(name)
    assert bool(PRODUCTS.search(name)) is is_product
    assert bool(ATTENTION.search(name)) is is_attention
