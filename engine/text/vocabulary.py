"""Vocabulary: the used parts of transformers' tokenizer, cached on disk.

transformers always builds the same tokenizer from the same files, but takes seconds to import and
to read a large vocabulary. Its exact result for these files comes from the cache. A tokenizer that
only transformers can run is never cached, and neither is a failure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tidemill.protocol.contract import EngineError

from ..errors import first_line_of
from ..storage.disk_cache import CacheEntry, package_versions
from ..storage.hub import file_origin, tokenizer_source
from .siglip_tokenizer import load_siglip_tokenizer
from .token_bytes import decoder_kind

# Packages that affect, in addition to the files, the result of transformers.
_PACKAGES = (
    "transformers",
    "tokenizers",
    "sentencepiece",
    "protobuf",
    "tiktoken",
    "mistral_common",
)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_OTHER_FORMATS = {"tekken.json": "Mistral's", "tokenizer.model": "SentencePiece's"}
_TEMPLATES = "additional_chat_templates"
# Both contain arguments of the tokenizer's class, which may be paths of files.
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_PATHS = {"vocab", "merges", "init_inputs"}
# Old configs contain its path on another machine; it is not read.
_UNREAD_FILE = "special_tokens_map_file"
# Files that transformers fetches from the hub, but does not require.
_FETCHED = (*_CONFIGS, "tokenizer.json", "added_tokens.json", "chat_template.jinja")
_MAX_FILES_BYTES = 2**28
# Without a vocabulary file, transformers invents one of special tokens, and a space or two.
_FEWEST_LEARNT = 3


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizer: `backend` is that of the tokenizers library, None for a slow tokenizer.

    `highest_id` is the highest id of the vocabulary except `added` tokens, which are a table of
    texts by id; -1 for a slow tokenizer. `special_tokens` has the names that templates use.
    `pretrained` is transformers' own tokenizer, None for one from the cache.
    """

    backend: Any
    highest_id: int
    added: dict[int, str]
    special_ids: frozenset[int]
    special_tokens: dict[str, str]
    eos_id: int | None
    chat_template: Any
    pretrained: Any = None


def recall_vocabulary(model: str, folder: Path | None) -> Vocabulary | None:
    """Return the cached vocabulary of a model folder's tokenizer files, if there is one."""
    fact = _fact_of(*tokenizer_source(model, folder))
    data = None if fact is None else fact.load()
    return None if data is None else _unpacked(data)


def load_vocabulary(model: str, folder: Path | None) -> Vocabulary:
    """Load the vocabulary of a folder or hub id with transformers, and cache it if possible.

    `folder` contains its files. Remote code is never run. Raises `EngineError`.
    """
    from transformers import AutoTokenizer

    source, folder = tokenizer_source(model, folder)
    fact = _fact_of(source, folder)
    try:
        pretrained = load_siglip_tokenizer(source)
        if pretrained is None:
            pretrained = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except EngineError:
        raise
    except BaseException as exc:
        reraise_unless_broken(exc)
        raise EngineError(
            f"{model} has no tokenizer that can be loaded: {_reason(folder) or first_line_of(exc)}"
        ) from exc
    try:
        vocabulary = vocabulary_of(pretrained)
    except BaseException as exc:
        reraise_unless_broken(exc)
        raise EngineError(f"{model}: the tokenizer does not work: {first_line_of(exc)}") from exc
    if not _is_learnt(vocabulary) and not _has_files(pretrained, folder):
        reason = _reason(folder) or "none of its files contains a vocabulary."
        raise EngineError(f"{model} has no tokenizer that can be loaded: {reason}")
    if fact is not None and fact == _fact_of(source, folder):
        _remember(fact, vocabulary)
    return vocabulary


def _reason(folder: Path | None) -> str | None:
    """Return why a folder's only tokenizer file cannot be read; None if it has none or others."""
    if folder is None or (folder / "tokenizer.json").is_file():
        return None
    for name, whose in _OTHER_FORMATS.items():
        if (folder / name).is_file():
            return (
                f"it has only {name}, in {whose} format: fetch tokenizer.json from the same "
                "repository, or from a version of the model in transformers' format."
            )
    return None


