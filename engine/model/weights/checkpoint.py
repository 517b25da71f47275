"""A model's weights: safetensors inside its folder, and complete.

An index, a link and a config are untrusted text that came with the model. They do not decide which
files are read: every file is checked before it is read, and its content before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import ModelRefused
from ...storage.gguf.unpacked import unpack_weights
from ...storage.hub import find_file, find_gguf, is_nested
from ..config.hf_config import ADAPTER
from ..load_timing import downloading
from .quantised.quantization_config import QuantizationConfig

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# transformers would read these files by separate code, whatever other files exist.
DISTRIBUTED = "shard-*-model-*-of-*.safetensors"
# Formats of weights that are not read, and the libraries that only read theirs.
OTHERS = {
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.safetensors"), ""),
    **dict.fromkeys(("*.onnx", "onnx/*.onnx"), "ONNX"),
    "*.h5": "TensorFlow",
    "*.msgpack": "Flax",
    "*.nemo": "NeMo",
    "*.npz": "MLX",
    "openvino_*.xml": "OpenVINO",
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
NAMED = 3
# The first words of the names of heads for pre-training, and of the pooler of a first token.
_PRETRAINING = frozenset(
    """
    cls discriminator_predictions generator_lm_head generator_predictions lm_head lm_predictions
    mask_predictions pooler pred_layer predictions sop_classifier vocab_layer_norm vocab_projector
    vocab_transform
    """.split()
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The folder of the model `name`, from which it may be loaded, and its weight files.

    Without a `quantisation` these must be plain numbers. The names of the network's tensors begin
    with `prefix`, if the files contain another part of the model.
    """

    name: str
    folder: Path
    files: tuple[Path, ...]
    num_bytes: int
    quantization: QuantizationConfig | None = None
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class LoadingInfo:
    """Loading info: the keys that a network lacks, and stored ones that it has no place for.

    `mismatched` have another shape: the name, the stored shape, and the required one.
    """

    missing: Collection[str]
    unexpected: Collection[str]
    mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]


def find_checkpoint(name: str, quantization: QuantizationConfig | None = None) -> Checkpoint:
    """Return the weights of a folder or hub id, fetched if need be; `ModelRefused` explains errors.

    Weights of a GGUF file are dequantized unless that was done before.
    """
    if (gguf := find_gguf(name)) is not None:
        folder, _ = unpack_weights(gguf)
    else:
        folder = Path(name) if Path(name).is_dir() else _fetched(name)
    if (folder / ADAPTER).exists():
        raise ModelRefused(
            f"{name} contains {ADAPTER}: pass its base model with --model and this adapter with "
            "--lora-modules, or merge it into the weights."
        )
    if any(folder.glob(DISTRIBUTED)):
        raise ModelRefused(
            f"{name} is a distributed checkpoint: merge its shards and save it in one set of "
            "weights."
        )
    files = _files(name, folder)
    for path in files:
        _check_file(name, path, quantization)
    num_bytes = sum(path.stat().st_size for path in files)
    prefix = "encoder." if is_nested(folder) else ""
    return Checkpoint(name, folder, tuple(files), num_bytes, quantization, prefix)


def find_part(name: str, file: str) -> Checkpoint:
    """Return the weights of a model's part that has its own file, with the checks of a model."""
    path = find_file(name, file)
    if path is None:
        raise ModelRefused(f"{name} lacks {file}: copy or fetch the model again.")
    check_inside(name, "model", path.parent, file)
    _check_file(name, path, None)
    return Checkpoint(name, path.parent, (path,), path.stat().st_size)


def check_count(checkpoint: Checkpoint, num_weights: int) -> None:
    """Refuse a network with more weights than the files have bytes."""
    if num_weights > checkpoint.num_bytes:
        raise ModelRefused(
            f"{checkpoint.name}: config.json describes {num_weights:,} weights, but the files "
            f"contain {checkpoint.num_bytes:,} bytes: one of the two belongs to another model, or "
            "a file is missing."
        )


