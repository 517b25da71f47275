"""Captured steps over the GPU's attention: a graph of one step serves any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import build
from tests.engine.loop.test_cuda_graphs import Again, CapturesByCallingAgain
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels import backends
from tidemill.engine.kernels.attention import AttentionBackend
from tidemill.engine.kernels.hybrid import HybridBackend, make_hybrid
from tidemill.engine.kernels.recurrence import RecurrentBackend
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.kernels.triton.latent import TritonLatentAttention
from tidemill.engine.kernels.triton.recurrence import TritonRecurrence
from tidemill.engine.kernels.triton.sparse_latent import TritonSparseLatentAttention
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.cuda_graphs import Capture
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network import loaded_model
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.engine.state import rows


@pytest.mark.parametrize(
    ("family", "num_layers"),
    with_long([("Gemma2Config", 2)], [("Qwen3Config", 1), ("DeepseekV3Config", 1)]),
)
def test_rows_are_those_of_launched_steps(tmp_path: Path, family: str, num_layers: int) -> None:
    """Prompts, decodes over one page and two, and sequences that end run by graphs of 8 and 16.

    There are one group of layers, two groups with separate page lists, and latents.
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

    def run(model: LoadedModel, captures: Capture | None) -> list[list[int]]:
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
    assert run(replace(model, backend=backend), captures) == run(model, None)
    assert captures.num_replays >= 2


def test_only_steps_whose_sequences_are_short_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sparse attention, a step that selects tokens is launched, others are replayed."""
    build("GlmMoeDsaConfig").save_pretrained(tmp_path)  # type: ignore[operator]
    description, checkpoint = read_hf_config(str(tmp_path)), find_checkpoint(str(tmp_path))
    parts = (checkpoint, description, architecture_of(description), torch.float32)
    model = native.load(*parts, torch.device("cpu"), num_layers=1)
    (num_selected,) = {shape.num_selected for shape in model.shapes}
    config = EngineConfig("tiny", max_num_seqs=4, max_num_batched_tokens=16, steps_ahead=1)
    captured: list[bool] = []

    def run(model: LoadedModel, captures: Capture | None) -> list[list[int]]:
        work = make_core(model, KVCacheSize(8, model.max_model_len), config, captures)
        sequences = [
            work.add(SequenceRequest([5, *range(start, start + length)], count, Sampling(seed=1)))
            for start, length, count in ((20, 2, 5), (40, num_selected, 1))
        ]
        while work.step() is not None:
            pass
        return [sequence.result().token_ids for sequence in sequences]

    kind = TritonSparseLatentAttention
    capturing = kind.capturing

    def noted(self: TritonSparseLatentAttention, *args: Any, **options: Any) -> Any:
        captured.append(self.has_selection)
        return capturing(self, *args, **options)

    monkeypatch.setattr(kind, "capturing", noted)
    captures = CapturesByCallingAgain()
    assert run(replace(model, backend=kind), captures) == run(model, None)
    assert captures.num_replays >= 2
    assert not any(captured)


class CapturesOnRows(CapturesByCallingAgain):
    """Capture that restores rows of recurrent state, because on a device nothing runs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Again, torch.Tensor]:
        """Capture, and restore the rows."""
        before = [row.clone() for row in self.rows]
        graph, result = super().__call__(compute)
        for row, kept in zip(self.rows, before, strict=True):
            row.copy_(kept)
        graph.is_compared = True  # for the same reason no replay is compared
        return graph, result


@pytest.mark.parametrize("family", with_long(["Mamba2Config"], ["Qwen3NextConfig"]))
def test_rows_of_recurrent_layers_are_those_of_launched_steps(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes alone by one graph, steps with chunks by another, each padded; snapshots, too."""
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    description, checkpoint = read_hf_config(str(tmp_path)), find_checkpoint(str(tmp_path))
    parts = (checkpoint, description, architecture_of(description), torch.float32)
    config = EngineConfig("tiny", max_num_seqs=4, max_num_batched_tokens=16, steps_ahead=1)
    shared = list(range(20, 40))
    prompts = [[5, 6, 7], [*shared, 3], [*shared, 4]]
    monkeypatch.setattr(rows, "FEWEST_TOKENS", 16)

    def run(captures: CapturesOnRows | None) -> list[list[int]]:
        model = native.load(*parts, torch.device("cpu"), num_layers=1)
        work = make_core(model, KVCacheSize(12, model.max_model_len, 8), config, captures)
        sequences = [
            work.add(SequenceRequest(prompt, 5, Sampling(temperature=0))) for prompt in prompts
        ]
        while work.step() is not None:
            pass
        assert work.stats().cached_tokens >= 16
        return [sequence.result().token_ids for sequence in sequences]

    on_cpu, captures = run(None), CapturesOnRows()

    def note(attention: AttentionBackend, made: RecurrentBackend) -> HybridBackend:
        assert isinstance(made, TritonRecurrence)
        captures.rows = [*made.tails, *made.states]
        return make_hybrid(attention, made)

    monkeypatch.setattr(backends, "TRITON_TYPES", {"cpu"})
    monkeypatch.setattr(loaded_model, "make_hybrid", note)
    assert run(captures) == on_cpu
    assert captures.num_replays >= 2
    assert len(captures.graphs) >= 2
