"""An engine process that ends: the last lines of its stderr."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from pathlib import Path

import pytest

from tidemill import EngineDied
from tidemill.sdk.engine_process import EngineProcess

SCRIPT = Path(__file__).parents[1] / "engine_process/scripted_engine.py"
HANGS = json.dumps({"custom_id": "a", "url": "/v1/x", "body": {"hang": True}}).encode()
DIES = """
import sys
for number in range(1_000):
    print(f"line {number} of what went wrong", file=sys.stderr)
sys.exit(5)
"""
HOLDS_THE_PIPE = """
import subprocess, sys
print("child left", file=sys.stderr, flush=True)
wait = "import pathlib, sys, time\\nwhile pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)"
subprocess.Popen([sys.executable, "-c", wait, *sys.argv[1:]], start_new_session=True)
sys.exit(5)
"""


def test_the_error_has_the_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    """The error quotes a limited part, and our stderr has all of it."""
    process = EngineProcess([sys.executable, "-c", DIES])
    with pytest.raises(EngineDied, match="exited with status 5") as caught:
        process.info()
    words = str(caught.value).splitlines()[2:]
    assert words == [f"line {number} of what went wrong" for number in range(980, 1_000)]
    assert len(capfd.readouterr().err.splitlines()) == 1_000
    process.close()


def test_the_last_words_of_a_process_whose_child_lives_on(tmp_path: Path) -> None:
    """Its end is not waited for."""
    (tmp_path / "alive").touch()
    process = EngineProcess([sys.executable, "-c", HOLDS_THE_PIPE, str(tmp_path / "alive")])
    try:
        with pytest.raises(
            EngineDied, match="exited with status 5\nThe last lines of its stderr:\nchild left"
        ):
            process.info()
        process.close()
    finally:
        (tmp_path / "alive").unlink()


def test_the_error_of_a_cancelled_request_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Closing the engine cancels requests, and the last words are those of the program."""
    process, begun = EngineProcess([sys.executable, "-c", DIES]), threading.Event()

    async def fail_when_cancelled() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise EngineDied("the engine is closed") from None

    future = process._in_loop(fail_when_cancelled())
    begun.wait()
    future.cancel()
    process.close()
    gc.collect()
    assert not caplog.records


def test_a_fork_cannot_use_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to start processes."""
    process = EngineProcess([sys.executable, "-c", DIES])
    with monkeypatch.context() as other:
        other.setattr(process, "_pid", -1)
        for use in (process.info, lambda: process.send("/v1/x", {})):
            with pytest.raises(EngineDied, match=r"in another process.*get_context\(.spawn.\)"):
                use()
    process.close()


def test_an_engine_that_hangs_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """The error has the reason; all stacks of its process are on our standard error."""
    process = EngineProcess([sys.executable, str(SCRIPT)], stall_seconds=0.5)
    sent = process.send_line(1, HANGS)
    with pytest.raises(EngineDied, match="stalled: ") as caught:
        sent.future.result(timeout=120)
    assert "with 1 request in the engine" in str(caught.value)
    process.close()
    stacks = capfd.readouterr().err
    assert "most recent call first" in stacks
    assert "in serve" in stacks