def check_kind(name: str, key: str, kind: str, kinds: Collection[str] = FLOATS) -> None:
    """Refuse a weight that is not stored as plain numbers or in a required dtype."""
    if kind in kinds:
        return
    if kinds is not FLOATS:
        raise ModelRefused(f"{name}: {key} is stored as {kind}, but must be {' or '.join(kinds)}.")
    raise ModelRefused(
        f"{name}: {key} is stored as {kind}: quantised weights without a quantization_config in "
        "config.json are not supported; use the unquantised model."
    )


def check_tensors(
    name: str,
    needs: str,
    modules: Collection[str],
    base: str,
    found: LoadingInfo,
    *,
    is_multimodal: bool,
) -> None:
    """Refuse a network with missing weights, or whose files have weights that it does not use.

    `needs` is its name, `modules` the names of its modules, `base` the one of all but its head.
    `is_multimodal` means that the files contain more than text, which is left out.
    """
    missing, others = sorted(found.missing), sorted(found.unexpected)
    if missing:
        instead = f" (they contain {some(others)} instead)" if others else ""
        raise ModelRefused(
            f"{name}: its weights lack {some(missing)}, which {needs} needs{instead}: a file is "
            "missing, tensors have another prefix, or config.json belongs to another model."
        )
    check_shapes(name, needs, found.mismatched)
    if needed := _needed(others, modules, base, is_multimodal=is_multimodal):
        raise ModelRefused(
            f"{name}: its weights contain {some(needed)}, which {needs} does not use: without them "
            "its answers would be wrong. config.json belongs to another model, or the weights are "
            "quantised."
        )


def check_token_head(name: str, needs: str, base: str, unexpected: Iterable[str]) -> None:
    """Refuse a token classifier whose files have another layer after its network `base`.

    A CRF or LSTM, for example: without it the labels would be wrong.
    """
    others = sorted(key for key in unexpected if key.partition(".")[0] not in {base, *_PRETRAINING})
    if others:
        raise ModelRefused(
            f"{name}: its weights contain {some(others)}, which {needs} does not use: without "
            "them its labels would be wrong. Token classifiers with other layers than "
            "transformers' (such as a CRF or an LSTM) are not supported."
        )


