"""SigLIP's tokenizer, from the SentencePiece model that its first version was published with.

transformers' own class for it needs the sentencepiece library. Texts become lower case and lose
ASCII punctuation, as the model was trained.
"""

from __future__ import annotations

import json
import re
import string
import struct
from collections.abc import Iterator
from typing import Any

from tidemill.protocol.contract import EngineError

from ..storage.hub import find_file

_CLASS, _FILE = "SiglipTokenizer", "spiece.model"
_UNIGRAM = 1
# Wire types of protocol buffers.
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
# Fields of a SentencePiece model, of one of its pieces, of its trainer and of its normalizer.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE = 1, 2
_MODEL_TYPE, _CHARSMAP = 3, 2


def load_siglip_tokenizer(source: str) -> Any:
    """Return transformers' tokenizer of a folder or hub id; None if it is not SigLIP's first one.

    Raises `EngineError` for a broken file.
    """
    config = _config_of(source)
    if str(config.get("tokenizer_class")).removesuffix("Fast") != _CLASS:
        return None
    path = find_file(source, _FILE)
    if path is None:
        return None
    from transformers import PreTrainedTokenizerFast

    special = {
        name: _text_of(config.get(name), default)
        for name, default in (("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "</s>"))
    }
    try:
        backend = _backend(path.read_bytes(), **special)
    except (ValueError, IndexError, struct.error) as exc:
        raise EngineError(f"{source}: {_FILE} is not a model of SentencePiece: {exc}") from exc
    limit = config.get("model_max_length")
    lengths = {"model_max_length": limit} if isinstance(limit, int) else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **lengths)


def _config_of(source: str) -> dict[str, Any]:
    """Return the tokenizer's config, empty if transformers has to report a fault in it."""
    try:
        path = find_file(source, "tokenizer_config.json")
        config = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _text_of(token: object, default: str) -> str:
    """Return the text of a special token, which may be an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else default


def _backend(data: bytes, *, eos_token: str, unk_token: str, pad_token: str) -> Any:
    """Return the tokenizer of a SentencePiece model as one of the tokenizers library."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import Unigram
    from tokenizers.processors import TemplateProcessing

    vocabulary: list[tuple[str, float]] = []
    charsmap, model_type = b"", _UNIGRAM
    for number, value in _fields(data):
        if number == _PIECES:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(_SCORE, bytes(4)))
            vocabulary.append((piece[_TEXT].decode(), score))
        elif number == _TRAINER:
            model_type = dict(_fields(value)).get(_MODEL_TYPE, _UNIGRAM)
        elif number == _NORMALIZER:
            charsmap = dict(_fields(value)).get(_CHARSMAP, b"")
    ids = {text: token_id for token_id, (text, _) in enumerate(vocabulary)}
    if model_type != _UNIGRAM or not {eos_token, unk_token, pad_token} <= ids.keys():
        raise ValueError("it is not SigLIP's")
    tokenizer = Tokenizer(Unigram(vocabulary, ids[unk_token], byte_fallback=False))
    mapped = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
            normalizers.Replace("▁", " "),
            *mapped,
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {eos_token}",
        pair=f"$A {eos_token} $B {eos_token}",
        special_tokens=[(eos_token, ids[eos_token])],
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(text, lstrip=True, rstrip=True, normalized=False, special=True)
            for text in dict.fromkeys((eos_token, unk_token, pad_token))
        ]
    )
    return tokenizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protocol buffers: their numbers, and integers or bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        sizes = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
        if kind == _BYTES:
            size, place = _varint(data, place)
        elif (size := sizes.get(kind, 0)) == 0:
            raise ValueError(f"it has an unknown field type {kind}")
        if place + size > len(data):
            raise ValueError("it is truncated")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return an integer of variable length, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:  # the highest bit says that another byte follows
            return value, place
