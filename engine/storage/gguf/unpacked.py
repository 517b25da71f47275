"""Unpacked GGUF files: folders in transformers' format in the weights cache, created once.

A file has the folder `<cache>/gguf/<name>-<digest>`. The description (config and tokenizer) is
written at first use, the weights at the first load. The digest covers the file's path, size and
modification time, and the unpacking code: a changed file is unpacked again.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from threading import get_ident
from typing import Final

from tidemill.protocol.gguf_names import SUFFIX, gguf_names, is_part

from ...errors import ModelRefused
from ..disk_cache import MAX_AGE_SECONDS, folder_digest, package_versions

WEIGHTS_VARIABLE: Final = "TIDEMILL_WEIGHTS_CACHE"
"""The path of the weights cache, which also contains weights from S3."""

_CONFIG: Final = "config.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PARTIAL: Final = ".partial-"
_LOCK: Final = ".lock"
_MAX_NAME: Final = 60


def gguf_file(model: str) -> Path | None:
    """Return the GGUF file of a model: the file itself, or the only one of a folder without others.

    Raises `ModelRefused` for a folder with several.
    """
    if model.lower().endswith(SUFFIX):
        return Path(model) if os.path.isfile(model) else None  # noqa: PTH113 - it never raises
    if not os.path.isdir(model):  # noqa: PTH112 - it never raises
        return None
    folder = Path(model)
    if any((folder / name).exists() for name in (_WEIGHTS, _INDEX)):
        return None
    name = only_name(model, [path.name for path in folder.iterdir()])
    return None if name is None else folder / name


def only_name(model: str, names: Iterable[str]) -> str | None:
    """Return the name of the only GGUF file among a model's files; reject several.

    Image projectors, which are stored next to a text model, do not count.
    """
    files = gguf_names(names)
    if len(files) > 1 and not all(map(is_part, files)):
        raise ModelRefused(
            f"{model} has {len(files)} GGUF files ({', '.join(files[:3])}"
            f"{', …' if len(files) > 3 else ''}): choose one, and pass its path to --model."
        )
    return files[0] if files else None


def description_folder(file: Path) -> Path:
    """Return the folder with the config and the tokenizer of a GGUF file, created if needed.

    Raises `ModelRefused` for an unsupported file.
    """
    status = file.stat()
    identity = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
    digest = blake2b(digest_size=8)
    for cause in (str(file.absolute()), identity, _version()):
        digest.update(f"{cause}\n".encode(errors="surrogatepass"))
    name = re.sub(r"[^\w.-]+", "-", file.stem)[:_MAX_NAME]
    folder = _home() / f"{name}-{digest.hexdigest()}"
    if not (folder / _CONFIG).exists():
        _describe(file, folder)
    return folder


@cache
def _version() -> str:
    """Return a version of the unpacking code."""
    return f"{folder_digest(Path(__file__).parent)} {package_versions('gguf', 'tokenizers')}"


def _home() -> Path:
    """Return the folder of all unpacked files."""
    named = os.environ.get(WEIGHTS_VARIABLE)
    cache = Path(named).absolute() if named else Path.home() / ".cache" / "tidemill" / "weights"
    return cache / "gguf"


def _remove_old(folder: Path) -> None:
    oldest = time.time() - MAX_AGE_SECONDS
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def _describe(file: Path, folder: Path) -> None:
    """Write the description of a file, config.json last: it marks a complete one."""
    from .families import list_weights, make_config
    from .header import read_header
    from .tensors import check_types
    from .tokenizers import config_text, make_tokenizer

    header = read_header(file)
    config = make_config(header)
    list_weights(header)
    check_types(header, file.stat().st_size)
    tokenizer = make_tokenizer(header)
    ends = list(tokenizer.end_ids)
    config |= {
        "bos_token_id": tokenizer.ids.get("bos"),
        "eos_token_id": ends or None,
        "pad_token_id": tokenizer.ids.get("pad"),
    }
    texts = {
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": config_text(tokenizer.tokenizer_config),
        "generation_config.json": config_text({"eos_token_id": ends} if ends else {}),
        _CONFIG: config_text(config),
    }
    if tokenizer.chat_template is not None:
        texts = {"chat_template.jinja": tokenizer.chat_template, **texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old(folder.parent)
        for name, text in texts.items():
            partial = folder / f"{_PARTIAL}{os.getpid()}-{get_ident()}-{name}"
            partial.write_text(text, encoding="utf-8", errors="surrogatepass")
            partial.replace(folder / name)
    except OSError as exc:
        raise _not_written(file, folder, exc) from exc


def has_weights(file: Path) -> bool:
    """Return whether the weights of a GGUF file are unpacked already."""
    return (description_folder(file) / _WEIGHTS).exists()


def unpack_weights(file: Path) -> tuple[Path, str | None]:
    """Return the folder of a GGUF file with its weights, and a note if they were created now.

    If another process is creating them, this waits. Raises `ModelRefused` if that is impossible.
    """
    from .families import list_weights
    from .header import read_header
    from .safetensors_writer import num_bytes, write_safetensors

    folder = description_folder(file)
    target = folder / _WEIGHTS
    if target.exists():
        with suppress(OSError):
            os.utime(folder)
        return folder, None
    header = read_header(file)
    weights = list_weights(header)
    needed = num_bytes(header, weights)
    try:
        with _locked(folder / _LOCK):
            if target.exists():
                return folder, None
            _check_space(file, folder, needed)
            began = time.monotonic()
            partial = folder / f"{_PARTIAL}{_WEIGHTS}"
            write_safetensors(header, weights, partial)
            partial.replace(target)
    except OSError as exc:
        raise _not_written(file, folder, exc) from exc
    return folder, (
        f"dequantized {file.stat().st_size / 1e9:.2f} GB of GGUF to {needed / 1e9:.2f} GB of "
        f"weights in {time.monotonic() - began:.1f} s, stored in {folder}"
    )


def _check_space(file: Path, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelRefused(
            f"{file}: the dequantized weights need {needed / 1e9:.1f} GB on disk, and {folder} has "
            f"{free / 1e9:.1f} GB free: free some, or set --weights-cache to another folder."
        )


def _not_written(file: Path, folder: Path, exc: OSError) -> ModelRefused:
    return ModelRefused(
        f"{file} cannot be unpacked into {folder}: {exc.strerror or exc}. Set --weights-cache "
        "to another folder."
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which ends with the process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
