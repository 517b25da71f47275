"""Every call between a table's rows and a shared engine fails in turn: no row goes missing."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest

from tests.faults import Call, Fault, faults_of, in_process, profiled
from tests.sdk.hosting import accepting_host
from tidemill.engine_process.frames import Row
from tidemill.protocol.contract import EngineInfo, Usage
from tidemill.sdk.errors import EngineDied
from tidemill.sdk.in_flight import Sent
from tidemill.sdk.integrations import hosted_engine, sockets
from tidemill.sdk.integrations.batch_answers import BatchAnswers
from tidemill.sdk.integrations.engine_host import EngineHost
from tidemill.sdk.integrations.hosted_engine import HostedEngine
from tidemill.sdk.integrations.sockets import socket_address

FOLDERS = ("sdk/integrations", "sdk/in_flight", "batch/table")
RECIPE = {"prompt": "{{ text }}", "params": {"temperature": 0}}
TABLE = pa.table({"text": [f"text {number}" for number in range(9)]})
CHOICE = {"message": {"content": "hi"}, "finish_reason": "stop"}
BODY = {"choices": [CHOICE], "usage": {"total_tokens": 1}}
ROW = json.dumps({"response": {"status_code": 200, "body": BODY}, "error": None}).encode()
FAILED, WRONG = 7, 8


class Process:
    """Engine process that answers at once."""

    def max_inflight(self) -> int:
        """Return some number."""
        return 4

    def info(self) -> EngineInfo:
        """Return the info of some engine."""
        return EngineInfo("fake", None, "test", "cpu", 0, 1)

    def send_line(self, number: int, data: bytes) -> Sent[Row]:
        """Answer a line."""
        del number
        future: Future[Row] = Future()
        future.set_result(Row(0, is_success=True, usage=Usage(), row=ROW))
        return Sent(future, len(data))


def _close_once_idle(host: EngineHost) -> None:
    """End the host as its process does, which closes all connections in any case."""
    try:
        host.wait_until_idle(60)
    finally:
        host.close()


def no_host(*_: object) -> NoReturn:
    """Fail as where no host can be started."""
    raise EngineDied("no host")


def answer_table(address: str) -> int:
    """Answer the rows of a table by a host and a connection to it; return 0 for all of them."""
    process: Any = Process()
    with accepting_host(process, address) as host:
        threading.Thread(target=_close_once_idle, args=(host,), daemon=True).start()
        engine = HostedEngine(address, {}, {})
        answers = BatchAnswers(RECIPE, TABLE.schema)
        found = [*answers.answered(engine, TABLE.to_batches(max_chunksize=4))]
        is_whole = pa.Table.from_batches(found).column("output_text").to_pylist() == ["hi"] * 9
    return 0 if is_whole else WRONG


def _is_beyond_guards(call: Call) -> bool:
    """Return whether a call is the first of a thread or callback, or leaves a lock locked.

    In a host a thread that fails there, or a connection that is accepted and not served, ends with
    the host's process, which this test does not have.
    """
    function, _, called = call.function.partition(" > ")
    name = function.rpartition(".")[2]
    entries = ("_serve", "_send_all", "_read_all", "pass_on", "__init__")
    is_entry = not called and name in entries
    return is_entry or name in {"accept_all", "_accept"} or called == "__exit__"


@pytest.mark.parametrize("one_in", [101, pytest.param(1, marks=pytest.mark.long)])
def test_a_table_has_all_answers_or_an_error(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, one_in: int
) -> None:
    """Neither side waits for ever for the other."""
    monkeypatch.setattr(sockets.tempfile, "tempdir", str(short_path))
    numbers = iter(range(10**6))

    def run(fault: Fault | None) -> tuple[int, Any]:
        address = socket_address(f"key {next(numbers)} {os.getpid()}")
        # One that breaks is not replaced: its lines would be answered by a real model.
        monkeypatch.setattr(hosted_engine, "_start", no_host)
        with profiled(FOLDERS, fault) as counts:
            try:
                status = answer_table(address)
            except (Exception, SystemExit):  # noqa: BLE001 - as a task of Spark fails
                status = FAILED
        return status, counts

    assert run(None)[0] == 0
    status, counts = run(None)
    assert status == 0
    counts = Counter({call: counts[call] for call in counts if not _is_beyond_guards(call)})
    found = {
        str(fault): status
        for fault in faults_of(counts, one_in=one_in)
        if (status := in_process(lambda fault=fault: run(fault)[0], short_path / "stderr"))  # type: ignore[misc]
        not in {0, FAILED}
    }
    assert not found


def test_fewer_answers_than_rows_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is never yielded with, or left out for, rows that have no answer."""
    answers = BatchAnswers(RECIPE, TABLE.schema)
    lines = BatchAnswers._lines
    monkeypatch.setattr(BatchAnswers, "_lines", lambda *given: [*lines(*given)][:-1])
    process: Any = Process()
    with pytest.raises(Exception, match="the engine returned fewer rows than the table has"):
        list(answers.answered(process, TABLE.to_batches()))


def test_a_reader_that_fails_ends_all_waits(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every waiting caller gets the reason, whatever the exception is."""
    process = Process()
    monkeypatch.setattr(HostedEngine, "_resolve", lambda *_: 1 / 0)
    with accepting_host(process, address):
        engine = HostedEngine(address, {}, {})
        answered = engine.send_line(1, b"{}").future
        with pytest.raises(EngineDied, match="cannot be read: ZeroDivisionError"):
            answered.result(timeout=60)
