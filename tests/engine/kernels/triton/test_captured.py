"""Captured steps over the GPU's attention: a graph that was made of one step serves any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.families import build
from tests.engine.loop.test_cuda_graphs import CapturesByCallingAgain
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.kernels.triton.latent import TritonLatentAttention
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.cuda_graphs import Capture
from tidemill.engine.model import native
from tidemill.engine.model.checkpoint import find_checkpoint
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf_config import read_hf_config
from tidemill.engine.model.kv_cache_size import KVCacheSize
from tidemill.engine.model.loaded_model import LoadedModel
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest


@pytest.mark.parametrize(
    ("family", "num_layers"), [("Qwen3Config", 1), ("Gemma2Config", 2), ("DeepseekV3Config", 1)]
)
def test_rows_are_those_of_launched_steps(tmp_path: Path, family: str, num_layers: int) -> None:
    """Prompts, decodes over one page and two, and sequences that end, by graphs of 8 and 16.

    Of one group of layers, or of two, each with page lists of its own; and over latents.
    """
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    description, checkpoint = read_hf_config(str(tmp_path)), find_checkpoint(str(tmp_path))
    architecture = architecture_of(description)
    model = native.load(
        checkpoint,
        description,
        architecture,
        torch.float32,
        torch.device("cpu"),
        num_layers=num_layers,
    )
    assert len(model.layer_groups) == num_layers
    has_latents = architecture.blocks[0].latent is not None
    config = EngineConfig("tiny", max_num_seqs=4, max_num_batched_tokens=16, steps_ahead=1)
    prompts = [[5, 6, 7], list(range(20, 38))]

    def rows(model: LoadedModel, captures: Capture | None) -> list[list[int]]:
        work = make_core(model, KVCacheSize(8 * num_layers, model.max_model_len), config, captures)
        sequences = [
            work.add(SequenceRequest(prompt, count, Sampling(temperature=0)))
            for prompt, count in zip(prompts, (5, 4), strict=True)
        ]
        while work.step() is not None:
            pass
        return [sequence.result().token_ids for sequence in sequences]

    backend = TritonLatentAttention if has_latents else TritonAttention
    captures = CapturesByCallingAgain()
    assert rows(replace(model, backend=backend), captures) == rows(model, None)
    assert captures.num_replays >= 2