def vocabulary_of(pretrained: Any) -> Vocabulary:
    """Return the vocabulary of transformers' tokenizer, which never truncates from now on."""
    backend, highest_id = getattr(pretrained, "backend_tokenizer", None), -1
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        highest_id = max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
    added = pretrained.added_tokens_decoder
    return Vocabulary(
        backend=backend,
        highest_id=highest_id,
        added={int(token_id): str(token) for token_id, token in added.items()},
        special_ids=frozenset(
            [int(token_id) for token_id, token in added.items() if token.special]
            + [token_id for token_id in pretrained.all_special_ids if token_id is not None]
        ),
        special_tokens=dict(pretrained.special_tokens_map),
        eos_id=getattr(pretrained, "eos_token_id", None),
        chat_template=getattr(pretrained, "chat_template", None),
        pretrained=pretrained,
    )


def reraise_unless_broken(exc: BaseException) -> None:
    """Reraise exceptions not caused by broken files; tokenizers' panics are not `Exception`s."""
    if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
        raise exc


def _is_learnt(vocabulary: Vocabulary) -> bool:
    """Return whether there are tokens in addition to those of the tokenizer's class."""
    if vocabulary.backend is None:
        return True
    ids = set(vocabulary.backend.get_vocab(with_added_tokens=False).values())
    return len(ids - vocabulary.added.keys() - vocabulary.special_ids) >= _FEWEST_LEARNT


def _has_files(pretrained: Any, folder: Path | None) -> bool:
    """Return whether a vocabulary file of the tokenizer's class exists."""
    names = pretrained.vocab_files_names.values()
    return folder is not None and any((folder / name).is_file() for name in names)


def _fact_of(model: str, folder: Path | None) -> CacheEntry | None:
    """Return the cache entry of the tokenizer that transformers builds from a folder's files.

    `model` counts, as some names are read differently. None if the set of read files is unknown, or
    more of them may come from the hub.
    """
    source = None if folder is None else file_origin(model, folder, _FETCHED)
    if folder is None or source is None:
        return None
    try:
        files = dict(_files_in(folder))
        if not files or any(_may_read_others(files.get(name)) for name in _CONFIGS):
            return None
    except (OSError, ValueError, RecursionError):
        return None
    causes = [part for name, data in files.items() for part in (name, data)]
    return CacheEntry.from_inputs(
        "tokenizer", package_versions(*_PACKAGES), source, model, str(folder), *causes
    )


def _remember(fact: CacheEntry, vocabulary: Vocabulary) -> None:
    """Cache a vocabulary, if it survives the round trip."""
    if decoder_kind(vocabulary.backend) is None:
        return  # its texts are assembled by transformers
    try:
        data = _packed(vocabulary)
        again = _unpacked(data)
        is_whole = again.backend.to_str() == vocabulary.backend.to_str()
    except BaseException as exc:  # noqa: BLE001 - some have parts that cannot be serialized
        reraise_unless_broken(exc)
        return
    if is_whole and again == replace(vocabulary, backend=again.backend, pretrained=None):
        fact.save(data)


def _files_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield all possible tokenizer files; raise ValueError if they are too large."""
    num_bytes = 0
    for path in sorted([*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")]):
        if path.suffix in _WEIGHTS or not path.is_file():
            continue
        num_bytes += path.stat().st_size
        if num_bytes > _MAX_FILES_BYTES:
            raise ValueError(f"{folder} contains more than a tokenizer")
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def _may_read_others(data: bytes | None) -> bool:
    """Return whether a config contains paths of files, which may be anywhere."""
    config = json.loads(data or b"{}")
    return not isinstance(config, dict) or any(
        ("_file" in key or key in _PATHS) and key != _UNREAD_FILE and config[key] for key in config
    )


def _packed(vocabulary: Vocabulary) -> bytes:
    facts = {
        "highest_id": vocabulary.highest_id,
        "added": sorted(vocabulary.added.items()),
        "special_ids": sorted(vocabulary.special_ids),
        "special_tokens": vocabulary.special_tokens,
        "eos_id": vocabulary.eos_id,
        "chat_template": vocabulary.chat_template,
        "encode_special_tokens": vocabulary.backend.encode_special_tokens,
    }
    backend: str = vocabulary.backend.to_str()
    return json.dumps(facts).encode() + b"\n" + backend.encode()


def _unpacked(data: bytes) -> Vocabulary:
    from tokenizers import Tokenizer

    facts, backend = data.split(b"\n", 1)
    fields = json.loads(facts)
    tokenizer = Tokenizer.from_buffer(backend)
    tokenizer.encode_special_tokens = fields.pop("encode_special_tokens")  # to_str omits it
    return Vocabulary(
        **{
            **fields,
            "added": dict(fields["added"]),
            "special_ids": frozenset(fields["special_ids"]),
        },
        backend=tokenizer,
    )
