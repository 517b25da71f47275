"""Quantization config of a checkpoint: the supported methods and formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import ModelRefused
from ...config.hf_config import CONFIG, ConfigFields, HFConfig, UnsupportedConfig
from .formats import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    Awq,
    Fp8,
    Gptq,
    IntQuantized,
    Mxfp4,
    Nvfp4,
    PackedMxfp4,
    PackQuantized,
    WeightFormat,
)

# Methods that quantise weights during the load.
MADE_AT_LOAD = ("fp8", "int8")
UNQUANTISED = "use the unquantised model"
# NVIDIA ModelOpt's algorithms: fp8 weights with one scale or one per row, and fp4 ones.
_MODELOPT: dict[object, WeightFormat] = {
    "FP8": Fp8(None),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8(None),
    "NVFP4": Nvfp4(is_inverse=False),
    "W4A16_NVFP4": Nvfp4(is_inverse=False),
}
_MIXED = "MIXED_PRECISION"
# vLLM's names for the same method.
_MODELOPT_METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
# Tools that are better known by another name than that of their method.
_TOOLS = {"exl2": "ExLlamaV2 (exl2)", "exl3": "ExLlamaV3 (exl3)"}
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
# compressed-tensors' formats of fp4 weights, with the inputs that share a scale.
_FP4_FORMATS: dict[object, tuple[WeightFormat, int]] = {
    "nvfp4-pack-quantized": (Nvfp4(is_inverse=True), NVFP4_GROUP),
    "mxfp4-pack-quantized": (PackedMxfp4(), MXFP4_GROUP),
}
WeightFormats = tuple[WeightFormat, ...]


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The method by which weights are quantised, and their formats in the files.

    Without a format they are quantised during the load.
    """

    method: str
    weight_formats: tuple[WeightFormat, ...] = ()

    @property
    def is_made_at_load(self) -> bool:
        """Return whether the files contain plain weights."""
        return not self.weight_formats

    @property
    def product(self) -> str:
        """Return the method whose products the weights need; they are dequantised without one."""
        has_product = all(weight_format.has_product for weight_format in self.weight_formats)
        return self.method if has_product else ""

    @property
    def experts_group(self) -> int:
        """Return the size of expert inputs that ranks cannot split, as they share a scale.

        Weights of all other formats are dequantised if a rank's share splits a group.
        """
        is_stacked = any(weight_format.is_stacked for weight_format in self.weight_formats)
        return MXFP4_GROUP if is_stacked else 1


def read_quantization_config(
    hf_config: HFConfig, requested: str | None
) -> QuantizationConfig | None:
    """Return a model's quantisation, or the `requested` one.

    `ModelRefused` names an unsupported one.
    """
    name, config = hf_config.name, hf_config.quantization_config
    if not config:
        if requested is None or requested in MADE_AT_LOAD:
            return None if requested is None else QuantizationConfig(requested)
        raise ModelRefused(
            f"{name}: --quantization {requested} was requested, but its {CONFIG} has no "
            "quantization_config: leave the flag out."
        )
    method = _method(config)
    if method not in _METHODS:
        raise ModelRefused(
            f"{name}: its weights are quantised with {method}, but only {', '.join(_METHODS)} are "
            f"supported; {UNQUANTISED}, which --quantization fp8 or int8 quantises at load."
        )
    if requested not in (None, method):
        raise ModelRefused(
            f"{name}: --quantization {requested} was requested, but its weights are quantised with "
            f"{method}: leave the flag out."
        )
    try:
        weight_formats = _METHODS[method](
            ConfigFields(f"{name}: {CONFIG}: quantization_config", config)
        )
    except UnsupportedConfig as exc:
        raise ModelRefused(f"{exc}; {UNQUANTISED}.") from exc
    return QuantizationConfig(method, weight_formats)


def _method(config: Mapping[str, Any]) -> str:
    """Return the quantisation method, also if only a tool's own fields show it."""
    method = config.get("quant_method")
    if method in (None, *_MODELOPT_METHODS) and (algorithm := config.get("quant_algo")):
        is_known = algorithm in (*_MODELOPT, _MIXED)
        return "modelopt" if is_known else f"NVIDIA's ModelOpt ({algorithm})"
    if method is not None:
        return _TOOLS.get(str(method), str(method))
    if any(key.startswith(("bnb_", "llm_int8", "load_in_")) for key in config):
        return "bitsandbytes"
    if "group_size" in config and "bits" in config:
        return f"MLX ({config['bits']} bits)"
    return f"an unknown method ({CONFIG}: quantization_config does not set quant_method)"


def supported_methods() -> tuple[str, ...]:
    """Return the methods by which published weights may be quantised."""
    return tuple(_METHODS)


def _fp8(fields: ConfigFields) -> WeightFormats:
    fields.allow("fmt", "e4m3", "float8_e4m3fn")
    fields.allow("activation_scheme", "dynamic", "static")
    return (Fp8(_block(fields, "weight_block_size")),)


def _awq(fields: ConfigFields) -> WeightFormats:
    fields.allow("version", "gemm", "GEMM")
    if not fields.flag("zero_point", default=True):
        raise UnsupportedConfig(f"{fields.where} has unsupported zero_point false")
    return (Awq(_group(fields, "bits", "w_bit")),)


def _gptq(fields: ConfigFields) -> WeightFormats:
    fields.allow("is_marlin_format")
    fields.allow("dynamic")
    fields.allow("pack_dtype", "int32")
    fields.allow("checkpoint_format", "gptq", "gptq_v2")
    has_whole_zeros = fields.get("checkpoint_format") == "gptq_v2"
    size, is_sorted = _group(fields, "bits", widths=(4, 8)), fields.flag("desc_act")
    is_sorted, bits = is_sorted and size is not None, int(fields.get("bits"))
    return (Gptq(size, 0 if has_whole_zeros else 1, is_sorted=is_sorted, bits=bits),)


