"""The group of ranks: its abort must not hang."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from tidemill.engine.kernels.communicator import Shard
from tidemill.engine.parallel import process_group
from tidemill.engine.parallel.process_group import TorchGroup


def test_an_abort_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort hangs while a graph with a captured collective exists; it continues later."""
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 0.01)
    has_begun, graphs_are_gone, has_ended = (threading.Event() for _ in range(3))

    def abort() -> None:
        has_begun.set()
        graphs_are_gone.wait()
        has_ended.set()

    group = TorchGroup(Shard(0, 2), torch.device("cpu"), 1.0)
    group._group = SimpleNamespace(abort=abort)
    group.leave(lambda: None)
    assert has_begun.is_set()
    assert not has_ended.is_set()
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 10)
    group.leave(graphs_are_gone.set)  # destroys them while the abort continues
    assert has_ended.is_set()
