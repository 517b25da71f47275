"""The group of ranks: what ends it must not hang itself."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from tidemill.engine.kernels.communicator import Shard
from tidemill.engine.parallel import process_group
from tidemill.engine.parallel.process_group import TorchGroup


def test_an_abort_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's does, while a graph lives that has captured a collective; it goes on behind."""
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 0.01)
    graphs_are_gone, has_ended = threading.Event(), threading.Event()

    def abort() -> None:
        graphs_are_gone.wait()
        has_ended.set()

    group = TorchGroup(Shard(0, 2), torch.device("cpu"), 1.0)
    group._group = SimpleNamespace(abort=abort)
    group.leave()
    assert not has_ended.is_set()
    graphs_are_gone.set()
    assert has_ended.wait(10)
