"""Reuse of results: rows from results of earlier runs, and storage of results for later runs.

Rows are looked up during the input check, so that a file without new lines does not need the model.
After a failure, the cache is no longer used, which is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from pydantic_core import from_json, to_json

from tidemill.batch.file.lines import Line, RawLine
from tidemill.batch.file.rows import print_cached
from tidemill.batch.result_cache import ResultCache
from tidemill.batch.result_key import MAX_BYTES, CacheError, ResultKeys, Scope
from tidemill.engine.config import EngineConfig
from tidemill.engine.storage.model_digest import results_digest
from tidemill.protocol.contract import Reply, Responder

from ..arguments.argument_types import S3Folder
from ..console.terminal import amount, log
from ..extras import require_extras
from ..files.reused_rows import ReusedRows
from .run_options import RunOptions

if TYPE_CHECKING:
    from tidemill.batch.file.echoed_fields import EchoedFields

T = TypeVar("T")

_DAY_SECONDS: Final = 24 * 3600


class ReuseOptions(Protocol):
    """Flags of result reuse."""

    @property
    def reuse(self) -> Path | S3Folder | None:
        """Return the folder of stored results."""

    @property
    def reuse_max_size(self) -> int | None:
        """Return the size limit of all results in bytes."""


class Results(Protocol):
    """Stored replies of one scope; every method raises CacheError."""

    @property
    def num_damaged(self) -> int:
        """Return the number of damaged results, which are treated as not found."""

    def find(self, key: bytes, digest: str, created: int) -> bytes | None:
        """Return the JSON of a stored reply, for the line with a digest and this creation time."""

    def add(self, key: bytes, digest: str, created: int, body: bytes) -> None:
        """Store the reply to the line with a digest."""

    def close(self) -> None:
        """Write the added results."""


class Reuse:
    """Looks up results in the order of lines, and stores the results of a run."""

    def __init__(
        self,
        cache: Results,
        rows: ReusedRows,
        created: int,
        keys: ResultKeys,
        echo: EchoedFields | None = None,
    ) -> None:
        self.rows = rows
        self._cache: Results | None = cache
        self._created = created
        self._keys = keys
        self._echo = echo

    def look_up(
        self, raw: RawLine, line: Line | None, body: Mapping[str, Any] | None = None
    ) -> bool:
        """Look up the next line (None if it is malformed); return whether it now has a row."""
        found = None if line is None or body is None else self._find(line, body)
        if line is not None and found is not None:
            try:
                row = print_cached(line, found)
                self.rows.add(row if self._echo is None else self._echo.add_to(row, raw))
            except OSError as exc:
                self.rows.drop()
                self._give_up(f"reused rows cannot be stored temporarily ({exc.strerror})")
            else:
                return True
        self.rows.add(None)
        return False

    def _find(self, line: Line, body: Mapping[str, Any]) -> bytes | None:
        if self._cache is None:
            return None
        key = self._keys.key_of(line.url, body, line.digest)
        try:
            return None if key is None else self._cache.find(key, line.digest, self._created)
        except CacheError as exc:
            self._give_up(exc)
            return None

    def key_of(self, url: str, body: Mapping[str, Any], digest: str, created: int) -> bytes | None:
        """Return the key of a request whose reply may be stored.

        Templates may contain the date: a reply from another day than the lookup is not stored.
        """
        if self._cache is None or created // _DAY_SECONDS != self._created // _DAY_SECONDS:
            return None
        return self._keys.key_of(url, body, digest)

    def keep(self, key: bytes, digest: str, created: int, reply: Reply) -> None:
        """Store the successful reply to the line with a digest."""
        if self._cache is None:
            return
        try:
            printed = to_json(reply.body, inf_nan_mode="null")
            self._cache.add(key, digest, created, printed)
        except CacheError as exc:
            self._give_up(exc)

    def close(self) -> None:
        """Write the stored results."""
        cache, self._cache = self._cache, None
        with suppress(OSError):  # the disk is full: the rows were dropped
            self.rows.close()
        if cache is not None:
            _note_damage(cache)
            try:
                cache.close()
            except CacheError as exc:
                log(f"note: {exc}: some results of this run are not stored")

    def _give_up(self, reason: object) -> None:
        log(f"note: {reason}: the run continues without reuse")
        cache, self._cache = self._cache, None
        if cache is not None:
            with suppress(CacheError):
                cache.close()


class KeepingResponder:
    """A `Responder` that delegates and stores the replies."""

    def __init__(self, responder: Responder, reuse: Reuse) -> None:
        self._responder = responder
        self._reuse = reuse

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request."""
        digest = request_id.removeprefix("req_")
        key = self._reuse.key_of(url, body, digest, created)
        reply = await self._responder.respond(url, body, request_id, created)
        if key is not None and reply.status_code == 200:
            self._reuse.keep(key, digest, created, reply)
        return reply


