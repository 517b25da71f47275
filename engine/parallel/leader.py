"""Leader of tensor parallel ranks: starts the others, sends them steps, and ends all together.

Each call of the model in this process is sent to the others, step by step; all decisions are made
here. A rank that ends, or keeps the others waiting for too long, ends them all
([ADR 56](../../docs/adr/0056-tensor-parallelism.md)).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..errors import RankFailed
from ..kernels.attention import AttentionBackend
from ..kernels.communicator import Communicator, Shard
from ..kernels.layer_groups import LayerGroup
from ..kernels.step import Step
from ..model.config.device import choose_device
from ..model.network.kv_cache_size import free_bytes
from ..model.network.loaded_model import (
    GraphLimits,
    LoadedModel,
    NetworkWithHead,
)
from ..storage.hub import child_environment
from .messages import (
    Allocate,
    Answer,
    Command,
    ExactLogits,
    Failed,
    Forward,
    FreeMemory,
    GraphSizes,
    Init,
    InitProcessGroup,
    Load,
    MeasureMemory,
    Message,
    Ping,
)
from .process_group import TorchGroup
from .rank_processes import RankProcess

# Ranks may wait for one that compiles its kernels; a longer wait means that one hangs.
PATIENCE_SECONDS = 300.0
# The longest time for a rank's reply to a ping, or until a rank's end is noticed.
ANSWER_SECONDS = 5.0
# The interval of checks while ranks connect.
LOOK_SECONDS = 0.1

T = TypeVar("T")


def make_leader(settings: EngineConfig) -> Leader | None:
    """Return the first rank of a model that is shared; raises `EngineError` without its GPUs."""
    size = settings.tensor_parallel_size
    if size == 1:
        return None
    device = choose_device(settings.device)
    if device.type == "cuda" and (count := torch.cuda.device_count()) < size:
        raise EngineError(f"--tensor-parallel-size {size} exceeds the {count} GPUs that torch sees")
    return Leader(settings, device)


class Leader:
    """The first rank of a model, in this process; the others are child processes.

    They are started by the first call of `loaded`, and ended by `close`.
    """

    def __init__(
        self,
        settings: EngineConfig,
        device: torch.device,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._settings = settings
        self.size = settings.tensor_parallel_size
        self._device = device
        self._patience = patience_seconds
        self._group = TorchGroup(Shard(0, self.size), device, 2 * patience_seconds)
        self._rank_processes: list[RankProcess] = []
        self._failure: str | None = None
        self._has_failed, self._is_closed = threading.Event(), threading.Event()
        self._failing = threading.Lock()
        self._drop_graphs: Callable[[], Callable[[], None] | None] = lambda: None
        # The deadline of waiting for others, and on a GPU the event after which it does not matter.
        self._awaited: tuple[float, torch.cuda.Event | None] | None = None
        # Models and attentions have numbers; the others are notified of numbers no longer in use.
        self._num_numbers = 0
        self._dropped: list[int] = []
        self._numbers: weakref.WeakKeyDictionary[AttentionBackend, int] = (
            weakref.WeakKeyDictionary()
        )

    def loaded(
        self,
        load: Callable[[Communicator], LoadedModel],
        dtype: torch.dtype,
        num_layers: int | None,
        *,
        has_adapters: bool,
    ) -> LoadedModel:
        """Load the shares of all ranks, this one's with `load`, and return the combined model."""
        is_first = not self._rank_processes
        if is_first:
            self._start()
        number = self._number()
        self._broadcast(Load(number, dtype, num_layers, has_adapters))
        own = load(self._group)
        self._gather_answers()
        if is_first:
            self._connect_ranks()
        assert isinstance(own.network, NetworkWithHead)  # only the native decoder can be shared
        network = _ParallelNetwork(own.network, self, number)
        self._drop_when_collected(network, number)
        parts = {field.name: getattr(own, field.name) for field in fields(LoadedModel)}
        return _ParallelModel(
            **(parts | {"network": network, "check": self.check}), leader=self, number=number
        )

    def allocate(
        self, model: _ParallelModel, num_pages: int, num_rows: int, groups: Sequence[LayerGroup]
    ) -> AttentionBackend:
        """Allocate pages and rows on all ranks, and return this one's."""
        number = self._number()
        size = num_pages, num_rows, tuple(groups)
        self._broadcast(Allocate(number, model.number, *size, model.cache_dtype))
        own = LoadedModel.attention(model, *size)
        self._gather_answers()
        self._numbers[own] = number
        self._drop_when_collected(own, number)
        return own

    def forward(
        self, network: NetworkWithHead, number: int, step: Step, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Compute a step of model `number` on all ranks; `network` is this one's."""
        self.check()
        message = Forward.from_step(step, number, self._numbers[attention])
        self._broadcast(message)

        def compute() -> tuple[Tensor, Tensor]:
            if message.has_unknown_ids:
                self._group.broadcast(step.token_ids)
            if step.shown is not None:
                self._group.broadcast(step.shown)
            return network.forward_whole(step, attention)

        return self._together(compute)

    def exact_logits(
        self,
        network: NetworkWithHead,
        number: int,
        hidden: Tensor,
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int64],
    ) -> Tensor:
        """Compute exact logits of the last step of model `number` on all ranks."""
        self.check()
        self._broadcast(ExactLogits(number, rows, token_ids))
        return self._together(lambda: network.compute_exact_logits(hidden, rows, token_ids))

    def run_graph(
        self,
        number: int,
        step: Step,
        attention: AttentionBackend,
        graphs: GraphLimits,
        call: Callable[[], T],
    ) -> T:
        """Compute a step of model `number` in graphs on all ranks; `call` computes this one's."""
        self.check()
        self._drop_graphs = weakref.WeakMethod(graphs.drop)
        sizes = GraphSizes(graphs.most_tokens, graphs.most_pages, len(graphs.last_ids))
        message = Forward.from_step(step, number, self._numbers[attention], sizes)
        self._broadcast(message)

        def compute() -> T:
            if message.has_unknown_ids:
                self._group.broadcast(graphs.last_ids)
            return call()

        return self._together(compute)

    def free_bytes(self) -> int:
        """Return each rank's free memory: the least of all GPUs, or its share of the host's."""
        own = free_bytes(self._device)
        if self._device.type == "cpu":
            return own // self.size
        self._broadcast(MeasureMemory())
        return min(
            [own, *(one.num_bytes for one in self._gather_answers() if isinstance(one, FreeMemory))]
        )

    def check(self) -> None:
        """Raise `RankFailed` if a rank has failed: later results are invalid."""
        if self._failure is not None:
            raise RankFailed(self._failure)

    def close(self) -> None:
        """End the other ranks."""
        with self._failing:
            self._is_closed.set()
        for process in self._rank_processes:
            process.close()
        self._leave()

    def _start(self) -> None:
        # Kernels of several ranks would compete for the same cores.
        threads = max(1, torch.get_num_threads() // self.size)
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        environment = {**child_environment(), "OMP_NUM_THREADS": str(threads)}
        for rank in range(1, self.size):
            process = RankProcess(rank, environment, self._end)
            self._rank_processes.append(process)
            device = "cpu" if self._device.type == "cpu" else f"cuda:{rank}"
            begin = Init(self._settings, Shard(rank, self.size), device, 2 * self._patience)
            process.send(ForkingPickler.dumps(Command(begin)))
        threading.Thread(target=self._watch, name="tidemill-ranks", daemon=True).start()

    def _connect_ranks(self) -> None:
        with TemporaryDirectory(prefix="tidemill-") as folder:
            self._broadcast(InitProcessGroup(Path(folder)))
            self._together(lambda: self._wait_for_group(Path(folder)))
            self._gather_answers()

    def _wait_for_group(self, folder: Path) -> None:
        """Connect to the others; raise `RankFailed` if one ends, which `connect` cannot notice."""
        connected: Future[None] = Future()

        def connect() -> None:
            try:
                self._group.connect(folder)
                connected.set_result(None)
            except Exception as exc:  # noqa: BLE001 - raised again by `connected.result`
                connected.set_exception(exc)

        threading.Thread(target=connect, name="tidemill-meeting", daemon=True).start()
        while not wait((connected,), LOOK_SECONDS).done:
            self.check()
        connected.result()

    def _broadcast(self, message: Message) -> None:
        dropped = tuple(self._dropped)
        del self._dropped[: len(dropped)]
        data = ForkingPickler.dumps(Command(message, dropped))
        for process in self._rank_processes:
            process.send(data)

    def _gather_answers(self) -> list[Answer]:
        """Wait for the answers of all ranks; raise `RankFailed` if one fails."""
        answers = []
        for process in self._rank_processes:
            answer = process.answers.get()
            if answer is None:
                self._has_failed.wait()
                raise RankFailed(self._failure)
            answers.append(answer)
        return answers

    def _together(self, compute: Callable[[], T]) -> T:
        """Compute a result together with the other ranks, which wait for each other."""
        self._awaited = (time.monotonic() + self._patience, None)
        try:
            result = compute()
        except Exception as exc:
            end = Failed.from_exception(exc)
            self._end(end._replace(words=f"rank 0: {end.words}"))
            raise RankFailed(self._failure) from exc
        self._awaited = None
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
            self._awaited = (time.monotonic() + self._patience, event)
        return result

    def _watch(self) -> None:
        """End all ranks once they have waited for each other for too long."""
        while not self._is_closed.wait(self._patience / 4):
            awaited = self._awaited
            if awaited is None or time.monotonic() < awaited[0]:
                continue
            if awaited[1] is not None and awaited[1].query():  # type: ignore[no-untyped-call]
                continue
            for process in self._rank_processes:
                process.send(ForkingPickler.dumps(Command(Ping())))
            silent = [
                one.rank for one in self._rank_processes if not one.is_alive.wait(ANSWER_SECONDS)
            ]
            state = f"rank {silent[0]} does not respond" if silent else "all of them are alive"
            self._fail(f"ranks have waited for each other for {self._patience:g} s: {state}")
            return

    def _end(self, end: Failed) -> None:
        """End all ranks after one has ended, with another rank's reason if that caused it."""
        if not end.is_own:
            self._has_failed.wait(ANSWER_SECONDS)
        self._fail(end.words)

    def _fail(self, words: str) -> None:
        """End all ranks for a reason; only the first reason is reported."""
        with self._failing:
            if self._is_closed.is_set() or self._has_failed.is_set():
                return
            self._failure = words
            self._has_failed.set()
        for process in self._rank_processes:
            process.kill()
        self._leave()  # this one may wait for them

    def _leave(self) -> None:
        self._group.leave(self._drop_graphs() or (lambda: None))

    def _number(self) -> int:
        self._num_numbers += 1
        return self._num_numbers

    def _drop_when_collected(self, thing: object, number: int) -> None:
        weakref.finalize(thing, self._dropped.append, number).atexit = False


class _ParallelNetwork:
    """A `NetworkWithHead` of all ranks; its separate halves run only on this rank."""

    def __init__(self, own: NetworkWithHead, leader: Leader, number: int) -> None:
        self._own, self._leader, self._number = own, leader, number
        self.needs_torch, self.hidden_states = own.needs_torch, own.hidden_states
        self.compute_logits = own.compute_logits
        self.has_exact_logits = own.has_exact_logits

    @property
    def num_layers_started(self) -> int:
        """See `Network`."""
        return self._own.num_layers_started

    @num_layers_started.setter
    def num_layers_started(self, count: int) -> None:
        self._own.num_layers_started = count

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """See `Network.forward`."""
        return self.forward_whole(step, attention)[1]

    def forward_whole(self, step: Step, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """See `NetworkWithHead.forward_whole`."""
        return self._leader.forward(self._own, self._number, step, attention)

    def compute_exact_logits(
        self, hidden: Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> Tensor:
        """See `NetworkWithHead.compute_exact_logits`."""
        return self._leader.exact_logits(self._own, self._number, hidden, rows, token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParallelModel(LoadedModel):
    """A model of all ranks; its layer properties describe this rank's share."""

    leader: Leader
    number: int

    @property
    def has_head(self) -> bool:
        """Return False: the other ranks compute their share of all logits with the layers."""
        return False

    def attention(
        self, num_pages: int, num_rows: int = 0, groups: Sequence[LayerGroup] = ()
    ) -> AttentionBackend:
        """Allocate pages and rows on all ranks."""
        return self.leader.allocate(self, num_pages, num_rows, groups)

    def run_graph(
        self,
        step: Step,
        attention: AttentionBackend,
        graphs: GraphLimits,
        call: Callable[[], T],
    ) -> T:
        """See `LoadedModel.run_graph`."""
        return self.leader.run_graph(self.number, step, attention, graphs, call)
