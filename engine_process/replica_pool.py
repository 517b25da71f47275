"""Replica pool: assigns requests to engines, and reruns the requests of an engine that died.

Requests with the same prefix go to one engine, as long as it has not much more work than others.
The requests of an engine that died are suspects (`batch/suspects.py`): they are rerun in a separate
group, while the other engines continue with other requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeVar

from tidemill.batch.suspects import Suspects
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats
from tidemill.protocol.stall import STALL_SECONDS

from .client import EngineClient, EngineDied
from .replicas import Replica, Replicas, Request

_HOME_LOAD: Final = 1.25
_BALANCE_SECONDS: Final = 0.01
"""Requests that follow a burst of rows have started by then."""

_Result = TypeVar("_Result")
_Exchange = Callable[[EngineClient], Awaitable[_Result]]


class Quarantined(Exception):
    """A request killed an engine that ran nothing else, and had been in one that died before."""


class _Moved(Exception):
    """A request that is waiting in one engine has to move to another."""


@dataclass(slots=True, eq=False)
class _Death:
    """Death of an engine, judged once each request `inside` has failed or ended.

    `is_well` resolves to whether the restarted engine answers the canary line.
    """

    replica: Replica
    is_broken: bool
    is_well: asyncio.Future[bool]
    inside: set[Request]
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    lost: list[Request] = field(default_factory=list)
    unsent: list[Request] = field(default_factory=list)
    quarantined: frozenset[int] = frozenset()


class ReplicaPool:
    """Engine processes of one model, which share requests; all calls are made in one event loop.

    `log` gets messages about starts and deaths.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        log: Callable[[str], None],
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._replicas = Replicas(commands, self._admit, stall_seconds=stall_seconds, log=log)
        self._log = log
        self._numbers = count(1)
        self._urgent: OrderedDict[Request, None] = OrderedDict()
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._suspects = Suspects()
        self._suspected: dict[int, Request] = {}  # except the group on trial
        self._trial: Replica | None = None  # the engine that has the group on trial
        self._drained: Replica | None = None  # gets no more requests, for the next group
        self._deaths: dict[EngineClient, _Death] = {}
        self._balancing: asyncio.TimerHandle | None = None

    def started(self) -> AbstractAsyncContextManager[None]:
        """Start all processes, and stop them at the end; raises EngineError if one cannot load."""
        return self._replicas.started()

    @property
    def num_engines(self) -> int:
        """Return the number of engine processes."""
        return len(self._replicas.all)

    @property
    def load_seconds(self) -> float:
        """Return the seconds for starting all processes."""
        return self._replicas.load_seconds

    @property
    def failure(self) -> EngineError | None:
        """Return the reason why no engine can continue, or None."""
        return self._replicas.failure

    def info(self) -> EngineInfo:
        """Return the combined info of all engines."""
        return self._replicas.info()

    def stats(self) -> EngineStats:
        """Return the sums over all engines; the KV cache's usage is the mean."""
        return self._replicas.stats()

    async def run(
        self,
        exchange: _Exchange[_Result],
        *,
        home: int,
        is_urgent: bool = False,
        is_movable: bool = False,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _Result:
        """Return the result of an exchange with an engine, repeated if engines die.

        `home` is a number for the request's prefix. A request that `is_urgent` does not wait for
        capacity in an engine. Raises Quarantined; EngineError if all engines have failed, or one
        died and the exchange must not be repeated.
        """
        request = Request(next(self._numbers), home, is_urgent)
        try:
            while True:
                # A suspect already has a turn, which its trial resolves.
                replica = self._free_replica(request) if request.turn is None else None
                if replica is None:
                    replica = await self._turn(request)
                else:
                    self._send(request, replica)
                client = request.client
                assert client is not None
                try:
                    result = await _result_of(exchange(client), request, is_movable=is_movable)
                except _Moved:
                    self._leave(request)
                except EngineDied as exc:
                    death = self._note_death(replica, client, exc)
                    if not may_repeat():
                        raise EngineError(str(exc)) from exc
                    await self._outlive(death, request, was_sent=exc.was_sent)
                else:
                    self._replicas.note_row(replica)
                    return result
        finally:
            self._forget(request)
            if is_movable and self._balancing is None:
                loop = asyncio.get_running_loop()
                self._balancing = loop.call_later(_BALANCE_SECONDS, self._balance)

    async def _turn(self, request: Request) -> Replica:
        """Wait for an engine with capacity for the request; raises EngineError."""
        if request.turn is None:
            request.turn = asyncio.get_running_loop().create_future()
            (self._urgent if request.is_urgent else self._waiting)[request] = None
            self._admit()
        replica = await request.turn
        request.turn = None
        if replica is None:
            assert self._replicas.failure is not None
            raise self._replicas.failure
        return replica

    def _free_replica(self, request: Request) -> Replica | None:
        """Return the engine for a request while all are healthy and no other request waits."""
        if self._urgent or self._waiting or self._replicas.failure is not None:
            return None
        ready = self._replicas.ready
        if len(ready) < len(self._replicas.all) or self._has_suspects:
            return None
        return self._replica_for(request, ready)

    def _admit(self) -> None:
        """Assign requests to engines with capacity; called after each change."""
        self._replace_dead()
        if self._replicas.failure is not None:
            for request in (*self._urgent, *self._waiting, *self._suspected.values()):
                _resolve(request, None)
            self._urgent.clear()
            self._waiting.clear()
            self._suspected.clear()
            return
        self._admit_suspects()
        for waiting in (self._urgent, self._waiting):
            while waiting:
                request = next(iter(waiting))
                replica = self._replica_for(request, self._open)
                if replica is None:
                    break
                del waiting[request]
                self._send(request, replica)

    def _replace_dead(self) -> None:
        """Restart engines that died while they had no requests."""
        for replica in self._replicas.all:
            client = replica.client
            if client is not None and client.death is not None and not replica.sent:
                self._replicas.restart(replica, client, EngineDied(client.death))

    def _admit_suspects(self) -> None:
        """Put the next group on trial in an idle engine, or drain an engine for it.

        The last engine is not drained while another one is restarting.
        """
        if self._suspects.is_on_trial:
            return
        self._trial = None
        if not self._suspects.has_waiting_group:
            self._drained = None
            return
        ready = self._replicas.ready
        idle = next((one for one in ready if not one.sent), None)
        if idle is not None:
            self._trial, self._drained = idle, None
            while (number := self._suspects.pop()) is not None:
                self._send(self._suspected.pop(number), idle)
        elif self._drained not in ready and (len(ready) > 1 or not self._replicas.is_starting):
            self._drained = min(ready, key=lambda one: len(one.sent), default=None)
            if self._drained is not None:
                self._drained.give_up(self._drained.num_waiting)

    @property
    def _open(self) -> list[Replica]:
        """Return the engines for requests that are not suspects."""
        closed = (self._trial, self._drained)
        return [one for one in self._replicas.ready if one not in closed]

    def _replica_for(self, request: Request, ready: Sequence[Replica]) -> Replica | None:
        """Return the engine for the request's prefix, or the least loaded engine.

        Returns None if no engine that is `ready` for it has capacity. A moved request goes to an
        engine that can run it at once, if there is one: its own might get it back.
        """
        if not ready:
            return None
        loads = [len(one.sent) for one in ready]
        idlest = ready[loads.index(min(loads))]
        if request.is_moved and idlest.num_waiting < 0:
            return idlest
        home = ready[request.home % len(ready)]
        mean = sum(loads) / len(loads)
        is_overloaded = len(home.sent) > _HOME_LOAD * mean + home.slack
        if is_overloaded or not home.has_room:
            home = idlest
        return home if home.has_room or request.is_urgent else None

    def _send(self, request: Request, replica: Replica) -> None:
        request.replica, request.client = replica, replica.client
        replica.sent[request] = None
        _resolve(request, replica)

    def _leave(self, request: Request) -> None:
        """Remove a request from its engine; the last one of a dead engine triggers the verdict."""
        replica, request.replica = request.replica, None
        if replica is None:
            return
        del replica.sent[request]
        assert request.client is not None
        death = self._deaths.get(request.client)
        if death is not None:
            death.inside.discard(request)
            if not death.inside:
                del self._deaths[request.client]
                self._judge(death)

    def _forget(self, request: Request) -> None:
        """Forget a request that has ended in any way."""
        self._urgent.pop(request, None)
        self._waiting.pop(request, None)
        if self._suspected.pop(request.number, None) is not None:
            self._suspects.drop(request.number)
        self._suspects.finish(request.number)
        for death in self._deaths.values():  # it does not need a verdict
            for requests in (death.lost, death.unsent):
                if request in requests:
                    requests.remove(request)
        self._leave(request)
        if self._urgent or self._waiting or self._has_suspects:
            self._admit()

    @property
    def _has_suspects(self) -> bool:
        """Return whether an engine has a group on trial, or a group waits for one."""
        is_closed = self._trial is not None or self._drained is not None
        return is_closed or self._suspects.has_waiting_group

    def _note_death(self, replica: Replica, client: EngineClient, exc: EngineDied) -> _Death:
        """Record that an engine has died, and restart it."""
        death = self._deaths.get(client)
        if death is None:
            inside = {request for request in replica.sent if request.client is client}
            is_well = self._replicas.restart(replica, client, exc)
            death = _Death(replica, exc.is_broken, is_well, inside)
            self._deaths[client] = death
        return death

    async def _outlive(self, death: _Death, request: Request, *, was_sent: bool) -> None:
        """Wait for the verdict on a request of a dead engine; raises Quarantined.

        It is not quarantined if the engine is not healthy after a restart: the machine is at fault.
        """
        (death.lost if was_sent else death.unsent).append(request)
        self._leave(request)
        await death.judged.wait()
        if request.number not in death.quarantined:
            return
        if await asyncio.shield(death.is_well):
            self._replicas.note_killer()
            raise Quarantined
        self._suspects.add([request.number])
        self._await_trial(request)
        self._admit()

    def _judge(self, death: _Death) -> None:
        """Make suspects of the requests that an engine had when it died."""
        numbers = [request.number for request in death.lost]
        is_trial = self._trial is death.replica
        if numbers and not death.is_broken:
            death.quarantined = frozenset(self._suspects.convict(numbers))
            if self._replicas.failure is None:
                requests = "1 request" if len(numbers) == 1 else f"{len(numbers):,} requests"
                words = f"{requests} of engine {death.replica.number}"
                self._log(f"{words} will be rerun separately from others")
        elif is_trial:
            self._suspects.acquit()
        suspects = [*death.lost, *death.unsent] if is_trial else death.lost
        for request in suspects if is_trial or not death.is_broken else ():
            if request.number not in death.quarantined:
                self._await_trial(request)
        if is_trial:
            self._trial = None
        death.judged.set()
        self._admit()

    def _await_trial(self, request: Request) -> None:
        request.turn = asyncio.get_running_loop().create_future()
        self._suspected[request.number] = request

    def _balance(self) -> None:
        """Move waiting requests from the busiest engine to the idlest: half of the difference."""
        self._balancing = None
        ready = () if self._waiting else self._open
        idlest = min(ready, key=lambda one: len(one.sent), default=None)
        if idlest is not None and idlest.num_waiting < 0:
            busiest = max(ready, key=lambda one: len(one.sent))
            difference = len(busiest.sent) - len(idlest.sent)
            busiest.give_up(min(busiest.num_waiting, difference // 2))


def _resolve(request: Request, replica: Replica | None) -> None:
    if request.turn is not None and not request.turn.done():
        request.turn.set_result(replica)


async def _result_of(
    exchange: Awaitable[_Result], request: Request, *, is_movable: bool
) -> _Result:
    """Return the result of an exchange; raises _Moved if it has to run elsewhere."""
    if not is_movable:
        return await exchange
    request.is_moved = False
    request.task = fetching = asyncio.ensure_future(exchange)
    try:
        return await fetching
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if request.is_moved and not (task is not None and task.cancelling()):
            raise _Moved from None
        raise
    finally:
        request.task = None
