"""Runs and batches for Python programs, as commands in child processes."""

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

from tidemill.batch.table.recipe_keys import RECIPE_KEYS
from tidemill.engine.child_command import module_command
from tidemill.offline.console.errors import OVER_LIMIT, ROWS_FAILED, STACKS, CliError
from tidemill.offline.files.paths import card_path, is_path
from tidemill.offline.run.progress import PROGRESS_FD
from tidemill.offline.run.run_flags import options_from, parse_run
from tidemill.protocol.validation import short_repr

from .errors import TidemillError
from .progress import progress_of_run
from .public import public

_ENDED: Final = (0, ROWS_FAILED, OVER_LIMIT)
_BATCH_ENDS: Final = ("completed", "failed", "expired", "cancelled")
_JOINED: Final = ("keep", "labels")
_STOP_SECONDS = 30.0
_MAX_WORDS = 20


@public
@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run: its output, and the numbers of successful and failed rows.

    `card` is the content of its run card.
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

    Flags have the same names, with underscores: `prompt="{{ text }}"`, `max_tokens=64`,
    `resume=True`. Messages go to standard error. Progress is a bar in a notebook or on a terminal,
    and lines in a log; `progress=False` hides it. Raises TidemillError if the run is not possible
    or did not finish. An interrupt stops the run; `resume=True` continues it. An example from
    docs/guides/python-and-notebooks.md:

        done = run("questions.csv", prompt="{{ question }}", max_tokens=20)
        print(done.output, done.num_ok, done.num_failed)
    """
    if not isinstance(input_file, (str, os.PathLike)):
        raise TidemillError(
            f"`run` requires the path of a file, not a {type(input_file).__name__}: save it as a "
            "table, or pass it to `Engine().answer_table`"
        )
    typed = [str(input_file), *_flags_of(flags)]
    if output_file is not None:
        typed += ["-o", str(output_file)]
    try:
        options = options_from(parse_run(typed))
    except CliError as exc:
        raise TidemillError(str(exc)) from exc
    if not is_path(options.output_file):
        raise TidemillError("`run` requires a file for its rows: pass `output_file`")
    target = Path(options.output_file) if options.table is None else options.table.output
    with progress_of_run(is_wanted=progress) as fd:
        _, status, words = _run_command(["run", *typed], fd)
    if status not in _ENDED:
        raise TidemillError(words or f"the run ended with status {status}")
    try:
        card = json.loads(card_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise TidemillError(f"the run ended, but its run card cannot be read: {exc}") from exc
    rows = card["rows"]
    return RunResult(target, rows["total"], rows["ok"], rows["failed"], card)


@public
def submit(file: str | Path, *, wait: bool = False, **flags: Any) -> dict[str, Any]:
    """Submit a file or a table to a server, as `tidemill submit` does, and return its Batch.

    With `wait`, the batch has ended, and its rows or its table are stored next to the file. Raises
    TidemillError. TIDEMILL_BASE_URL and TIDEMILL_API_KEY, or flags, set the server:

        batch = submit("requests.jsonl", wait=True, metadata=["run=nightly"])
        print(batch["status"], batch["request_counts"])
    """
    typed = ["submit", str(file), "--json", *_flags_of({**flags, "wait": wait})]
    output, status, words = _run_command(typed)
    lines = output.splitlines()
    batch: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if batch.get("object") != "batch" or (wait and batch.get("status") not in _BATCH_ENDS):
        raise TidemillError(words or f"the command ended with status {status}")
    return batch


def _flags_of(flags: Mapping[str, Any]) -> list[str]:
    typed = []
    for name, given in flags.items():
        value = _typed(name, given)
        flag = f"--{name.replace('_', '-')}"
        _check_value(name, value)
        if value is True:
            typed.append(flag)
        elif isinstance(value, (list, tuple)):
            if name in _JOINED:
                typed.append(f"{flag}={','.join(map(str, value))}")
            elif name in {"ask", "prior", "gold", "metadata"}:
                typed += [f"{flag}={each}" for each in value]
            else:
                typed += [flag, *map(str, value)]
        elif value is not None and value is not False:
            typed.append(f"{flag}={value}")
    return typed


def _typed(name: str, value: Any) -> Any:
    """Return a mapping as its flag has it: pairs of metadata, or JSON."""
    if not isinstance(value, Mapping) or name in RECIPE_KEYS:
        return value
    if name == "metadata":
        return [f"{key}={text}" for key, text in value.items()]
    return json.dumps(value)


def _check_value(name: str, value: Any) -> None:
    """Raise TidemillError for a value that a flag would change: a table, or a comma in a list."""
    items = value if isinstance(value, (list, tuple)) else [value]
    odd = next((each for each in items if isinstance(each, Mapping)), None)
    what = "a table"
    if odd is None and name in _JOINED and items is value:
        odd = next((each for each in items if "," in str(each)), None)
        what = "an item with a comma"
    if odd is not None:
        raise TidemillError(
            f"`{name}` has {what}, {short_repr(odd)}: set it in a recipe file, and pass `recipe`"
        )


def _run_command(typed: Sequence[str], progress_fd: int | None = None) -> tuple[str, int, str]:
    """Run a command; return its standard output, its status and its last message."""
    reports = {} if progress_fd is None else {PROGRESS_FD: str(progress_fd)}
    command = module_command("tidemill.sdk.child", *typed)
    pipe = subprocess.PIPE
    with subprocess.Popen(  # noqa: S603 - our own command
        # Its standard input is open as long as this process lives. In a separate session, Ctrl-C
        # does not reach it, so that it gets only the signal below.
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
        output: list[str] = []
        reading = threading.Thread(target=lambda: output.append(stdout.read()))
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
    return output[0], status, words


def _echoed(stream: IO[str]) -> str:
    """Forward a command's messages to stderr, and return the last one without details."""
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
