"""Digest of everything that affects a model's results: files, machine, packages and settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Final

from ..config import EngineConfig
from ..errors import ModelRefused
from .disk_cache import CacheEntry, package_versions
from .gguf.unpacked import description_folder
from .hub import local_source, snapshot_commit
from .processor import cpu_lines, gpu_lines

_new_digest = partial(blake2b, digest_size=20)
_PACKAGES: Final = ("torch", "transformers", "tokenizers", "numba", "triton", "gguf")

_SPEED_ONLY: Final = frozenset(
    {
        *("model", "lora_modules", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory"),
        *("steps_ahead", "admission", "deduplication", "kv_forecast", "max_loras"),
        *("max_logprobs", "speculative_decoding", "read_object"),
    }
)
"""Settings that do not affect results, or that are included separately."""

_MODEL_SUFFIXES: Final = frozenset(
    {".gguf", ".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"}
)
_MODEL_FILES: Final = frozenset({"artifact.metadata", "colbert_linear.pt", "sparse_linear.pt"})
"""Other files: the settings of ColBERT and the heads of BGE-M3."""

_RUN_CARD: Final = ".card.json"
_WHOLE_BYTES: Final = 4 * 2**20
_HEAD_BYTES: Final = 2**16
_NUM_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 2**12


def results_digest(config: EngineConfig, chat_template: str | None, created: int) -> bytes | None:
    """Return the digest of everything that affects results except requests; None without the files.

    Nothing is loaded for it. A template that uses the date has a new digest each day.
    """
    sources = [
        local_source(config.model),
        *(local_source(each.path) for each in config.lora_modules),
    ]
    causes = [package_versions(*_PACKAGES), chat_template or ""]
    causes += [os.environ.get("CUDA_VISIBLE_DEVICES", ""), *gpu_lines(), *cpu_lines()]
    causes += [
        f"{setting.name}={getattr(config, setting.name)!r}"
        for setting in fields(config)
        if setting.name not in _SPEED_ONLY
    ]
    names = ["", *(each.name for each in config.lora_modules)]
    for name, source in zip(names, sources, strict=True):
        if source is None:
            return None
        # A snapshot may have several GGUF files, which its commit does not distinguish.
        commit = None if source.is_file() else snapshot_commit(source)
        causes += [name, commit or files_digest(source)]
    if any(_uses_date(each) for each in (chat_template, *template_texts(sources[0]))):
        causes.append(datetime.fromtimestamp(created, UTC).date().isoformat())
    return bytes.fromhex(CacheEntry.from_inputs("results", *causes).digest)


def template_texts(source: Path | None) -> Iterator[str]:
    """Yield the texts that may contain a model's chat template."""
    folder = source
    if source is not None and source.is_file():
        try:
            folder = description_folder(source)
        except ModelRefused:  # reported by the load
            folder = None
    for pattern in ("*.jinja", "tokenizer_config.json", "chat_template.json"):
        for path in folder.glob(pattern) if folder else ():
            yield path.read_text(encoding="utf-8", errors="replace")


def _uses_date(template: str | None) -> bool:
    return "strftime_now" in (template or "")


def files_digest(folder: Path) -> str:
    """Return the digest of a folder's files, each read again only after a change.

    For a GGUF file it is the digest of its bytes.
    """
    if folder.is_file():
        return _file_digest(folder)
    digest = _new_digest()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name} {_file_digest(path)}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def sampled_digest(folder: Path) -> str | None:
    """Return the digest of a model's files, large ones by samples; None if one is unreadable.

    It does not depend on the files' location, and reads some hundred kilobytes of each large one:
    its first 64 KiB, which contain the header of safetensors, and 64 pieces of 4 KiB up to its end.
    A GGUF file is digested without its name.
    """
    digest = _new_digest()
    paths = [folder] if folder.is_file() else folder.rglob("*")
    try:
        for path in sorted(paths, key=lambda path: path.relative_to(folder).parts):
            name = path.relative_to(folder)
            is_hidden = any(part.startswith(".") for part in name.parts)
            is_of_run = path.name.endswith(_RUN_CARD)  # of rows that were written to the folder
            is_model = path.suffix.lower() in _MODEL_SUFFIXES or path.name in _MODEL_FILES
            if not is_model or is_hidden or is_of_run or not path.is_file():
                continue
            size = path.stat().st_size
            digest.update(f"{name.as_posix()} {size}\n".encode(errors="surrogatepass"))
            with path.open("rb") as file:
                if size <= _WHOLE_BYTES:
                    digest.update(file.read())
                    continue
                digest.update(file.read(_HEAD_BYTES))
                last = size - _SAMPLE_BYTES
                for number in range(1, _NUM_SAMPLES + 1):
                    file.seek(last * number // _NUM_SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    status = path.stat()
    identity = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
    entry = CacheEntry.from_inputs("file-digest", str(path.absolute()), identity)
    if (cached := entry.load()) is not None:
        return cached.decode()
    with path.open("rb") as file:
        digest = file_digest(file, _new_digest).hexdigest()
    entry.save(digest.encode())
    return digest
