"""Attention parity: kernels that fail beyond a parity check's few tokens are found at load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.families import build
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.cpu.attention import CpuAttention
from tidemill.engine.kernels.quantised import FP8
from tidemill.engine.kernels.reference import ReferenceAttention
from tidemill.engine.kernels.step import Step
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.kernels.triton.latent import TritonLatentAttention
from tidemill.engine.model import attention_parity, native
from tidemill.engine.model.attention_parity import TOLERANCE_UNITS, attention_distance
from tidemill.engine.model.hf import model as transformers_model
from tidemill.engine.model.loading import load_model

CPU = torch.device("cpu")
SHAPES = {
    "grouped": AttentionShape(8, 2, 64, 64, 0.125),
    "window, softcap and sinks": AttentionShape(
        4, 2, 32, 32, 0.2, window=40, softcap=5.0, has_sinks=True
    ),
    "values of another width": AttentionShape(4, 4, 48, 32, 0.15),
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget all cached distances."""
    attention_distance.cache_clear()
    yield
    attention_distance.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_cpus_kernels_are_off_by_rounding_alone(
    shape: AttentionShape, dtype: torch.dtype
) -> None:
    """The error is half of the tolerance; unsupported dtypes use the reference."""
    backend = CpuAttention if CpuAttention.supports([shape], dtype, CPU) else ReferenceAttention
    distance = attention_distance(backend, shape, dtype, dtype, CPU)
    assert distance < max(TOLERANCE_UNITS / 2 * torch.finfo(dtype).eps, 5e-6)


def test_keys_and_values_in_fp8_are_compared_as_they_are_kept() -> None:
    """Their loss from rounding is not an error of the kernels."""
    shape = SHAPES["grouped"]
    assert attention_distance(ReferenceAttention, shape, torch.bfloat16, FP8, CPU) < 0.01


class OwnPages(ReferenceAttention):
    """Reads another page instead of one that decodes share."""

    def prepare(self, step: Step) -> None:
        """See the step so."""
        super().prepare(step)
        if step.num_decodes > 1:
            self._spans[1].pages[2] = self._spans[1].pages[1]


class FirstPart(ReferenceAttention):
    """Loses all parts of a split context except the first."""

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Let a decode see at most 500 tokens."""
        self._spans = [
            one._replace(context=499) if one.context > 499 and one.stop - one.start == 1 else one
            for one in self._spans
        ]
        return super().attend(layer, query, sinks)


class Rough(ReferenceAttention):
    """Has an error of about 2 %, like a kernel that sums in few bits."""

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Round the output to fp8."""
        return super().attend(layer, query, sinks).to(FP8).to(query.dtype)


@pytest.mark.parametrize("wrong", [OwnPages, FirstPart, Rough])
def test_a_wrong_kernel_refuses_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: type[ReferenceAttention]
) -> None:
    """Though a parity check's few tokens, which the first two pass, would let it serve."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    settings = EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu")
    for module in (native, transformers_model):
        monkeypatch.setattr(module, "choose_backend", lambda *_: wrong)
    with pytest.raises(ModelRefused, match="attention is computed wrongly"):
        load_model(settings)


@pytest.mark.parametrize(
    ("backend", "shape"),
    with_long(
        [(TritonAttention, AttentionShape(2, 1, 16, 16, 0.25))],
        [
            (
                TritonLatentAttention,
                AttentionShape(2, 1, 32, 16, 0.2, has_latent_values=True),
            )
        ],
    ),
)
def test_a_gpus_kernels_split_and_share_here(
    monkeypatch: pytest.MonkeyPatch, backend: Any, shape: AttentionShape
) -> None:
    """Interpreted, with the fewest pages that are split and shared."""
    monkeypatch.setattr(attention_parity, "LONGEST_PAGES", 18)
    monkeypatch.setattr(attention_parity, "SHARED_PAGES", 4)
    assert attention_distance(backend, shape, *[torch.float32] * 2, CPU) < 1e-5
