"""A whole model with the GPU's kernels, interpreted: the rows are those of torch's functions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.engine.families import build
from tests.engine.model.weights.quantised.checkpoints import save
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels import backends
from tidemill.engine.kernels.linear import FP8_TOLERANCE
from tidemill.engine.kernels.triton import fp8
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.kernels.triton.latent import TritonLatentAttention
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.parity.logits import ROUNDING_TOLERANCE, chunked_logits
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.model.weights.quantised import loading
from tidemill.engine.model.weights.quantised.quantization_config import read_quantization_config
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

CPU = torch.device("cpu")
SHARED = list(range(40, 60))
PROMPTS = ([*SHARED, 7], [*SHARED, 8, 9], [3, 4, 5])
SAMPLINGS = (
    Sampling(temperature=0, logprobs=1),
    Sampling(temperature=1, seed=5),
    Sampling(temperature=0, repetition_penalty=1.3, logit_bias={9: 1.0}),
)


def rows(folder: Path, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a model's output if Triton's kernels serve these types of devices."""
    monkeypatch.setattr(backends, "TRITON_TYPES", kinds)
    description, checkpoint = read_hf_config(str(folder)), find_checkpoint(str(folder))
    parts = checkpoint, description, architecture_of(description)
    model = native.load(*parts, torch.float32, CPU, num_layers=2)
    assert (model.backend in {TritonAttention, TritonLatentAttention}) == bool(kinds)
    config = EngineConfig("tiny", max_num_seqs=4, max_num_batched_tokens=16)
    work = make_core(model, KVCacheSize(12, 128, 6), config)
    items = [
        work.add(SequenceRequest(prompt, 4, sampling))
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    while work.step() is not None:
        pass
    return [item.result().token_ids for item in items]


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3Config",
        "DeepseekV3Config",
        "Mamba2Config",
        *(
            pytest.param(f"{family}Config", marks=pytest.mark.long)
            for family in ("Gemma2", "Gemma4Text", "GptOss", "Qwen3Moe", "Qwen3Next")
        ),
    ],
)
def test_rows_are_those_of_a_cpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, random and shaped, some with a prefix that is shared, in mixed steps."""
    build(family).save_pretrained(tmp_path)
    on_cpu = rows(tmp_path, set(), monkeypatch)
    assert rows(tmp_path, {"cpu"}, monkeypatch) == on_cpu


@pytest.mark.parametrize(
    ("form", "family", "bound"),
    [
        ("awq", "Qwen3Config", 0.02),
        pytest.param("fp8, blocks", "MixtralConfig", 0.02, marks=pytest.mark.long),
        ("compressed fp8, per row", "Qwen3Config", FP8_TOLERANCE),
    ],
)
def test_quantised_weights_agree_with_dequantised_ones(
    form: str, family: str, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged weights, experts and unquantised layers agree with dequantised ones up to rounding.

    In fp8, which norms and gates write, the quantisation of activations is emulated.
    """
    save(form, tmp_path, family)
    monkeypatch.setattr(fp8, "has_fp8_matmul", lambda _: bound == FP8_TOLERANCE)
    description = read_hf_config(str(tmp_path))
    checkpoint = find_checkpoint(str(tmp_path), read_quantization_config(description, None))
    parts = checkpoint, description, architecture_of(description)
    monkeypatch.setattr(backends, "TRITON_TYPES", {"cpu"})
    logits = []
    for keeps, emulates in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(loading, "has_quantised_linear", lambda *_, keeps=keeps: keeps)
        with backends.reference_kernels() if emulates else nullcontext():
            model = native.load(*parts, torch.float16, CPU, num_layers=1)
        logits.append(chunked_logits(model, torch.arange(3, 11))[0])
    got, emulated, meant = logits
    apart, of_emulated = (
        torch.linalg.vector_norm(one - meant) / torch.linalg.vector_norm(meant)
        for one in (got, emulated)
    )
    assert 0 < apart <= bound
    assert of_emulated / ROUNDING_TOLERANCE <= apart <= ROUNDING_TOLERANCE * of_emulated
