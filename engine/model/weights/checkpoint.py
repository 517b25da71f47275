"""A model's weights: safetensors inside its folder, and all of them that the model needs.

An index, a link and a config are text that came with the model. None of them decides what is read:
every file is looked at before anything is read from it, and what was read before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import ModelRefused
from ...storage.gguf.unpacked import unpack_weights
from ...storage.hub import find_file, find_gguf
from ..config.hf_config import ADAPTER
from ..load_timing import downloading
from .quantised.quantization_config import QuantizationConfig

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# transformers would read these files by a path of its own, whatever else lies beside them.
DISTRIBUTED = "shard-*-model-*-of-*.safetensors"
# Of weights that are not read.
OTHERS = ("*.bin", "*.pt", "*.pth", "*.safetensors")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
NAMED = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The folder of the model `name`, from which it may be loaded, and its files of weights.

    Without a `quantisation` these are plain numbers, and stay so.
    """

    name: str
    folder: Path
    files: tuple[Path, ...]
    num_bytes: int
    quantization: QuantizationConfig | None = None


@dataclass(frozen=True, slots=True)
class LoadingInfo:
    """Loading info: the keys that a network lacks, and stored ones that it has no place for.

    `mismatched` are of another shape: name, the shape that is stored, the one that is needed.
    """

    missing: Collection[str]
    unexpected: Collection[str]
    mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]


def find_checkpoint(name: str, quantization: QuantizationConfig | None = None) -> Checkpoint:
    """Return the weights of a folder or hub id, fetched if need be; `ModelRefused` says why not.

    Those of a GGUF file are dequantized where that was not done before.
    """
    if (gguf := find_gguf(name)) is not None:
        folder, _ = unpack_weights(gguf)
    else:
        folder = Path(name) if Path(name).is_dir() else _fetched(name)
    if (folder / ADAPTER).exists():
        raise ModelRefused(
            f"{name} holds {ADAPTER}: adapters are not applied unasked; name its model by --model, "
            "and this by --lora-modules, or merge it into the weights."
        )
    if any(folder.glob(DISTRIBUTED)):
        raise ModelRefused(f"{name} is a distributed checkpoint: save it as one model's weights.")
    files = _files(name, folder)
    for path in files:
        _check_file(name, path, quantization)
    num_bytes = sum(path.stat().st_size for path in files)
    return Checkpoint(name, folder, tuple(files), num_bytes, quantization)


def check_count(checkpoint: Checkpoint, num_weights: int) -> None:
    """Refuse a network of more weights than the files have bytes."""
    if num_weights > checkpoint.num_bytes:
        raise ModelRefused(
            f"{checkpoint.name}: config.json describes {num_weights:,} weights, but the files hold "
            f"{checkpoint.num_bytes:,} bytes: one of the two is another model's, or a file is "
            "missing."
        )


