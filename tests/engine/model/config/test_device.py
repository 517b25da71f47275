"""Selection of a model's device, dtype and context length."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels import backends
from tidemill.engine.kernels.triton import driver
from tidemill.engine.model.config import device
from tidemill.engine.model.config.device import (
    choose_device,
    choose_dtype,
    context_length,
    matmul_flops,
    step_limits,
)
from tidemill.protocol.contract import EngineError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    """--max-model-len may shorten the context, never stretch it."""
    assert context_length(EngineConfig("m"), 512) == 512
    assert context_length(EngineConfig("m", max_model_len=100), 512) == 100
    with pytest.raises(ModelRefused, match="512 positions"):
        context_length(EngineConfig("m", max_model_len=513), 512)


def test_a_model_without_positions_has_the_default_context() -> None:
    """Any requested context is allowed."""
    assert context_length(EngineConfig("m"), None) == 4096
    assert context_length(EngineConfig("m", max_model_len=9999), None) == 9999


@pytest.mark.parametrize(
    ("stored", "has_bf16", "dtype"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.bfloat16),
        (torch.float16, False, torch.float32),
        (torch.float32, True, torch.float32),
        (None, True, torch.float32),
    ],
)
def test_a_cpu_takes_the_dtype_that_it_can_compute_in(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, *, has_bf16: bool, dtype: torch.dtype
) -> None:
    """Halves are emulated without instructions for them, and fp16 always."""
    monkeypatch.setattr(device, "_cpu_has_bfloat16", lambda: has_bf16)
    assert choose_dtype("auto", stored, CPU) == dtype
    assert choose_dtype("float16", stored, CPU) == torch.float16


def test_a_gpu_uses_the_stored_dtype() -> None:
    """The CPU's abilities do not matter."""
    assert choose_dtype("auto", torch.float16, CUDA) == torch.float16


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error contains the option and a remedy; `auto` uses the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    for built, helps in (("13.0", "nvidia-smi"), (None, "built for CPUs only")):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(ModelRefused, match=f"--device cuda .*{helps}"):
            choose_device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make torch report an Ampere card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "_capability", lambda _: (8, 0))
    return monkeypatch


def test_a_gpu_whose_kernels_cannot_be_launched_is_refused(card: pytest.MonkeyPatch) -> None:
    """The error comes before anything is loaded, with the reason and a remedy."""
    card.setattr(driver, "launch_problem", lambda: None)
    assert choose_device("auto") == CUDA
    card.setattr(driver, "launch_problem", lambda: "install gcc")
    with pytest.raises(EngineError, match="install gcc, or use --device cpu"):
        choose_device("auto")
    card.setitem(sys.modules, "tidemill.engine.kernels.triton.driver", None)
    with pytest.raises(EngineError, match="triton, which cannot be imported"):
        choose_device("auto")
    card.setattr(torch.version, "hip", "7.0")
    with pytest.raises(EngineError, match="AMD"):
        choose_device("auto")
    assert choose_device("cpu") == CPU


def test_a_gpu_older_than_the_kernels_needs_none_of_them(card: pytest.MonkeyPatch) -> None:
    """Everything runs with torch's own functions."""
    card.setattr(backends, "_capability", lambda _: (7, 5))
    card.setattr(driver, "launch_problem", lambda: "install gcc")
    assert choose_device("cuda") == CUDA
    assert not backends.has_triton(CUDA)


@pytest.mark.parametrize(
    ("gibibytes", "limits"),
    [(139.8, (1024, 8192)), (79.2, (1024, 8192)), (44.4, (256, 4096)), (21.9, (256, 4096))],
)
def test_step_limits_follow_from_the_card(
    monkeypatch: pytest.MonkeyPatch, gibibytes: float, limits: tuple[int, int]
) -> None:
    """The limits follow from the memory that torch reports for an H200, H100, L40S and L4."""
    card = SimpleNamespace(total_memory=int(gibibytes * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert step_limits(EngineConfig("m"), CUDA) == limits


@pytest.mark.parametrize(
    ("num_graph_tokens", "limits"),
    [(1_811, (1024, 8192)), (23_545, (1471, 23_545)), (41_856, (2048, 32_768))],
)
def test_an_encoder_has_steps_that_take_as_long_as_a_launch(
    monkeypatch: pytest.MonkeyPatch, num_graph_tokens: int, limits: tuple[int, int]
) -> None:
    """The limits are of models of 8B, BERT large and BERT base on an H100; a CPU's never change."""
    card = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    config = EngineConfig("m")
    assert step_limits(config, CUDA, num_graph_tokens) == limits
    assert step_limits(config, CPU, num_graph_tokens) == step_limits(config, CPU)
    requested = EngineConfig("m", max_num_seqs=7, max_num_batched_tokens=99)
    assert step_limits(requested, CUDA, num_graph_tokens) == (7, 99)


def test_step_limits_can_be_requested() -> None:
    """If only one limit is requested, the other is lowered to fit."""
    assert step_limits(EngineConfig("m"), CPU) == (256, 2048)
    assert step_limits(EngineConfig("m", max_num_seqs=7), CPU) == (7, 2048)
    assert step_limits(EngineConfig("m", max_num_seqs=3000), CPU) == (3000, 3000)
    assert step_limits(EngineConfig("m", max_num_batched_tokens=99), CPU) == (99, 99)
    both = EngineConfig("m", max_num_seqs=10, max_num_batched_tokens=20)
    assert step_limits(both, CPU) == (10, 20)


@pytest.mark.parametrize(
    ("capability", "count", "teraflops"),
    [
        ((8, 0), 108, 249),
        ((8, 6), 72, 100),
        ((8, 7), 72, 100),
        ((8, 9), 142, 237),
        ((9, 0), 132, 790),
        ((10, 3), 148, 1800),
        ((12, 1), 188, 400),
    ],
)
def test_products_are_as_fast_as_a_card_of_the_kind(
    capability: tuple[int, int], count: int, teraflops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of multiprocessors counts; an unknown capability uses the older one's rate."""
    card = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert round(matmul_flops(CUDA) / 1e12) == teraflops