def check_shapes(
    name: str, needs: str, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Refuse a network with weights of other shapes, as in `LoadingInfo`."""
    if mismatched:
        shapes = [
            f"{key} {[*stored]} instead of {[*wanted]}"
            for key, stored, wanted in sorted(mismatched)
        ]
        raise ModelRefused(
            f"{name}: the shapes of its weights do not match {needs} with its config.json: "
            f"{some(shapes)}; one of the two belongs to another model."
        )


@downloading()
def _fetched(name: str) -> Path:
    """Return the hub's snapshot of a model on this machine, after fetching its weights."""
    first = find_file(name, WHOLE) or find_file(name, INDEX)
    if first is None:
        raise _holds_neither(name, {})
    folder = first.parent
    if first.name == INDEX:
        files = _indexed(name, folder)
        if not all(os.path.isfile(folder / file) for file in files):  # noqa: PTH113 - it never raises
            from transformers.utils.hub import cached_files

            cached_files(name, files, revision=folder.name)
    return folder


def _files(name: str, folder: Path) -> list[Path]:
    """Return the weight files in transformers' order of preference, each inside the folder."""
    if (folder / WHOLE).exists():
        files = [WHOLE]
    elif (folder / INDEX).exists():
        files = _indexed(name, folder)
    else:
        others = {
            path.relative_to(folder).as_posix(): library
            for kind, library in OTHERS.items()
            for path in folder.glob(kind)
        }
        raise _holds_neither(name, others)
    if lost := [file for file in files if not os.path.isfile(folder / file)]:  # noqa: PTH113 - it never raises
        raise ModelRefused(
            f"{name} lacks {lost[0]} ({len(lost)} of the {len(files)} weight files): copy or fetch "
            "the model again."
        )
    for file in files:
        check_inside(name, "model", folder, file)
    return [folder / file for file in files]


def check_inside(name: str, kind: str, folder: Path, file: str) -> None:
    """Refuse a file of a model or an adapter that is a link to a place outside its folder."""
    path = (folder / file).resolve()
    if not any(path.is_relative_to(root) for root in _roots(folder.resolve())):
        raise ModelRefused(
            f"{name}: {file} links to {path}, outside the {kind}'s folder, which is not allowed: "
            "copy the file itself into the folder."
        )


def missing_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the weight files that a folder lacks."""
    if (folder / WHOLE).exists():
        return ()
    if not (folder / INDEX).exists():
        return (f"{WHOLE} or {INDEX}",)
    try:
        return tuple(file for file in _indexed("", folder) if not (folder / file).exists())
    except ModelRefused:  # reported by `find_checkpoint`
        return ()


def _indexed(name: str, folder: Path) -> list[str]:
    """Return the files in the index, all of them safetensors by relative paths in the folder."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
        files = sorted(set(index["weight_map"].values()))
        index["metadata"].keys()  # transformers requires it
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise ModelRefused(
            f"{name}: {INDEX} is not a valid weight index: copy or fetch it again."
        ) from exc
    for file in files:
        path = PurePosixPath(str(file))
        if (
            not isinstance(file, str)
            or path.suffix != ".safetensors"
            or path.is_absolute()
            or ".." in path.parts
        ):
            raise ModelRefused(
                f"{name}: {INDEX} names {file!r}: only .safetensors files inside the model's "
                "folder are read."
            )
    if not files:
        raise ModelRefused(f"{name}: {INDEX} does not name any file.")
    return files


def _roots(folder: Path) -> list[Path]:
    """Return where a folder's files may be: in it, or in the blobs of the hub's cache.

    The folder is a snapshot of that cache, or is inside one.
    """
    for snapshots in folder.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return [folder, repository / "blobs", repository.parent / "blobs"]
    return [folder]


def _check_file(name: str, path: Path, quantization: QuantizationConfig | None) -> None:
    """Refuse a truncated file, one that is not safetensors, and weights in special formats."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            stored = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as exc:
        raise ModelRefused(
            f"{name}: {path.name} is truncated or not a safetensors file ({exc}): copy or fetch it "
            "again."
        ) from exc
    formats = () if quantization is None else quantization.weight_formats
    kinds = {
        kind
        for name, kinds in (weight_format.main_tensor for weight_format in formats)
        for kind in kinds
        if name == "weight"
    }
    # Masks and ids may have any dtype, because they are not multiplied.
    for key, kind in stored.items():
        if key.rpartition(".")[2] == "weight" and kind not in kinds:
            check_kind(name, key, kind)


def _needed(
    tensors: Iterable[str], modules: Collection[str], base: str, *, is_multimodal: bool
) -> list[str]:
    """Return those unused tensors whose names are inside a module that the network has.

    Others belong to training heads and, in multimodal models, to towers.
    """
    outermost = {"", base} if is_multimodal else {""}

    def innermost(tensor: str) -> str:
        path = tensor.rpartition(".")[0]
        while path not in modules:
            path = path.rpartition(".")[0]
        return path

    return [
        tensor
        for tensor in tensors
        if innermost(tensor) not in outermost
        # A bare base model's weights have the same names without its prefix.
        or innermost(f"{base}.{tensor}") not in {"", base}
    ]


def some(items: list[str]) -> str:
    """Return the first of some names and the number of the others."""
    more = len(items) - NAMED
    return ", ".join(items[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _holds_neither(name: str, others: Mapping[str, str]) -> ModelRefused:
    """Return the refusal of a folder whose weights are others, by their library's name."""
    libraries = {*others.values()}
    others_note = f" (it contains {some(sorted(others))})" if others else ""
    how = "convert it with transformers' save_pretrained"
    if libraries and "" not in libraries:
        how = f"these are for {min(libraries)}: use the version of the model in safetensors"
    return ModelRefused(
        f"{name} has neither {WHOLE} nor {INDEX}{others_note}: other weight formats are not "
        f"supported; {how}."
    )
