"""Quantization config of a checkpoint: the methods and formats that are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import ModelRefused
from ...config.hf_config import CONFIG, ConfigFields, HFConfig, UnsupportedConfig
from .formats import MXFP4_GROUP, Awq, Fp8, Gptq, Mxfp4, PackQuantized, WeightFormat

# Methods by which unquantised weights are quantised as they are read.
MADE_AT_LOAD = ("fp8", "int8")
UNQUANTISED = "use the unquantised model"
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """By which method weights are quantised, and the form that quantised ones have in the files.

    Without a form they are quantised as they are read.
    """

    method: str
    weight_format: WeightFormat | None

    @property
    def experts_group(self) -> int:
        """Return the inputs of experts that cannot be shared between ranks, as they have a scale.

        Weights of all other formats are dequantised where a rank's share cuts a group.
        """
        is_stacked = self.weight_format is not None and self.weight_format.is_stacked
        return MXFP4_GROUP if is_stacked else 1


def read_quantization_config(hf_config: HFConfig, asked: str | None) -> QuantizationConfig | None:
    """Return how a model's weights are quantised, or are to be where that was `asked`.

    `ModelRefused` says by name what is not served.
    """
    name, said = hf_config.name, hf_config.quantization_config
    if not said:
        if asked is None or asked in MADE_AT_LOAD:
            return None if asked is None else QuantizationConfig(asked, None)
        raise ModelRefused(
            f"{name}: --quantization {asked} was asked for, but its {CONFIG} says of no quantised "
            "weights: leave it out."
        )
    method = _method(said)
    if method not in _METHODS:
        raise ModelRefused(
            f"{name}: its weights are quantised by {method}, and only {', '.join(_METHODS)} are "
            f"supported; {UNQUANTISED}."
        )
    if asked not in (None, method):
        raise ModelRefused(
            f"{name}: --quantization {asked} was asked for, but its weights are quantised by "
            f"{method}: leave it out."
        )
    try:
        weight_format = _METHODS[method](
            ConfigFields(f"{name}: {CONFIG}: quantization_config", said)
        )
    except UnsupportedConfig as exc:
        raise ModelRefused(f"{exc}, which is not supported; {UNQUANTISED}.") from exc
    return QuantizationConfig(method, weight_format)


def _method(said: Mapping[str, Any]) -> str:
    """Return how weights are quantised, also where only the fields of a tool tell."""
    method = said.get("quant_method")
    if method is not None:
        return str(method)
    if algorithm := said.get("quant_algo"):
        return f"NVIDIA's ModelOpt ({algorithm})"
    if any(key.startswith(("bnb_", "llm_int8", "load_in_")) for key in said):
        return "bitsandbytes"
    if "group_size" in said and "bits" in said:
        return f"MLX ({said['bits']} bits)"
    return f"an unknown method ({CONFIG}: quantization_config leaves out quant_method)"


def supported_methods() -> tuple[str, ...]:
    """Return the methods by which published weights may be quantised."""
    return tuple(_METHODS)


def _fp8(said: ConfigFields) -> WeightFormat:
    said.allow("fmt", "e4m3", "float8_e4m3fn")
    said.allow("activation_scheme", "dynamic", "static")
    return Fp8(_block(said, "weight_block_size"))


def _awq(said: ConfigFields) -> WeightFormat:
    said.allow("version", "gemm", "GEMM")
    if not said.flag("zero_point", default=True):
        raise UnsupportedConfig(f"{said.where} says zero_point false")
    return Awq(_group(said, "bits", "w_bit"))


def _gptq(said: ConfigFields) -> WeightFormat:
    said.allow("is_marlin_format")
    said.allow("dynamic")
    said.allow("pack_dtype", "int32")
    said.allow("checkpoint_format", "gptq", "gptq_v2")
    has_whole_zeros = said.get("checkpoint_format") == "gptq_v2"
    size, is_sorted = _group(said, "bits"), said.flag("desc_act")
    return Gptq(size, 0 if has_whole_zeros else 1, is_sorted=is_sorted and size is not None)


def _group(said: ConfigFields, *bits: str) -> int | None:
    """Return the size of groups of 4-bit numbers; None where a whole row is one."""
    if all(said.get(key) is None for key in bits):
        raise UnsupportedConfig(f"{said.where} leaves out {bits[0]}")
    for key in bits:
        said.allow(key, 4)
    size = said.get("group_size", 128)
    if size == -1:
        return None
    if type(size) is not int or size < 1:
        raise UnsupportedConfig(f"{said.where} says group_size {size!r}")
    return size


def _compressed(said: ConfigFields) -> WeightFormat:
    """Return the one form of all of its groups, which differ in what they are for alone."""
    said.allow("sparsity_config", {"format": "dense"})
    said.allow("transform_config")
    said.allow("quantization_status", "compressed", "frozen")
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedConfig(f"{said.where} says config_groups {groups!r}")
    whole = said.get("format")
    formats = {
        _compressed_group(f"{said.where}: {key}", group, whole) for key, group in groups.items()
    }
    if len(formats) > 1:
        raise UnsupportedConfig(f"{said.where} says of {len(formats)} kinds of weights")
    return formats.pop()


def _compressed_group(where: str, group: Any, whole: object) -> WeightFormat:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise UnsupportedConfig(f"{where} says of no weights")
    ConfigFields(where, group).allow("output_activations")
    inputs = group.get("input_activations") or {}
    ConfigFields(f"{where}: input_activations", inputs).allow("type", "float")
    ConfigFields(f"{where}: input_activations", inputs).allow("num_bits", 8)
    said, layout = ConfigFields(f"{where}: weights", group["weights"]), group.get("format") or whole
    kind, bits = said.get("type"), said.get("num_bits")
    if (kind, bits) == ("float", 8) and layout in _FLOAT_FORMATS:
        said.allow("strategy", "tensor", "channel", "block")
        is_block = said.get("strategy") == "block"
        return Fp8(_block(said, "block_structure") if is_block else None)
    if (kind, bits) == ("int", 4) and layout == "pack-quantized" and not inputs:
        said.allow("strategy", "group", "channel")
        size = _group(said, "num_bits") if said.get("strategy") == "group" else None
        is_sorted = said.get("actorder") in (True, "group", "dynamic") and size is not None
        return PackQuantized(size, said.flag("symmetric", default=True), is_sorted=is_sorted)
    raise UnsupportedConfig(
        f"{where} says weights of {bits} bits, type {kind!r}, format {layout!r}"
    )


def _block(said: ConfigFields, key: str) -> tuple[int, int] | None:
    size = said.get(key)
    if size is None:
        return None
    if isinstance(size, str):  # 128x128
        size = [int(side) if side.isdecimal() else 0 for side in size.split("x")]
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(type(side) is int and side > 0 for side in size):
        raise UnsupportedConfig(f"{said.where} says {key} {size!r}")
    height, width = size
    return height, width


_METHODS: dict[str, Callable[[ConfigFields], WeightFormat]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda _: Mxfp4(),
}
