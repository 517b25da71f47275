"""Ranks over torch.distributed: NCCL between GPUs, gloo between processes on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from ..kernels.communicator import Shard

# Process groups are C++ bindings, half of which have no types.
_bound: Any = distributed
ABORT_SECONDS = 5.0


class TorchGroup:
    """A `Communicator` of processes on one machine, once they are connected."""

    def __init__(self, shard: Shard, device: torch.device, patience_seconds: float) -> None:
        """Set the time limit of waiting for ranks; the leader ends them sooner, with a reason."""
        self.shard = shard
        self._device = device
        self._patience = timedelta(seconds=patience_seconds)
        self._group: Any = None

    def connect(self, folder: Path) -> None:
        """Wait for all ranks in a folder; raise RuntimeError if one does not come."""
        # A separate group instead of the process's default one, as it may run several engines.
        store = _bound.FileStore(str(folder / "ranks"), self.shard.size)
        store.set_timeout(self._patience)
        if self._device.type == "cuda":
            make, options = _bound.ProcessGroupNCCL, _bound.ProcessGroupNCCL.Options()
        else:
            make = _bound.ProcessGroupGloo
            options = make._Options()  # noqa: SLF001 - there is no other way
            # Not the host's name, which may not resolve, or resolve to a public address.
            options._devices = [make.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        options._timeout = self._patience  # noqa: SLF001
        self._group = make(store, *self.shard, options)
        self.all_reduce(torch.zeros(1, device=self._device))  # a failed connection is noticed here

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator.all_reduce`."""
        self._group.allreduce([x], _synchronous(_bound.AllreduceOptions())).wait()
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """See `Communicator.gather`."""
        options = _synchronous(_bound.GatherOptions())
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        is_first = self.shard.rank == 0
        self._group.gather([parts] if is_first else [], [x], options).wait()
        if not is_first:
            return x
        each = x.shape[1]
        own = [part[:, : max(0, width - each * rank)] for rank, part in enumerate(parts)]
        return torch.cat(own, dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Communicator.broadcast`."""
        options = _synchronous(_bound.BroadcastOptions())
        options.rootRank = 0
        self._group.broadcast([x], options).wait()
        return x

    def leave(self, drop_graphs: Callable[[], None]) -> None:
        """Abort the group: this rank no longer waits for others, nor they for it; from any thread.

        NCCL's collectives end at once; its abort ends once all graphs that captured any are
        destroyed. A thread that they hung may hold on to some, so the wait for that is limited.
        """
        if self._group is not None:
            aborting = threading.Thread(
                target=self._group.abort, name="tidemill-abort", daemon=True
            )
            aborting.start()
            drop_graphs()
            aborting.join(ABORT_SECONDS)


def _synchronous(options: Any) -> Any:
    """Launch a collective on the current stream instead of NCCL's own, which waits for events."""
    options.asyncOp = False
    return options
