"""Input files, runs with a scripted engine, processes and a scripted http server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.api_rig import Shell, shell_in
from tests.offline.given import Answer
from tests.offline.scripted import ScriptedEngine
from tidemill.cli.main import parse
from tidemill.engine.config import EngineConfig
from tidemill.offline.run.job import run_job
from tidemill.offline.run.run_flags import options_from

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/offline/scripted.py"


@pytest.fixture
def write_input(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes lines to in.jsonl and gives its path."""

    def write(*lines: str) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def tmp_dir(tmp_path: Path) -> Path:
    """Return an empty folder for --output-tmp-dir."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


@dataclass
class Runner:
    """Runs the command in this process; `engine` is None until a model was loaded.

    All waits are divided by `speed`. The engine fails at bodies whose `name` is in `fails_at` and
    dies at `dies_at`, and after `hangs_after` requests it answers none.
    """

    engine: ScriptedEngine | None = None
    speed: float = 1
    configs: list[EngineConfig] = field(default_factory=list)
    loaded_with: dict[str, Any] = field(default_factory=dict)
    fails_at: set[str] = field(default_factory=set)
    dies_at: str | None = None
    hangs_after: int = sys.maxsize
    has_card: bool = False

    def __call__(self, *arguments: object) -> int:
        """Run `tidemill run` with these arguments and a scripted engine."""
        card = () if self.has_card else ("--no-card",)
        parsed = parse(["run", "--model", "m", *card, *map(str, arguments)])
        return run_job(options_from(parsed), load=self._load, retry_delays=(0.01,) * 4)

    def _load(self, config: EngineConfig, **given: Any) -> ScriptedEngine:
        self.configs.append(config)
        self.loaded_with = given
        self.engine = ScriptedEngine(speed=self.speed)
        self.engine.fails_at, self.engine.dies_at = self.fails_at, self.dies_at
        self.engine.hangs_after = self.hangs_after
        return self.engine


@pytest.fixture
def run() -> Runner:
    """Run `tidemill run` in this process with a scripted engine."""
    return Runner()


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts `tidemill run` with a scripted engine as a process."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, options: list[str] | None = None, **given: Any) -> Any:
        command = [sys.executable, str(SCRIPT), *(options or []), "run", "--model", "m"]
        command += ["--no-card"]
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=ROOT,
            env=given.pop("env", os.environ) | {"PYTHONUNBUFFERED": "1"},
            text=True,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | given),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@dataclass
class Server:
    """A loopback server that gives `answers` in turn, the last one again and again."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    received: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def will(self, *answers: Answer) -> None:
        """Set what comes next."""
        self.answers = list(answers)


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a scripted http server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            scripted.received.append((self.command, self.path, body))
            scripted.headers.append(dict(self.headers))
            turn = scripted.answers[0]
            if len(scripted.answers) > 1:
                scripted.answers.pop(0)
            if turn.hang:
                scripted.let_go.wait(120)
                self.close_connection = True
                return
            self.send_response(turn.status)
            for name, value in turn.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(turn.claimed_length or len(turn.body)))
            self.end_headers()
            self.wfile.write(turn.body)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scripted = Server(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield scripted
    scripted.let_go.set()
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Shell]:
    """Commands that speak to an API, and one that answers them."""
    with shell_in(tmp_path, monkeypatch, capfd) as found:
        yield found
