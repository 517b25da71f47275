"""Reuse of results: rows of lines that an earlier run has answered, and results kept for the next.

Rows are made while the input is checked, so that a file without a new line needs no model. A cache
that fails is left alone from then on, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from pydantic_core import to_json

from tidemill.batch.file.lines import Line
from tidemill.batch.file.rows import print_cached
from tidemill.batch.result_cache import (
    MAX_BYTES,
    CacheError,
    ResultCache,
    Scope,
    result_key,
)
from tidemill.engine.config import EngineConfig
from tidemill.engine.storage.model_digest import results_digest
from tidemill.protocol.contract import Reply, Responder

from ..console.terminal import log
from ..files.reused_rows import ReusedRows
from .run_options import RunOptions


class Reuse:
    """Looks results up in the order of lines, and keeps those of a run."""

    def __init__(
        self, cache: ResultCache, rows: ReusedRows, created: int, *, sampled: bool
    ) -> None:
        self.rows = rows
        self._cache: ResultCache | None = cache
        self._created = created
        self._sampled = sampled

    def look_up(self, line: Line | None, body: Mapping[str, Any] | None = None) -> bool:
        """Look up the next line, and say whether it has a row now; None for one that cannot run."""
        found = None if line is None or body is None else self._find(line, body)
        if line is not None and found is not None:
            try:
                self.rows.add(print_cached(line, found))
            except OSError as exc:
                self.rows.drop()
                self._give_up(f"its rows cannot be put down meanwhile ({exc.strerror})")
            else:
                return True
        self.rows.add(None)
        return False

    def _find(self, line: Line, body: Mapping[str, Any]) -> bytes | None:
        if self._cache is None:
            return None
        key = result_key(line.url, body, sampled=self._sampled)
        try:
            return None if key is None else self._cache.find(key, line.digest, self._created)
        except CacheError as exc:
            self._give_up(exc)
            return None

    def keep(
        self, url: str, body: Mapping[str, Any], digest: str, created: int, reply: Reply
    ) -> None:
        """Keep the successful reply to the line of a digest."""
        key = None if self._cache is None else result_key(url, body, sampled=self._sampled)
        if key is None or self._cache is None:
            return
        try:
            printed = to_json(reply.body, inf_nan_mode="null")
            self._cache.add(key, digest, created, printed)
        except CacheError as exc:
            self._give_up(exc)

    def close(self) -> None:
        """Write what was kept."""
        cache, self._cache = self._cache, None
        self.rows.close()
        if cache is not None:
            try:
                cache.close()
            except CacheError as exc:
                log(f"note: {exc}: some results of this run are not kept")

    def _give_up(self, reason: object) -> None:
        log(f"note: {reason}: the run goes on without reuse")
        self._cache = None


class KeepingResponder:
    """A `Responder` that delegates and keeps what comes back."""

    def __init__(self, responder: Responder, reuse: Reuse) -> None:
        self._responder = responder
        self._reuse = reuse

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request."""
        reply = await self._responder.respond(url, body, request_id, created)
        if reply.status_code == 200:
            self._reuse.keep(url, body, request_id.removeprefix("req_"), created, reply)
        return reply


def open_reuse(
    options: RunOptions,
    config: EngineConfig,
    template: str | None,
    created: int,
    stack: ExitStack,
) -> Reuse | None:
    """Open the cache of `--reuse`; None without one, or where it cannot be used."""
    if options.reuse is None:
        return None
    digest = results_digest(config, template, created)
    if digest is None:
        log(f"note: {config.model} is not on this machine yet: this run reuses and keeps nothing")
        return None
    try:
        scope, max_bytes = Scope(digest, config.model), options.reuse_max_size or MAX_BYTES
        cache = ResultCache.open(options.reuse, scope, max_bytes)
    except CacheError as exc:
        log(f"note: {exc}: the run goes on without reuse")
        return None
    reuse = Reuse(cache, ReusedRows(options.output_tmp_dir), created, sampled=options.reuse_sampled)
    stack.callback(reuse.close)
    return reuse
