"""Ranks replay steps together: threads here, over a stand-in for a device's captures."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.families import build
from tests.engine.loop.test_cuda_graphs import (
    CapturableReference,
    CapturesByCallingAgain,
    named,
    named_logprobs,
    storm,
    work_over,
)
from tests.engine.rank_threads import Board, ThreadGroup
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import RankFailed
from tidemill.engine.kernels.communicator import Shard
from tidemill.engine.loop.cuda_graphs import Capture, Graph
from tidemill.engine.loop.step_logits import StepLogits
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.parallel import leader as leading
from tidemill.engine.parallel.leader import Leader
from tidemill.engine.parallel.messages import Answer, Command, Done, Failed, Init, InitProcessGroup
from tidemill.engine.parallel.rank import Rank

CPU = torch.device("cpu")


class ThreadRankProcess:
    """A `RankProcess` that is a thread."""

    board: Board
    captures: Capture

    def __init__(
        self, rank: int, environment: Mapping[str, str], lost: Callable[[Failed], None]
    ) -> None:
        del environment
        self.rank, self._lost = rank, lost
        self.answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, message: memoryview) -> None:
        """Queue a message."""
        self._messages.put(bytes(message))

    def kill(self) -> None:
        """End after the current command."""
        self._messages.put(None)

    def close(self) -> None:
        """End, and wait for the end."""
        self.kill()
        self.board.met.abort()
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        rank: Rank | None = None
        while (data := self._messages.get()) is not None:
            command: Command = pickle.loads(data)  # noqa: S301 - of this process
            try:
                if isinstance(command.message, Init):
                    group = ThreadGroup(self.board, command.message.shard)
                    rank = Rank(command.message.settings, group, CPU, lambda _: self.captures)
                elif isinstance(command.message, InitProcessGroup):
                    self.answers.put(Done())
                elif rank is not None and (answer := rank.execute(command)) is not None:
                    self.answers.put(answer)
            except Exception as exc:  # noqa: BLE001 - like a process
                self._lost(Failed(f"rank {self.rank}: {exc}"))
                break
        self.answers.put(None)


@contextmanager
def led(
    folder: Path, captures: Capture, dtype: torch.dtype = torch.float32
) -> Iterator[LoadedModel]:
    """Yield a model that two threads share; the second one uses these captures."""
    board = Board(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadRankProcess, "board", board, raising=False)
        patch.setattr(ThreadRankProcess, "captures", staticmethod(captures), raising=False)
        patch.setattr(leading, "RankProcess", ThreadRankProcess)
        patch.setattr(native, "choose_backend", lambda *_: CapturableReference)
        leader = Leader(EngineConfig(str(folder), tensor_parallel_size=2), CPU)
        patch.setattr(leader, "_group", ThreadGroup(board, Shard(0, 2)))
        description = read_hf_config(str(folder))
        parts = find_checkpoint(str(folder)), description, architecture_of(description)
        with closing(leader):
            model = native.load(*parts, dtype, CPU, leader=leader)
            yield replace(model, hidden_size=2**15, max_intermediate_size=2**15)


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_the_plain_loop(tmp_path: Path, seed: int) -> None:
    """Steps of both kinds alternate, with one in flight, and the other ranks replay the same steps.

    The model uses long rope frequencies for some sequences only.
    """
    folder = tmp_path
    build("Phi3, long rope").save_pretrained(folder)  # type: ignore[operator]
    config = json.loads((folder / "config.json").read_text())
    for fields in (config, config["rope_parameters"]):
        fields["original_max_position_embeddings"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    captures, others = CapturesByCallingAgain(), CapturesByCallingAgain()
    with led(folder, others) as model:
        assert model.original_positions == 16
        expected = storm(seed).run(work_over(model, None))
        work = work_over(model, captures, steps_ahead=1)
        assert storm(seed).run(work) == expected
    assert captures.num_replays == others.num_replays > len(captures.graphs) > 1
    assert work.stats().preemptions > 0


def test_ranks_score_named_tokens_in_fp32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds the logits of the tokens in its shard, in graphs and outside of them."""
    captures = CapturesByCallingAgain()
    with led(folder, captures, torch.bfloat16) as model:
        plain = named_logprobs(work_over(model, None), named(storm(0)))
        graphed = named_logprobs(work_over(model, captures), named(storm(0)))
        monkeypatch.setattr(StepLogits, "exact", lambda *_: None)
        rounded = named_logprobs(work_over(model, None), named(storm(0)))
    assert captures.num_replays > 0
    assert np.diff(graphed) == pytest.approx(np.diff(plain), abs=1e-5)
    assert 1e-4 < np.abs(np.diff(rounded) - np.diff(plain)).max() < 0.1


def test_steps_that_no_rank_captures_are_launched(folder: Path) -> None:
    """All later steps are launched."""
    captures, others = (CapturesByCallingAgain(none_after=1) for _ in "ab")
    with led(folder, others) as model:
        expected = storm(1).run(work_over(model, None))
        assert storm(1).run(work_over(model, captures)) == expected
    assert len(captures.graphs) == len(others.graphs) == 1


def test_a_rank_that_cannot_replay_ends_all_ranks(folder: Path) -> None:
    """The others would wait for it."""

    def fails(compute: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        compute()  # all ranks capture a reduction, or none
        raise RuntimeError("no room")

    with led(folder, fails) as model:
        work = work_over(model, CapturesByCallingAgain())
        with pytest.raises(RankFailed, match="this rank has no graph for a step that others"):
            storm(1).run(work)
