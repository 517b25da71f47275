"""Archives for Lambda that are the same for the same files, wherever and whenever they are made."""

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
            # Of files that a builder alone may read Lambda would read none.
            entry.external_attr = 0o100644 << 16
            entry.compress_type = ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
