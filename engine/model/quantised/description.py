"""How a checkpoint says that its weights are quantised, and which of it is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelRefused
from engine.model.description import CONFIG, Description, Fields, NotUnderstood
from engine.model.quantised.forms import Awq, Form, Fp8, Gptq, Packed

UNQUANTISED = "use the unquantised model"
_INSTEAD = {
    "mxfp4": "GPT-OSS, which is published so, runs from a copy in bf16, which transformers writes: "
    "from_pretrained(…, quantization_config=Mxfp4Config(dequantize=True)), then "
    "save_pretrained(…, save_original_format=False); docs/running.md has the lines"
}
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """By which method weights are quantised, and the form that quantised ones have in the files.

    Without a form they are made fp8 as they are read.
    """

    method: str
    form: Form | None


def quantisation_of(description: Description, asked: str | None) -> Quantisation | None:
    """Return how a model's weights are quantised, or are to be where that was `asked`.

    `ModelRefused` says by name what is not served.
    """
    name, said = description.name, description.quantisation
    if not said:
        if asked in (None, "fp8"):
            return None if asked is None else Quantisation(asked, None)
        raise ModelRefused(
            f"{name}: --quantization {asked} was asked for, but its {CONFIG} says of no quantised "
            "weights: leave it out."
        )
    method = str(said.get("quant_method"))
    if method not in _METHODS:
        raise ModelRefused(
            f"{name}: its weights are quantised by {method}, and only {', '.join(_METHODS)} are "
            f"supported; {_INSTEAD.get(method, UNQUANTISED)}."
        )
    if asked not in (None, method):
        raise ModelRefused(
            f"{name}: --quantization {asked} was asked for, but its weights are quantised by "
            f"{method}: leave it out."
        )
    try:
        form = _METHODS[method](Fields(f"{name}: {CONFIG}: quantization_config", said))
    except NotUnderstood as exc:
        raise ModelRefused(f"{exc}, which is not supported; {UNQUANTISED}.") from exc
    return Quantisation(method, form)


def _fp8(said: Fields) -> Form:
    said.only("fmt", "e4m3", "float8_e4m3fn")
    said.only("activation_scheme", "dynamic", "static")
    return Fp8(_block(said, "weight_block_size"))


def _awq(said: Fields) -> Form:
    said.only("version", "gemm", "GEMM")
    if not said.flag("zero_point", default=True):
        raise NotUnderstood(f"{said.where} says zero_point false")
    return Awq(_group(said, "bits", "w_bit"))


def _gptq(said: Fields) -> Form:
    said.only("is_marlin_format")
    said.only("dynamic")
    said.only("pack_dtype", "int32")
    said.only("checkpoint_format", "gptq", "gptq_v2")
    has_whole_zeros = said.take("checkpoint_format") == "gptq_v2"
    size, is_sorted = _group(said, "bits"), said.flag("desc_act")
    return Gptq(size, 0 if has_whole_zeros else 1, is_sorted=is_sorted and size is not None)


def _group(said: Fields, *bits: str) -> int | None:
    """Return the size of groups of 4-bit numbers; None where a whole row is one."""
    if all(said.take(key) is None for key in bits):
        raise NotUnderstood(f"{said.where} leaves out {bits[0]}")
    for key in bits:
        said.only(key, 4)
    size = said.take("group_size", 128)
    if size == -1:
        return None
    if type(size) is not int or size < 1:
        raise NotUnderstood(f"{said.where} says group_size {size!r}")
    return size


def _compressed(said: Fields) -> Form:
    """Return the one form of all of its groups, which differ in what they are for alone."""
    said.only("sparsity_config", {"format": "dense"})
    said.only("transform_config")
    said.only("quantization_status", "compressed", "frozen")
    groups = said.take("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise NotUnderstood(f"{said.where} says config_groups {groups!r}")
    whole = said.take("format")
    forms = {
        _compressed_group(f"{said.where}: {key}", group, whole) for key, group in groups.items()
    }
    if len(forms) > 1:
        raise NotUnderstood(f"{said.where} says of {len(forms)} kinds of weights")
    return forms.pop()


def _compressed_group(where: str, group: Any, whole: object) -> Form:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise NotUnderstood(f"{where} says of no weights")
    Fields(where, group).only("output_activations")
    inputs = group.get("input_activations") or {}
    Fields(f"{where}: input_activations", inputs).only("type", "float")
    Fields(f"{where}: input_activations", inputs).only("num_bits", 8)
    said, layout = Fields(f"{where}: weights", group["weights"]), group.get("format") or whole
    kind, bits = said.take("type"), said.take("num_bits")
    if (kind, bits) == ("float", 8) and layout in _FLOAT_FORMATS:
        said.only("strategy", "tensor", "channel", "block")
        is_block = said.take("strategy") == "block"
        return Fp8(_block(said, "block_structure") if is_block else None)
    if (kind, bits) == ("int", 4) and layout == "pack-quantized" and not inputs:
        said.only("strategy", "group", "channel")
        size = _group(said, "num_bits") if said.take("strategy") == "group" else None
        is_sorted = said.take("actorder") in (True, "group", "dynamic") and size is not None
        return Packed(size, said.flag("symmetric", default=True), is_sorted=is_sorted)
    raise NotUnderstood(f"{where} says weights of {bits} bits, type {kind!r}, format {layout!r}")


def _block(said: Fields, key: str) -> tuple[int, int] | None:
    size = said.take(key)
    if size is None:
        return None
    if isinstance(size, str):  # 128x128
        size = [int(side) if side.isdecimal() else 0 for side in size.split("x")]
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(type(side) is int and side > 0 for side in size):
        raise NotUnderstood(f"{said.where} says {key} {size!r}")
    height, width = size
    return height, width


_METHODS: dict[str, Callable[[Fields], Form]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
}