def check_kind(name: str, key: str, kind: str, kinds: Collection[str] = FLOATS) -> None:
    """Refuse a weight that is stored as anything but plain numbers, or what it must be."""
    if kind in kinds:
        return
    if kinds is not FLOATS:
        raise ModelRefused(f"{name}: {key} is stored as {kind} and not {' or '.join(kinds)}.")
    raise ModelRefused(
        f"{name}: {key} is stored as {kind}: quantised weights that config.json does not tell of "
        "are not supported; use the unquantised model."
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
    """Refuse a network that was not filled with all of its weights, or not with all that they say.

    `needs` is what it is called, `modules` the names of all that it is made of, `base` the one of
    all but its head. `is_multimodal` says that the weights hold more than text, which is left out.
    """
    missing, others = sorted(found.missing), sorted(found.unexpected)
    if missing:
        instead = f" (they hold {some(others)} instead)" if others else ""
        raise ModelRefused(
            f"{name}: its weights lack {some(missing)}, which {needs} needs{instead}: a file is "
            "missing, tensors have another prefix, or config.json is another model's."
        )
    if mismatched := sorted(found.mismatched):
        shapes = [f"{key} {[*stored]} and not {[*wanted]}" for key, stored, wanted in mismatched]
        raise ModelRefused(
            f"{name}: its weights have other shapes than {needs} by its config.json: "
            f"{some(shapes)}; one of the two is another model's."
        )
    if needed := _needed(others, modules, base, is_multimodal=is_multimodal):
        raise ModelRefused(
            f"{name}: its weights hold {some(needed)}, for which {needs} has no place: without "
            "them it would answer nonsense; config.json is another model's, or the weights are "
            "quantised."
        )


@downloading()
def _fetched(name: str) -> Path:
    """Return the hub's snapshot of a model on this machine, its weights fetched into it."""
    first = find_file(name, WHOLE) or find_file(name, INDEX)
    if first is None:
        raise _holds_neither(name, [])
    folder = first.parent
    if first.name == INDEX:
        files = _indexed(name, folder)
        if not all(os.path.isfile(folder / file) for file in files):  # noqa: PTH113 - it never raises
            from transformers.utils.hub import cached_files

            cached_files(name, files, revision=folder.name)
    return folder


def _files(name: str, folder: Path) -> list[Path]:
    """Return the weights' files, as transformers chooses them, each of them inside the folder."""
    if (folder / WHOLE).exists():
        files = [WHOLE]
    elif (folder / INDEX).exists():
        files = _indexed(name, folder)
    else:
        others = [path.name for kind in OTHERS for path in folder.glob(kind)]
        raise _holds_neither(name, others)
    if lost := [file for file in files if not os.path.isfile(folder / file)]:  # noqa: PTH113 - it never raises
        raise ModelRefused(
            f"{name} lacks {lost[0]} ({len(lost)} of the {len(files)} files of its weights): copy "
            "or fetch the model again."
        )
    for file in files:
        check_inside(name, "model", folder, file)
    return [folder / file for file in files]


def check_inside(name: str, kind: str, folder: Path, file: str) -> None:
    """Refuse a file of a model or an adapter that is a link to what lies outside of its folder."""
    path = (folder / file).resolve()
    if not any(path.is_relative_to(root) for root in _roots(folder.resolve())):
        raise ModelRefused(
            f"{name}: {file} leads to {path}, outside of the {kind}'s folder, where nothing is "
            "read: put the file itself into the folder."
        )


def missing_files(folder: Path) -> tuple[str, ...]:
    """Return the names of files of weights that a folder lacks."""
    if (folder / WHOLE).exists():
        return ()
    if not (folder / INDEX).exists():
        return (f"{WHOLE} or {INDEX}",)
    try:
        return tuple(file for file in _indexed("", folder) if not (folder / file).exists())
    except ModelRefused:  # told by `find_checkpoint`
        return ()


def _indexed(name: str, folder: Path) -> list[str]:
    """Return the files that the index names, all of them safetensors by relative paths inwards."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
        files = sorted(set(index["weight_map"].values()))
        index["metadata"].keys()  # transformers asks for it
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise ModelRefused(f"{name}: {INDEX} is no index of weights: copy it again.") from exc
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
        raise ModelRefused(f"{name}: {INDEX} names no file.")
    return files


def _roots(folder: Path) -> list[Path]:
    """Return where a folder's files may lie: in it, or where the hub's cache has their bytes.

    The folder is a snapshot of that cache, or lies in one.
    """
    for snapshots in folder.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return [folder, repository / "blobs", repository.parent / "blobs"]
    return [folder]


def _check_file(name: str, path: Path, quantization: QuantizationConfig | None) -> None:
    """Refuse a file that is torn or no safetensors, and weights that are no plain numbers."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            stored = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as exc:
        raise ModelRefused(
            f"{name}: {path.name} is no whole safetensors file ({exc}): copy or fetch it again."
        ) from exc
    weight_format = None if quantization is None else quantization.weight_format
    main_tensor, kinds = ("weight", FLOATS) if weight_format is None else weight_format.main_tensor
    # Masks and ids may be stored as anything: only weights are multiplied by.
    for key, kind in stored.items():
        own = key.rpartition(".")[2]
        if own == "weight" and not (own == main_tensor and kind in kinds):
            check_kind(name, key, kind)


def _needed(
    tensors: Iterable[str], modules: Collection[str], base: str, *, is_multimodal: bool
) -> list[str]:
    """Return those tensors without a place that lie within a module that the network has.

    Beside its own modules there are heads of training and, in models of more than text, towers.
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
        # The weights of a bare base model have its names without its prefix.
        or innermost(f"{base}.{tensor}") not in {"", base}
    ]


def some(items: list[str]) -> str:
    """Return the first of some things and how many more there are."""
    more = len(items) - NAMED
    return ", ".join(items[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _holds_neither(name: str, others: list[str]) -> ModelRefused:
    beside = f" (it has {some(sorted(others))})" if others else ""
    return ModelRefused(
        f"{name} holds neither {WHOLE} nor {INDEX}{beside}: weights of no other format are read; "
        "transformers' save_pretrained writes these."
    )
