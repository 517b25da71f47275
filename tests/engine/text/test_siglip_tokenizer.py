"""SigLIP's tokenizer from its SentencePiece model, without the library of that name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tidemill.engine.text.siglip_tokenizer import load_siglip_tokenizer
from tidemill.engine.text.vocabulary import load_vocabulary
from tidemill.protocol.contract import EngineError

PIECES = ["<pad>", "</s>", "<unk>", "▁a", "▁photo", "▁pho", "to", "▁of", "▁", "o", "s", "café"]
CONFIG = {"tokenizer_class": "SiglipTokenizer", "model_max_length": 64}


def message(number: int, content: bytes) -> bytes:
    """Return a field of bytes of a protocol buffer."""
    return bytes([number << 3 | 2, len(content)]) + content


def model(model_type: int = 1) -> bytes:
    """Return a SentencePiece model in which later pieces are less likely."""
    pieces = [
        message(1, message(1, piece.encode()) + b"\x15" + struct.pack("<f", -float(place)))
        for place, piece in enumerate(PIECES)
    ]
    return b"".join([*pieces, message(2, bytes([3 << 3, model_type])), message(3, b"")])


def folder_with(folder: Path, data: bytes, **config: object) -> str:
    """Return the name of a folder with a tokenizer."""
    (folder / "config.json").write_text('{"model_type": "siglip"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | config))
    (folder / "spiece.model").write_bytes(data)
    return str(folder)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a photo of photos", ["▁a", "▁photo", "▁of", "▁photo", "s"]),
        (" A, PHOTO:  of! (o) ", ["▁a", "▁photo", "▁of", "▁", "o"]),
        ("a\n\tphoto ▁of", ["▁a", "▁photo", "▁of"]),
        ("a z", ["▁a", "▁", "<unk>"]),
        ("", []),
    ],
)
def test_texts_are_read_as_the_model_was_trained(
    text: str, pieces: list[str], tmp_path: Path
) -> None:
    """They have the likeliest pieces, in lower case and without punctuation, and an end token."""
    vocabulary = load_vocabulary(folder_with(tmp_path, model()), tmp_path)
    assert vocabulary.backend.encode(text).ids == [*map(PIECES.index, pieces), 1]
    assert vocabulary.special_tokens["pad_token"] == "</s>"


def test_another_file_is_an_error(tmp_path: Path) -> None:
    """It names the file; that of another class is left to transformers."""
    for data in (model()[:-9], b"\xff" * 12, model(model_type=2), b""):
        name = folder_with(tmp_path, data)
        with pytest.raises(EngineError, match=r"spiece\.model is not a model of SentencePiece"):
            load_vocabulary(name, tmp_path)
    assert load_siglip_tokenizer(folder_with(tmp_path, b"", tokenizer_class="T5Tokenizer")) is None
