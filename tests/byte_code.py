"""Byte code of test files, written once for all processes of a distributed run.

Without it, each process would rewrite the assertions of every new or changed file itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def find_test_files(arguments: Iterable[str]) -> Iterator[Path]:
    """Yield the test files of pytest's arguments: folders, files or tests."""
    for argument in arguments:
        path = Path(argument.partition("::")[0])
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


def write_byte_code(files: Iterable[Path], config: pytest.Config) -> None:
    """Write the byte code that pytest would write at the import of each file."""
    state = config.stash[rewrite.assertstate_key]
    for file in files:
        folder = rewrite.get_cache_dir(file)
        target = folder / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, target) is None and rewrite.try_makedirs(folder):
            with suppress(OSError, SyntaxError):  # the collection reports it
                source_hash, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, source_hash, target)
