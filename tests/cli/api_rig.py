"""The commands that speak to an API, typed against one on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.fake_api import KEY, MODEL, FakeApi, fake_api
from tidemill.cli.main import main


class Result(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def values(self) -> list[dict[str, Any]]:
        """Return the JSON values of standard output, which holds nothing else."""
        return [json.loads(line) for line in self.out.splitlines()]


class Shell:
    """Runs commands in a separate folder, against a running API."""

    def __init__(
        self, api: FakeApi, folder: Path, capfd: pytest.CaptureFixture[str], pauses: list[float]
    ) -> None:
        self.api = api
        self.folder = folder
        self.pauses = pauses
        self._capfd = capfd

    def type(self, *arguments: str) -> Result:
        """Run a command."""
        status = main(arguments)
        output = self._capfd.readouterr()
        return Result(status, output.out, output.err)

    def file(self, *lines: dict[str, Any], name: str = "in.jsonl") -> str:
        """Write an input and return its path."""
        path = self.folder / name
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        return str(path)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    """Return a request."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def submitted(shell: Shell, *custom_ids: str, **last: object) -> str:
    """Return the id of a batch that was just made."""
    *others, end = custom_ids or ("a",)
    lines = [*(line(custom_id) for custom_id in others), line(end, **last)]
    return shell.type("submit", shell.file(*lines)).out.strip()


@contextmanager
def shell_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Shell]:
    """Yield a shell with an API and its key in the environment, and without real sleeps."""
    pauses: list[float] = []
    with fake_api() as api:
        monkeypatch.setattr("tidemill.offline.console.backoff.sleep", pauses.append)
        monkeypatch.setenv("TIDEMILL_BASE_URL", api.url)
        monkeypatch.setenv("TIDEMILL_API_KEY", KEY)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.chdir(folder)
        yield Shell(api, folder, capfd, pauses)
