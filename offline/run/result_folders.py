"""Folders of stored results, local or in a bucket, which `tidemill cache` lists and empties."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tidemill.batch.result_cache import (
    FILE_NAME,
    Totals,
    check_whole,
    delete_database,
    list_totals,
    open_database,
    remove_results,
)
from tidemill.batch.result_key import CacheDamaged, CacheError

from ..arguments.argument_types import S3Folder
from ..console.errors import BadInput, Refused
from ..console.terminal import log
from ..extras import require_extras

if TYPE_CHECKING:
    from tidemill.handler.aws.objects.result_store import Pack


class ResultFolder(Protocol):
    """Stored results of all scopes; methods raise CliError."""

    def totals(self) -> list[Totals]:
        """Return the totals of each model, the most recently used first."""

    def num_bytes(self) -> int:
        """Return the storage size of all results."""

    def remove(self, model: str | None, before: int | None) -> int:
        """Remove results of a model, or of all, last used before a time; return their number."""


@dataclass(frozen=True, slots=True)
class LocalResultFolder:
    """Results in the database of a local folder."""

    folder: Path

    def totals(self) -> list[Totals]:
        """Return the totals of each model, the most recently used first."""
        with self._opened() as database:
            return list_totals(database)

    def num_bytes(self) -> int:
        """Return the size of the database on disk."""
        return (self.folder / FILE_NAME).stat().st_size

    def remove(self, model: str | None, before: int | None) -> int:
        """Remove results of a model, or of all, last used before a time; return their number.

        A damaged database is deleted if all results are to be removed.
        """
        is_all = (model, before) == (None, None)
        try:
            with self._opened() as database:
                num_removed = remove_results(database, model=model, before=before)
                if is_all:
                    check_whole(database)
                return num_removed
        except BadInput as exc:
            if is_all and isinstance(exc.__cause__, CacheDamaged):
                return self._delete()
            raise

    def _delete(self) -> int:
        try:
            delete_database(self.folder)
        except OSError as exc:
            raise BadInput(f"{self.folder} cannot be emptied ({exc.strerror})") from exc
        log(f"note: the database of {self.folder} was damaged and was deleted")
        return 0

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        if not (self.folder / FILE_NAME).exists():
            raise Refused(
                f"{self.folder} does not contain results: pass the folder of `tidemill run --reuse`"
            )
        try:
            with closing(open_database(self.folder)) as database:
                yield database
        except CacheError as exc:
            raise BadInput(str(exc)) from exc


class BucketResultFolder:
    """Results in packs under a prefix; a pack is removed as a whole, by the time of its writing."""

    def __init__(self, where: S3Folder) -> None:
        require_extras(f"the bucket {where.bucket}", "cloud")
        from tidemill.handler.aws.bucket import Bucket
        from tidemill.handler.aws.sync import Aws

        self._where = where
        self._aws, self._bucket = Aws(), Bucket(where.bucket)

    def totals(self) -> list[Totals]:
        """Return the totals of each model, the most recently used first."""
        by_model: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for head, name in self._packs:
            by_model[name.model].append((name.num_results, head.num_bytes, head.modified))
        totals = [
            Totals(model, sum(counts), sum(sizes), max(times))
            for model, packs in by_model.items()
            for counts, sizes, times in [zip(*packs, strict=True)]
        ]
        return sorted(totals, key=lambda total: (-total.used, total.model))

    def num_bytes(self) -> int:
        """Return the size of the packs."""
        return sum(head.num_bytes for head, _ in self._packs)

    def remove(self, model: str | None, before: int | None) -> int:
        """Remove packs (of a model, or all) written before a time; return the number of results."""
        packs = [
            (head, name)
            for head, name in self._packs
            if model in {None, name.model} and (before is None or head.modified < before)
        ]
        with self._translated_errors():
            self._aws.run(self._bucket.delete_all([head.key for head, _ in packs]))
        return sum(name.num_results for _, name in packs)

    @cached_property
    def _packs(self) -> list[Pack]:
        from tidemill.handler.aws.objects.result_store import list_packs

        with self._translated_errors():
            return list_packs(self._aws.run, self._bucket, self._where.prefix)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        from tidemill.handler.errors import AwsError

        try:
            yield
        except AwsError as exc:
            raise BadInput(f"{self._where} cannot be read: {exc}") from exc


def result_folder(where: Path | S3Folder) -> ResultFolder:
    """Return the results of a folder."""
    return BucketResultFolder(where) if isinstance(where, S3Folder) else LocalResultFolder(where)
