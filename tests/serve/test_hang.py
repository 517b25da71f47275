"""A server whose engine hangs: requests get an error, and the process ends for a restart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import IO

import httpx

from tests.warm_start import FORKED

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 120
# Steps hang once a file exists.
SERVER = (
    FORKED
    + """
import sys, threading
from pathlib import Path
from tidemill.cli.__main__ import main
from tidemill.engine.loop.runner import Runner

run, trap = Runner.run, Path(sys.argv.pop(1))

def hanging(own, plan):
    if trap.exists():
        threading.Event().wait()
    return run(own, plan)

Runner.run = hanging
main()
"""
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def address_of(stream: IO[str], log: list[str]) -> str:
    """Return the address once the server has printed it."""
    for text in stream:
        log.append(text)
        if found := re.search(r" at (http://[\d.:]+)", text):
            return found[1]
    raise AssertionError("".join(log))


def test_a_server_whose_engine_hangs_ends_with_1(tmp_path: Path) -> None:
    """Waiting requests get a 503, streams an error as their last event; then it is unhealthy."""
    trap, log = tmp_path / "trap", list[str]()
    flags = ["serve", "--port", "0", "--device", "cpu", "--stall-seconds", "5"]
    flags += ["--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(trap), *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            url = address_of(process.stderr, log)
            reading = Thread(target=log.extend, args=(process.stderr,))
            reading.start()
            with httpx.Client(base_url=url, timeout=WAIT_SECONDS) as client:
                assert client.get("/health").status_code == 200
                assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
                trap.touch()
                answer = client.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 503
                assert answer.json()["error"]["type"] == "server_error"
            assert process.wait(WAIT_SECONDS) == 1
            reading.join()
        finally:
            process.kill()
    sentence, stacks = "".join(log).split("Stacks of all threads, for a bug report:\n")
    assert "tidemill: the engine has stopped: no step has finished for 5 s, with" in sentence
    assert sentence.endswith("(--stall-seconds). Restart the server\n")
    assert "in hanging" in stacks
