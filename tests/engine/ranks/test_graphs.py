"""Ranks replay steps together: threads here, over a stand-in for what a device captures."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import RankFailed
from engine.kernels.ranks import Share
from engine.model import own
from engine.model.checkpoint import find_checkpoint
from engine.model.description import read_description
from engine.model.families import architecture_of
from engine.model.network import LoadedModel
from engine.ranks import leading
from engine.ranks.leading import Leader
from engine.ranks.messages import Answer, Begin, Done, Failed, Meet, Told
from engine.ranks.other import OtherRank
from engine.stepping.graphs import Captures, Graph
from tests.engine.rank_threads import Board, ThreadGroup
from tests.engine.stepping.test_graphs import (
    CapturableReference,
    CapturesByCallingAgain,
    storm,
    work_over,
)

CPU = torch.device("cpu")


class ThreadFollower:
    """A `Follower` that is a thread."""

    board: Board
    captures: Captures

    def __init__(
        self, rank: int, environment: Mapping[str, str], lost: Callable[[Failed], None]
    ) -> None:
        del environment
        self.rank, self._lost = rank, lost
        self.answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._told: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def tell(self, message: memoryview) -> None:
        """Take in what it shall do."""
        self._told.put(bytes(message))

    def kill(self) -> None:
        """End after what it does now."""
        self._told.put(None)

    def close(self) -> None:
        """End, and wait for that."""
        self.kill()
        self.board.met.abort()
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        rank: OtherRank | None = None
        while (data := self._told.get()) is not None:
            told: Told = pickle.loads(data)  # noqa: S301 - of this process
            try:
                if isinstance(told.message, Begin):
                    group = ThreadGroup(self.board, told.message.share)
                    rank = OtherRank(told.message.settings, group, CPU, self.captures)
                elif isinstance(told.message, Meet):
                    self.answers.put(Done())
                elif rank is not None and (answer := rank.do(told)) is not None:
                    self.answers.put(answer)
            except Exception as exc:  # noqa: BLE001 - as a process does
                self._lost(Failed(f"rank {self.rank}: {exc}"))
                break
        self.answers.put(None)


@contextmanager
def led(folder: Path, captures: Captures) -> Iterator[LoadedModel]:
    """Yield a model that two threads share; the second captures by these."""
    board = Board(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadFollower, "board", board, raising=False)
        patch.setattr(ThreadFollower, "captures", staticmethod(captures), raising=False)
        patch.setattr(leading, "Follower", ThreadFollower)
        patch.setattr(own, "choose_backend", lambda *_: CapturableReference)
        leader = Leader(EngineConfig(str(folder), tensor_parallel_size=2), CPU)
        patch.setattr(leader, "_group", ThreadGroup(board, Share(0, 2)))
        description = read_description(str(folder))
        parts = find_checkpoint(str(folder)), description, architecture_of(description)
        with closing(leader):
            model = own.load(*parts, torch.float32, CPU, leader=leader)
            yield replace(model, hidden_width=2**15, inner_width=2**15)


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_the_plain_loop(folder: Path, seed: int) -> None:
    """Steps of both kinds follow each other, with one in flight, and the others replay as many."""
    captures, others = CapturesByCallingAgain(), CapturesByCallingAgain()
    with led(folder, others) as model:
        expected = storm(seed).run(work_over(model, None))
        work = work_over(model, captures, steps_ahead=1)
        assert storm(seed).run(work) == expected
    assert captures.num_replays == others.num_replays > len(captures.graphs) > 1
    assert work.stats().preemptions > 0


def test_what_no_rank_captures_is_launched(folder: Path) -> None:
    """All of it from then on."""
    captures, others = (CapturesByCallingAgain(none_after=1) for _ in "ab")
    with led(folder, others) as model:
        expected = storm(1).run(work_over(model, None))
        assert storm(1).run(work_over(model, captures)) == expected
    assert len(captures.graphs) == len(others.graphs) == 1


def test_a_rank_that_cannot_replay_ends_all(folder: Path) -> None:
    """The others would wait for it."""

    def fails(compute: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        compute()  # what ranks add up is captured by all, or not there
        raise RuntimeError("no room")

    with led(folder, fails) as model:
        work = work_over(model, CapturesByCallingAgain())
        with pytest.raises(RankFailed, match="rank 1: it has no graph for a step that others"):
            storm(1).run(work)
