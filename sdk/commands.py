"""Runs and batches of Python programs: commands in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from tidemill.engine.child_command import module_command
from tidemill.offline.console.errors import OVER_LIMIT, ROWS_FAILED, STACKS, CliError
from tidemill.offline.files.paths import card_path, is_path
from tidemill.offline.run.progress import PROGRESS_FD
from tidemill.offline.run.run_flags import options_from, parse_run

from .errors import TidemillError
from .progress import progress_of_run
from .public import public

_ENDED: Final = (0, ROWS_FAILED, OVER_LIMIT)
_BATCH_ENDS: Final = ("completed", "failed", "expired", "cancelled")
_STOP_SECONDS = 30.0
_MAX_WORDS = 20


@public
@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run: where its output is, and how many rows are ok and failed.

    `card` has everything that its run card says.
    """

    output: Path
    num_rows: int
    num_ok: int
    num_failed: int
    card: Mapping[str, Any]


@public
def run(
    input_file: str | Path,
    output_file: str | Path | None = None,
    *,
    progress: bool = True,
    **flags: Any,
) -> RunResult:
    """Run a file or a table on this machine, as `tidemill run` with these flags does.

    Flags are named as there, with underscores: `prompt="{{ text }}"`, `max_tokens=64`,
    `resume=True`. Messages go to standard error; progress is a bar in a notebook and on a terminal,
    lines in a log, and neither where `progress` is False. Raises TidemillError where the run cannot
    be, or did not come to its end; an interrupt ends it, and `resume=True` goes on. A program is in
    docs/guides/python-and-notebooks.md:

        done = run("questions.csv", prompt="{{ question }}", max_tokens=20)
        print(done.output, done.num_ok, done.num_failed)
    """
    if not isinstance(input_file, (str, os.PathLike)):
        raise TidemillError(
            f"`run` takes the path of a file, not a {type(input_file).__name__}: save it as a "
            "table, or give it to `Engine().answer_table`"
        )
    typed = [str(input_file), *_flags_of(flags)]
    if output_file is not None:
        typed += ["-o", str(output_file)]
    try:
        options = options_from(parse_run(typed))
    except CliError as exc:
        raise TidemillError(str(exc)) from exc
    if not is_path(options.output_file):
        raise TidemillError("a run of a program needs a file for its rows: name `output_file`")
    target = Path(options.output_file) if options.table is None else options.table.output
    with progress_of_run(is_wanted=progress) as fd:
        _, status, words = _run_command(["run", *typed], fd)
    if status not in _ENDED:
        raise TidemillError(words or f"the run ended with status {status}")
    try:
        card = json.loads(card_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise TidemillError(f"the run ended, and its card cannot be read: {exc}") from exc
    rows = card["rows"]
    return RunResult(target, rows["total"], rows["ok"], rows["failed"], card)


@public
def submit(file: str | Path, *, wait: bool = False, **flags: Any) -> dict[str, Any]:
    """Submit a file or a table to a server, as `tidemill submit` does, and return its Batch.

    With `wait` it has ended, and its rows or its table lie beside the file. Raises TidemillError.
    TIDEMILL_BASE_URL and TIDEMILL_API_KEY name the server, or flags do:

        batch = submit("requests.jsonl", wait=True, metadata=["run=nightly"])
        print(batch["status"], batch["request_counts"])
    """
    typed = ["submit", str(file), "--json", *_flags_of({**flags, "wait": wait})]
    said, status, words = _run_command(typed)
    lines = said.splitlines()
    batch: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if batch.get("object") != "batch" or (wait and batch.get("status") not in _BATCH_ENDS):
        raise TidemillError(words or f"the command ended with status {status}")
    return batch


def _flags_of(flags: Mapping[str, Any]) -> list[str]:
    typed = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            typed.append(flag)
        elif isinstance(value, (list, tuple)):
            typed += (
                [flag, ",".join(map(str, value))] if name == "keep" else [flag, *map(str, value)]
            )
        elif value is not None and value is not False:
            typed.append(f"{flag}={value}")
    return typed


def _run_command(typed: Sequence[str], progress_fd: int | None = None) -> tuple[str, int, str]:
    """Run a command; return its standard output, its status and its last words."""
    reports = {} if progress_fd is None else {PROGRESS_FD: str(progress_fd)}
    command = module_command("tidemill.sdk.child", *typed)
    pipe = subprocess.PIPE
    with subprocess.Popen(  # noqa: S603 - our own command
        # Its standard input is open as long as this process lives. In a session of its own Ctrl-C
        # does not reach it: it is told once, by us.
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=os.environ | reports,
        pass_fds=[] if progress_fd is None else [progress_fd],
        start_new_session=True,
    ) as process:
        stdout = process.stdout
        assert stdout is not None
        assert process.stderr is not None
        said: list[str] = []
        reading = threading.Thread(target=lambda: said.append(stdout.read()))
        reading.start()
        try:
            words = _echoed(process.stderr)
            reading.join()
            status = process.wait()
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            reading.join()
            raise
    return said[0], status, words


def _echoed(stream: IO[str]) -> str:
    """Pass on what a command says, and return the last message of it, without details."""
    message: list[str] = []
    is_detail = False
    for line in stream:
        sys.stderr.write(line)
        is_detail |= line == STACKS
        if line.startswith("tidemill: "):
            message, is_detail = [], False
        if not is_detail:
            message.append(line.removeprefix("tidemill: "))
        del message[_MAX_WORDS:]
    return "".join(message).strip()
