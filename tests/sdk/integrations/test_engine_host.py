"""Engine host: several connections share one engine, and learn when it has died."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.hosting import accepting_host
from tidemill.engine_process.frames import Abort, Row, Stats, encode_frame
from tidemill.protocol.contract import EngineInfo, EngineStats, Usage
from tidemill.sdk.engine_process import EngineProcess
from tidemill.sdk.errors import EngineDied
from tidemill.sdk.in_flight import Sent
from tidemill.sdk.integrations import sockets
from tidemill.sdk.integrations.engine_host import EngineHost
from tidemill.sdk.integrations.hosted_engine import HostedEngine
from tidemill.sdk.integrations.sockets import listen, socket_address

WAIT_SECONDS = 60
SCRIPT = Path(__file__).parents[2] / "engine_process/scripted_engine.py"
HANGS = json.dumps({"custom_id": "a", "url": "/v1/x", "body": {"hang": True}}).encode()


class Process:
    """An engine's process whose answers come when the test gives them."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, bytes], Future[Row]] = {}
        self.arrived = threading.Semaphore(0)

    def info(self) -> EngineInfo:
        """Return the info of some engine."""
        return EngineInfo("fake", None, "test", "cpu", 0, 3)

    def send_line(self, number: int, data: bytes) -> Sent[Row]:
        """Keep the line."""
        future = self.sent[number, data] = Future[Row]()
        self.arrived.release()
        return Sent(future, len(data))

    def wait(self, count: int) -> None:
        """Return once `count` lines have arrived."""
        for _ in range(count):
            assert self.arrived.acquire(timeout=WAIT_SECONDS)


def row(data: bytes, *, ticket: int = 0, is_success: bool = True) -> Row:
    """Return a row with these bytes."""
    return Row(ticket, is_success, Usage(), data)


@pytest.fixture
def process() -> Process:
    """Return the process behind the host."""
    return Process()


@pytest.fixture
def host(process: Any, address: str) -> Iterator[EngineHost]:
    """Return a host that accepts connections."""
    with accepting_host(process, address) as host:
        yield host


def test_connections_share_an_engine(host: EngineHost, process: Process, address: str) -> None:
    """Each gets the rows and verdicts of its lines; both keep the host alive."""
    one, other = HostedEngine(address, {}, {}), HostedEngine(address, {}, {})
    assert (one.max_inflight(), other.max_inflight(), host.is_needed) == (12, 12, True)
    sent = [one.send_line(1, b"a"), other.send_line(2**63 - 1, b"b")]
    process.wait(2)
    process.sent[2**63 - 1, b"b"].set_result(row(b"B", is_success=False))
    process.sent[1, b"a"].set_result(row(b"A"))
    rows = [each.future.result(WAIT_SECONDS) for each in sent]
    assert [(one.is_success, one.row) for one in rows] == [(True, b"A"), (False, b"B")]


def test_a_dead_engine_ends_all_connections(
    host: EngineHost, process: Process, address: str
) -> None:
    """All get its last output, including idle ones; none can be used again."""
    one, idle = HostedEngine(address, {}, {}), HostedEngine(address, {}, {})
    sent = [one.send_line(number, b"a") for number in range(2)]
    process.wait(2)
    process.sent[0, b"a"].set_exception(EngineDied("killed by SIGKILL"))
    host.wait_until_idle(0)
    host.close()
    for each in sent:
        with pytest.raises(EngineDied, match="killed by SIGKILL"):
            each.future.result(WAIT_SECONDS)
    assert not host.is_needed
    while not idle.is_dead:
        threading.Event().wait(0.01)
    with pytest.raises(EngineDied, match="killed by SIGKILL"):
        idle.send_line(1, b"a")


def test_an_engine_that_hangs_ends_its_host(address: str) -> None:
    """Each connection has the reason, so that a Spark task fails instead of waiting for ever."""
    process = EngineProcess([sys.executable, str(SCRIPT)], stall_seconds=0.5)
    with accepting_host(process, address) as host:
        sent = HostedEngine(address, {}, {}).send_line(1, HANGS)
        with pytest.raises(EngineDied, match="stalled: "):
            sent.future.result(WAIT_SECONDS)
        host.wait_until_idle(WAIT_SECONDS)
        assert not host.is_needed
    process.close()


def test_lines_of_a_process_that_ends_are_cancelled(
    host: EngineHost, process: Process, address: str
) -> None:
    """A host without connections has nothing to wait for."""
    one = HostedEngine(address, {}, {})
    one.send_line(1, b"a")
    process.wait(1)
    one._wire.shut_down()
    host.wait_until_idle(0)
    assert not host.is_needed
    assert process.sent[1, b"a"].cancelled()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (encode_frame(row(b"A", ticket=9)), "a row for an unknown request, 9"),
        (encode_frame(Abort(1)), "unexpected Abort frame"),
        (encode_frame(row(b"A", ticket=1))[:-1], "truncated frame"),
        (b"\0\0\0\0\xff", "unknown frame kind 255"),
        (b"\xff\0\0\0\3", "a frame of 4,278,190,080 bytes is too long"),
        (b"", "the host of the engine has ended"),
    ],
)
def test_frames_that_answer_no_line_end_all_waits(address: str, sent: bytes, reason: str) -> None:
    """A line whose row may be among them fails with the reason, as do later lines."""
    with listen(address) as listener, ThreadPoolExecutor(1) as pool:

        def greeted() -> socket.socket:
            connection = listener.accept()[0]
            connection.sendall(encode_frame(Stats(EngineStats())))
            return connection

        greeting = pool.submit(greeted)
        engine = HostedEngine(address, {}, {})
        with greeting.result() as connection:
            waiting = engine.send_line(1, b"a").future
            connection.sendall(sent)
        with pytest.raises(EngineDied, match=reason):
            waiting.result(WAIT_SECONDS)
        with pytest.raises(EngineDied, match=reason):
            engine.send_line(2, b"b")


def test_a_socket_is_in_a_private_folder(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others may enter is refused; /tmp is used if the path is too long."""
    monkeypatch.setattr(sockets.tempfile, "tempdir", str(short_path))
    address = Path(socket_address(1, {"model": None}))
    assert address.parent.parent == short_path
    assert address == Path(socket_address(1, {"model": None}))
    assert address != Path(socket_address(2, {"model": None}))
    address.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="a folder with mode 700 owned by this user"):
        socket_address(1)
    monkeypatch.setattr(sockets.tempfile, "tempdir", str(short_path / ("x" * 90)))
    assert len(socket_address(1)) < 100
