"""Data parallelism of a run: several engine processes share the lines of one file.

Lines with the same prefix go to one engine, whose prefix cache contains it, as long as the engine
has not much more work than others. At the end of the file, an idle engine takes waiting lines from
another. An engine that dies is restarted, and its lines are rerun as suspects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from tidemill.batch.file.lines import LineError, parse_line
from tidemill.batch.file.rows import print_malformed, row_error_message
from tidemill.batch.file.run_line import LineResult
from tidemill.batch.parts import NotRun, row_not_run
from tidemill.batch.suspects import KILLED_MESSAGE
from tidemill.engine_process.client import EngineClient
from tidemill.engine_process.frames import FrameError, Row
from tidemill.engine_process.replica_pool import Quarantined, ReplicaPool
from tidemill.protocol.in_thread import in_thread_if_long
from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.stall import STALL_SECONDS

from ..console.terminal import log
from ..files.input_file import PlacedLine


class EngineReplicas(ReplicaPool):
    """Replica pool of a run, whose requests are lines.

    `home` returns a number for a line's place, the same for lines with the same prefix.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        created: int,
        home: Callable[[int], int],
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        super().__init__(commands, log=log, stall_seconds=stall_seconds)
        self._created = created
        self._home = home

    async def run_line(self, line: PlacedLine) -> LineResult:
        """Return the row of a line; raises EngineError if all engines have failed."""
        if line.raw.overlong is not None:
            return _malformed(line)
        exchange = partial(self._fetch_row, line)
        try:
            row = await self.run(exchange, home=self._home(line.place), is_movable=True)
        except Quarantined:
            return await _not_run(line, "engine_died", KILLED_MESSAGE)
        except FrameError as exc:
            return await _not_run(line, "too_long", f"This line is too long: {exc}.")
        return _result_of(row)

    def _fetch_row(self, line: PlacedLine, client: EngineClient) -> Awaitable[Row]:
        return client.fetch_row(line.raw.number, self._created, line.raw.data)


def _malformed(line: PlacedLine) -> LineResult:
    """Return the error row of an overlong line."""
    try:
        parse_line(line.raw)
    except LineError as exc:
        return LineResult(
            print_malformed(line.raw.digest, exc), is_success=False, failure=exc.message
        )
    raise AssertionError


def _result_of(row: Row) -> LineResult:
    failure = None if row.is_success else row_error_message(load_json(row.row))
    return LineResult(row.row, row.is_success, row.usage, failure)


async def _not_run(line: PlacedLine, code: str, message: str) -> LineResult:
    reason = NotRun(code, message, is_failure=True)
    row, _ = await in_thread_if_long(lambda _: row_not_run(line.raw, reason), line.raw.data)
    return LineResult(row.row, is_success=False, failure=message)
