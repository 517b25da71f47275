"""Ranks as threads of one process, for tests of their joint computations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from tidemill.engine.kernels.communicator import Shard

T = TypeVar("T")


class Board:
    """The data that ranks of a group exchange."""

    def __init__(self, size: int) -> None:
        self.met = Barrier(size)
        self.shown: list[Tensor | None] = [None] * size


class ThreadGroup:
    """A `Communicator` of threads."""

    def __init__(self, board: Board, shard: Shard) -> None:
        self.shard = shard
        self._board = board

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up the tensors of all ranks."""
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def gather(self, x: Tensor, width: int) -> Tensor:
        """Concatenate columns."""
        return torch.cat(self._all(x), dim=1)[:, :width]

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's tensor."""
        return x.copy_(self._all(x)[0])

    def connect(self, folder: Path) -> None:
        """Do nothing: threads are always connected."""
        assert folder.is_dir()

    def leave(self, drop_graphs: Callable[[], None]) -> None:
        """Release all waiting ranks."""
        self._board.met.abort()
        drop_graphs()

    def _all(self, x: Tensor) -> list[Tensor]:
        board = self._board
        board.shown[self.shard.rank] = x.clone()
        board.met.wait()
        shown = [one for one in board.shown if one is not None]
        board.met.wait()
        assert {one.shape for one in shown} == {x.shape}
        return shown


def together(size: int, call: Callable[[ThreadGroup], T]) -> list[T]:
    """Return the results of a group's ranks; if one fails, all do."""
    board = Board(size)

    def run(rank: int) -> T:
        try:
            return call(ThreadGroup(board, Shard(rank, size)))
        except BaseException:
            board.met.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        runs = [threads.submit(run, rank) for rank in range(size)]
    failures = [failure for one in runs if (failure := one.exception()) is not None]
    for failure in sorted(failures, key=lambda one: isinstance(one, BrokenBarrierError)):
        raise failure
    return [one.result() for one in runs]
