"""Captured steps over the GPU's attention: a graph that was made of one step serves any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.kernels.triton.attention import TritonAttention
from engine.kinds.generation import make_work
from engine.model import own
from engine.model.checkpoint import find_checkpoint
from engine.model.description import read_description
from engine.model.families import architecture_of
from engine.model.memory import Room
from engine.model.network import LoadedModel
from engine.scheduling.sequence import Sampling, SequenceRequest
from engine.stepping.graphs import Captures
from tests.engine.families import build
from tests.engine.stepping.test_graphs import CapturesByCallingAgain


def test_rows_are_those_of_launched_steps(tmp_path: Path) -> None:
    """Prompts, decodes over one page and two, and sequences that end, by graphs of 8 and 16."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    description, checkpoint = read_description(str(tmp_path)), find_checkpoint(str(tmp_path))
    architecture = architecture_of(description)
    model = own.load(
        checkpoint, description, architecture, torch.float32, torch.device("cpu"), num_layers=1
    )
    config = EngineConfig("tiny", max_num_seqs=4, max_num_batched_tokens=16, steps_ahead=1)
    prompts = [[5, 6, 7], list(range(20, 38))]

    def rows(model: LoadedModel, captures: Captures | None) -> list[list[int]]:
        work = make_work(model, Room(8, model.max_model_len), config, captures)
        sequences = [
            work.add(SequenceRequest(prompt, count, Sampling(temperature=0)))
            for prompt, count in zip(prompts, (4, 3), strict=True)
        ]
        while work.step() is not None:
            pass
        return [sequence.result().token_ids for sequence in sequences]

    captures = CapturesByCallingAgain()
    assert rows(replace(model, backend=TritonAttention), captures) == rows(model, None)
    assert captures.num_replays >= 2