def _auto_round(fields: ConfigFields) -> WeightFormats:
    """Return the format of GPTQ; layers with other widths are not quantised at all."""
    fields.allow("packing_format", "auto_round:auto_gptq")
    fields.allow("data_type", "int")
    others = fields.get("extra_config") or {}
    for layer, how in others.items() if isinstance(others, Mapping) else ():
        ConfigFields(f"{fields.where}: extra_config: {layer}", how).allow("bits", 16, 32)
    size = _group(fields, "bits", widths=(4, 8))
    return (Gptq(size, 1, bits=int(fields.get("bits"))),)


def _modelopt(fields: ConfigFields) -> WeightFormats:
    """Return the format of an algorithm, or those of the layers' algorithms."""
    fields.allow("quant_algo", *_MODELOPT, _MIXED)
    if fields.get("quant_algo") != _MIXED:
        fields.allow("group_size", NVFP4_GROUP)
        return (_MODELOPT[fields.get("quant_algo")],)
    layers = fields.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise UnsupportedConfig(f"{fields.where} has unsupported quantized_layers {layers!r}")
    weight_formats = set()
    for layer, how in layers.items():
        where = f"{fields.where}: quantized_layers: {layer}"
        if not isinstance(how, Mapping) or how.get("quant_algo") not in _MODELOPT:
            raise UnsupportedConfig(f"{where} has unsupported {how!r}")
        ConfigFields(where, how).allow("group_size", NVFP4_GROUP)
        weight_formats.add(_MODELOPT[how["quant_algo"]])
    return tuple(weight_formats)


def _group(fields: ConfigFields, *bits: str, widths: tuple[int, ...] = (4,)) -> int | None:
    """Return the group size of numbers of these widths; None if a whole row is one group."""
    if all(fields.get(key) is None for key in bits):
        raise UnsupportedConfig(f"{fields.where} does not set {bits[0]}")
    for key in bits:
        fields.allow(key, *widths)
    size = fields.get("group_size", 128)
    if size == -1:
        return None
    if type(size) is not int or size < 1:
        raise UnsupportedConfig(f"{fields.where} has unsupported group_size {size!r}")
    return size


def _compressed(fields: ConfigFields) -> WeightFormats:
    """Return the formats of all groups, one for each way of storing a matrix."""
    fields.allow("sparsity_config", {"format": "dense"})
    fields.allow("transform_config")
    fields.allow("quantization_status", "compressed", "frozen")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedConfig(f"{fields.where} has unsupported config_groups {groups!r}")
    whole = fields.get("format")
    formats = {
        _compressed_group(f"{fields.where}: {key}", group, whole) for key, group in groups.items()
    }
    # The stored tensors must show which format a matrix has.
    if len({weight_format.main_tensor for weight_format in formats}) < len(formats):
        raise UnsupportedConfig(
            f"{fields.where} has {len(formats)} kinds of weights that are stored alike, but only "
            "one is supported"
        )
    return tuple(formats)


def _compressed_group(where: str, group: Any, whole: object) -> WeightFormat:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise UnsupportedConfig(f"{where} does not set weights")
    ConfigFields(where, group).allow("output_activations")
    inputs = group.get("input_activations") or {}
    fields, layout = (
        ConfigFields(f"{where}: weights", group["weights"]),
        group.get("format") or whole,
    )
    kind, bits = fields.get("type"), fields.get("num_bits")
    if layout in _FP4_FORMATS and (kind, bits) == ("float", 4):
        weight_format, of_scale = _FP4_FORMATS[layout]
        fields.allow("group_size", of_scale)
        return weight_format
    own = ConfigFields(f"{where}: input_activations", inputs)
    own.allow("num_bits", 8)
    if kind == "int" and bits in (4, 8) and layout == "int-quantized":
        fields.allow("strategy", "tensor", "channel", "group")
        is_symmetric = fields.flag("symmetric", default=True)
        return IntQuantized(_group_of(fields, bits), is_symmetric, bits)
    own.allow("type", "float")
    if (kind, bits) == ("float", 8) and layout in _FLOAT_FORMATS:
        fields.allow("strategy", "tensor", "channel", "block")
        is_block = fields.get("strategy") == "block"
        return Fp8(_block(fields, "block_structure") if is_block else None)
    if kind == "int" and bits in (4, 8) and layout == "pack-quantized":
        fields.allow("strategy", "group", "channel")
        size = _group_of(fields, bits)
        is_sorted = fields.get("actorder") in (True, "group", "dynamic") and size is not None
        is_symmetric = fields.flag("symmetric", default=True)
        return PackQuantized(size, is_symmetric, is_sorted=is_sorted, bits=bits)
    raise UnsupportedConfig(
        f"{where} has unsupported weights with {bits} bits, type {kind!r}, format {layout!r}"
    )


def _group_of(fields: ConfigFields, bits: int) -> int | None:
    is_grouped = fields.get("strategy") == "group"
    return _group(fields, "num_bits", widths=(bits,)) if is_grouped else None


def _block(fields: ConfigFields, key: str) -> tuple[int, int] | None:
    size = fields.get(key)
    if size is None:
        return None
    if isinstance(size, str):  # 128x128
        size = [int(side) if side.isdecimal() else 0 for side in size.split("x")]
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(type(side) is int and side > 0 for side in size):
        raise UnsupportedConfig(f"{fields.where} has unsupported {key} {size!r}")
    height, width = size
    return height, width


_METHODS: dict[str, Callable[[ConfigFields], WeightFormats]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda _: (Mxfp4(),),
    "modelopt": _modelopt,
    "auto-round": _auto_round,
}