class ReusingResponder:
    """A `Responder` that reuses stored replies, and delegates and stores others.

    `open_at` opens the results for requests at a time (Unix seconds), or returns None. After a
    failure, results are no longer reused, which is logged.
    """

    def __init__(
        self,
        responder: Responder,
        open_at: Callable[[int], Results | None],
        keys: ResultKeys,
    ) -> None:
        self._responder = responder
        self._open_at = open_at
        self._keys = keys
        self._thread = ThreadPoolExecutor(1)  # for calls that may wait for a disk or a bucket
        self._is_given_up = False

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request."""
        digest = request_id.removeprefix("req_")
        key = None if self._is_given_up else self._keys.key_of(url, body, digest)
        if key is None:
            return await self._responder.respond(url, body, request_id, created)
        found = await self._in_thread(created, lambda results: results.find(key, digest, created))
        if found is not None:
            return Reply(200, from_json(found), is_long=True, is_reused=True)
        reply = await self._responder.respond(url, body, request_id, created)
        if reply.status_code == 200:
            await self._in_thread(
                created,
                lambda results: results.add(
                    key, digest, created, to_json(reply.body, inf_nan_mode="null")
                ),
            )
        return reply

    async def _in_thread(self, created: int, use: Callable[[Results], T]) -> T | None:
        def work() -> T | None:
            results = self._open_at(created)
            return None if results is None else use(results)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except CacheError as exc:
            if not self._is_given_up:
                log(f"note: {exc}: the server continues without reuse")
            self._is_given_up = True
            return None


@contextmanager
def daily_results(
    options: ReuseOptions, model: str, digest_at: Callable[[int], bytes | None]
) -> Iterator[Callable[[int], Results | None]]:
    """Yield a function that opens the results of `--reuse` for a time; close them at the end."""
    opened: dict[bytes, Results] = {}
    assert options.reuse is not None
    where, max_bytes = options.reuse, options.reuse_max_size or MAX_BYTES

    def open_at(created: int) -> Results | None:
        if (digest := digest_at(created)) is None:
            return None
        if digest not in opened:
            opened[digest] = open_results(where, Scope(digest, model), max_bytes, None)
        return opened[digest]

    try:
        yield open_at
    finally:
        for results in opened.values():
            _note_damage(results)
            with suppress(CacheError):
                results.close()


def _note_damage(results: Results) -> None:
    if results.num_damaged:
        log(f"note: {amount(results.num_damaged, 'damaged result')} ignored and computed again")


def all_names(config: EngineConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return the model names that requests may use: those of the model and of its adapters."""
    return *names, *(module.name for module in config.lora_modules)


def open_results(
    where: Path | S3Folder, scope: Scope, max_bytes: int, tmp_dir: Path | None
) -> Results:
    """Open the results of a scope in a folder or a bucket; raises CacheError."""
    if not isinstance(where, S3Folder):
        return ResultCache.open(where, scope, max_bytes)
    require_extras(f"--reuse {where}", "cloud")
    from tidemill.handler.aws.bucket import Bucket
    from tidemill.handler.aws.objects.result_store import ResultStore
    from tidemill.handler.aws.sync import Aws

    bucket = Bucket(where.bucket)
    return ResultStore(Aws().run, bucket, where.prefix, scope, max_bytes, tmp_dir=tmp_dir)


def open_reuse(
    options: RunOptions,
    config: EngineConfig,
    template: str | None,
    *,
    names: Sequence[str],
    created: int,
    stack: ExitStack,
    echo: EchoedFields | None = None,
) -> Reuse | None:
    """Open the cache of `--reuse`; None without one, or if it cannot be used.

    `names` are the served model names. `stack` closes the cache. Rows have the fields of `echo`.
    """
    if options.reuse is None:
        return None
    digest = results_digest(config, template, created)
    if digest is None:
        log(
            f"note: {config.model} is not on this machine yet, so this run does not reuse or store "
            "results"
        )
        return None
    try:
        scope = Scope(digest, options.model or config.model)
        max_bytes = options.reuse_max_size or MAX_BYTES
        cache = open_results(options.reuse, scope, max_bytes, options.output_tmp_dir)
    except CacheError as exc:
        log(f"note: {exc}: the run continues without reuse")
        return None
    keys = ResultKeys(all_names(config, names), options.reuse_sampled)
    reuse = Reuse(cache, ReusedRows(options.output_tmp_dir), created, keys, echo)
    stack.callback(reuse.close)
    return reuse
