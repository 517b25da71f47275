"""Reproducible archives for Lambda: the same files give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo


def zip_folder(
    folder: Path,
    target: Path,
    *,
    leaves_out: Callable[[Path], bool] = lambda _: False,
    compresslevel: int | None = None,
) -> None:
    """Write the files of a folder, except those whose relative path is to be left out."""
    with ZipFile(target, "w", ZIP_DEFLATED, compresslevel=compresslevel) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if leaves_out(name := path.relative_to(folder)):
                continue
            entry = ZipInfo(str(name))
            # Lambda could not read files that only their owner may read.
            entry.external_attr = 0o100644 << 16
            entry.compress_type = ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
