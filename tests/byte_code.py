"""Byte code of test files, written once for all processes of a distributed run.

Without it, each process would rewrite the assertions of every new or changed file itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest


def find_test_files(arguments: Iterable[str]) -> Iterator[Path]:
    """Yield the absolute paths of the test files of pytest's arguments: folders, files or tests."""
    for argument in arguments:
        path = Path(argument.partition("::")[0]).absolute()
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


def write_byte_code(files: Iterable[Path], config: pytest.Config) -> None:
    """Write the byte code that pytest would write at the import of each file.

    It uses pytest's internals; whatever fails is left to the processes.
    """
    try:
        from _pytest.assertion import rewrite  # another version may not have it

        state = config.stash.get(rewrite.assertstate_key, None)
    except (ImportError, AttributeError):
        return
    if state is None:
        return
    for file in files:
        try:
            folder = rewrite.get_cache_dir(file)
            target = folder / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, target) is None and rewrite.try_makedirs(folder):
                source_hash, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, source_hash, target)
        except Exception:  # noqa: BLE001, S112 - the collection reports errors of the file
            continue
