"""Tiny checkpoints in each published form of quantised weights, made from a tiny model.

Each is written number by number, following its format's specification and not our reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.families import build
from tidemill.engine.model.weights.checkpoint import WHOLE

GROUP = 32
LoadingInfo = dict[str, Tensor]
# From a matrix to what is stored of it, by what follows its name, and what that stands for.
Makes = Callable[[Tensor], tuple[LoadingInfo, Tensor]]


def _fp8(weight: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, numbers.float() * spread


def per_tensor(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """One scale for the matrix, and one for activations."""
    scale = weight.abs().amax() / 448
    numbers, meant = _fp8(weight, scale)
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.ones(())}, meant


def static(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """The same as in Ministral 3, in bf16."""
    stored, _ = per_tensor(weight)
    scale = stored["weight_scale"].bfloat16()
    numbers, meant = _fp8(weight, scale.float())
    return {"weight": numbers, "weight_scale_inv": scale, "activation_scale": scale + 1}, meant


def per_row(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """One scale per row, in bf16."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers, meant = _fp8(weight, scale.float())
    return {"weight": numbers, "weight_scale": scale}, meant


def in_blocks(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """One scale for each block of 32 × 32; the last ones may be smaller."""
    height, width = (-(-side // GROUP) for side in weight.shape)
    scale = torch.rand(height, width) * 0.001 + 0.001
    spread = torch.stack(
        [
            torch.stack([scale[row // GROUP, column // GROUP] for column in range(weight.shape[1])])
            for row in range(weight.shape[0])
        ]
    )
    numbers, meant = _fp8(weight, spread)
    return {"weight": numbers, "weight_scale_inv": scale}, meant


class Whole(dict[str, Tensor]):
    """Numbers of four bits `q [O, I]`, their groups' scales `s` and zeros `z`, both `[O, G]`."""


def _of_four_bits(weight: Tensor, *, is_symmetric: bool = False) -> tuple[Whole, Tensor]:
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(0, 15)
    if is_symmetric:
        scale, zero = (groups.abs().amax(-1) / 7).half(), torch.full_like(low, 8)
    scales, zeros = (each.float()[..., None] for each in (scale, zero))
    numbers = (groups / scales + zeros).round().clamp(0, 15)
    meant = ((numbers - zeros) * scales).view(weight.shape)
    return Whole(q=numbers.view(weight.shape).int(), s=scale, z=zero.int()), meant


def gptq_8(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """GPTQ's of eight bits: four numbers in a word, zeros stored minus one."""
    low, high = (each(weight.view(len(weight), -1, GROUP), -1) for each in (torch.amin, torch.amax))
    scale = ((high - low) / 255).half()
    zero = (-low / scale).round().clamp(1, 255).int()
    spread, zeros = (each.repeat_interleave(GROUP, 1) for each in (scale.float(), zero))
    numbers = (weight / spread + zeros).round().clamp(0, 255).int()
    return {
        "qweight": _bytes_in_words(numbers).T.contiguous(),
        "qzeros": _bytes_in_words(zero.T - 1),
        "scales": scale.T.contiguous(),
    }, (numbers - zeros) * spread


def packed_8(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """compressed-tensors' of eight bits: numbers plus 128, and one scale per row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scale.float()).round().clamp(-128, 127).int()
    return {
        "weight_packed": _bytes_in_words(numbers + 128),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }, numbers * scale.float()


def _bytes_in_words(numbers: Tensor) -> Tensor:
    """Return words of four neighbours of the last axis, the first one in the lowest bits."""
    return numbers.to(torch.uint8).contiguous().view(torch.int32)


def _in_words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return words of eight neighbours of the last axis; `order[i]` is the one at place i."""
    words = torch.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), dtype=torch.int64)
    for place, which in enumerate(order):
        words += numbers[..., which::8].long() << 4 * place
    return words.to(torch.int32)


def awq(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """AWQ's format, in the order of its GEMM kernel."""
    made, meant = _of_four_bits(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _in_words(made["q"].T, order),
        "qzeros": _in_words(made["z"].T, order),
        "scales": made["s"].T.contiguous(),
    }, meant


def gptq(weight: Tensor, *, lack: int = 1, is_sorted: bool = True) -> tuple[LoadingInfo, Tensor]:
    """GPTQ's: zeros are stored minus one; groups are neighbours, or sorted by importance."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // GROUP
    order = torch.arange(inputs)
    if not is_sorted:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        groups = torch.empty_like(groups).index_copy_(0, order, groups)
    made, meant = _of_four_bits(weight[:, order])
    numbers = torch.empty_like(made["q"]).index_copy_(1, order, made["q"])
    return {
        "qweight": _in_words(numbers).T.contiguous(),
        "qzeros": _in_words((made["z"].T - lack) & 15),
        "scales": made["s"].T.contiguous(),
        "g_idx": groups.int(),
    }, torch.empty_like(meant).index_copy_(1, order, meant)


def packed(weight: Tensor, *, is_symmetric: bool = True) -> tuple[LoadingInfo, Tensor]:
    """compressed-tensors' of four bits: the words as they are, zeros packed by outputs."""
    made, meant = _of_four_bits(weight, is_symmetric=is_symmetric)
    stored = {
        "weight_packed": _in_words(made["q"]),
        "weight_scale": made["s"].bfloat16() if is_symmetric else made["s"],
        "weight_shape": torch.tensor(weight.shape),
    }
    if is_symmetric:
        spread = stored["weight_scale"].float().repeat_interleave(GROUP, 1)
        return stored, (made["q"] - 8) * spread
    return stored | {"weight_zero_point": _in_words(made["z"].T).T.contiguous()}, meant


def mxfp4(experts: Tensor) -> tuple[LoadingInfo, Tensor]:
    """GPT-OSS' of stacked experts, which are stored transposed where they are plain.

    Nearest numbers of 2^e · {0, ±½, ±1, ±1½, ±2, ±3, ±4, ±6}, two in a byte, the first below.
    """
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = experts.transpose(1, 2).unflatten(-1, (-1, GROUP))  # [E, O, G, 32]
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    parts = groups / 2 ** exponent[..., None]
    codes = (parts.abs()[..., None] - sizes).abs().argmin(-1)
    meant = sizes[codes] * parts.sign() * 2 ** exponent[..., None]
    codes += 8 * (parts < 0)
    stored = {
        "blocks": (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8),
        "scales": (exponent + 127).to(torch.uint8),
    }
    return stored, meant.flatten(2).transpose(1, 2).contiguous()


def _fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest e2m1, two in a byte, the first below, and what they stand for."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (weight.abs()[..., None] - sizes).abs().argmin(-1)
    meant = sizes[codes] * weight.sign()
    codes += 8 * (weight < 0)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), meant


def packed_mxfp4(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """compressed-tensors' mxfp4: powers of two, for 32 inputs each, by their exponents plus 127."""
    exponent = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
    spread = 2 ** exponent.repeat_interleave(32, 1)
    numbers, meant = _fp4(weight / spread)
    stored = {"weight_packed": numbers, "weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, meant * spread


def _nvfp4(weight: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers and e4m3 scales of 16 inputs each, multiples of one fp32 scale."""
    largest = weight.unflatten(1, (-1, 16)).abs().amax(-1)
    scales = (largest / 6 / whole).to(torch.float8_e4m3fn)
    spread = (scales.float() * whole).repeat_interleave(16, 1)
    numbers, meant = _fp4(weight / spread)
    return numbers, scales, meant * spread


def nvfp4(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """ModelOpt's NVFP4: the scale of all, and one of activations; scales reach 448."""
    whole = weight.abs().amax() / (6 * 448)
    numbers, scales, meant = _nvfp4(weight, whole)
    stored = {"weight": numbers, "weight_scale": scales, "weight_scale_2": whole}
    return stored | {"input_scale": torch.ones(())}, meant


def packed_nvfp4(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """compressed-tensors' NVFP4: the inverse of the scale of all."""
    inverse = (6 * 448 / weight.abs().amax()).view(1)
    numbers, scales, meant = _nvfp4(weight, 1 / inverse)
    return {
        "weight_packed": numbers,
        "weight_scale": scales,
        "weight_global_scale": inverse,
        "input_global_scale": torch.tensor([2e6]),
    }, meant


def mixed(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """ModelOpt's mixed precision: here down projections, which have 96 inputs, are fp8."""
    return (per_tensor if weight.shape[1] == 96 else nvfp4)(weight)


def int8(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """compressed-tensors' W8A8: one scale per row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale.float()


def int8_zeros(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """The same with one scale and one zero of all."""
    low, high = weight.amin(), weight.amax()
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    numbers = (weight / scale + zero).round().clamp(-128, 127)
    return {
        "weight": numbers.to(torch.int8),
        "weight_scale": scale,
        "weight_zero_point": zero.to(torch.int8),
    }, (numbers - zero) * scale


def w4a8(weight: Tensor) -> tuple[LoadingInfo, Tensor]:
    """compressed-tensors' W4A8: numbers of four bits, one per byte."""
    made, meant = _of_four_bits(weight, is_symmetric=True)
    return {"weight": (made["q"] - 8).to(torch.int8), "weight_scale": made["s"]}, meant


def _compressed(
    layout: str, *, inputs: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["Linear"], "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FLOAT, _INT = {"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 4}
_FP4, _TOKENS = {"type": "float", "num_bits": 4}, {"type": "int", "num_bits": 8, "dynamic": True}
_OF_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
# By name: what config.json says, and what is stored of a matrix.
FORMS: dict[str, tuple[dict[str, Any], Makes]] = {
    "fp8, per tensor": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
            "weight_block_size": None,
        },
        static,
    ),
    "fp8, blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "weight_block_size": [GROUP, GROUP],
        },
        in_blocks,
    ),
    "compressed fp8, per tensor": (
        _compressed("float-quantized", **_FLOAT, strategy="tensor"),
        per_tensor,
    ),
    "compressed fp8, per row": (
        _compressed("float-quantized", **_FLOAT, strategy="channel"),
        per_row,
    ),
    "compressed int4": (
        _compressed("pack-quantized", **_INT, strategy="group", group_size=GROUP),
        packed,
    ),
    "compressed int4, zeros": (
        _compressed("pack-quantized", **_INT, strategy="group", group_size=GROUP, symmetric=False),
        lambda weight: packed(weight, is_symmetric=False),
    ),
    "compressed int8": (
        _compressed("pack-quantized", type="int", num_bits=8, strategy="channel"),
        packed_8,
    ),
    "compressed W8A8": (
        _compressed("int-quantized", **_INT | {"num_bits": 8}, strategy="channel", inputs=_TOKENS),
        int8,
    ),
    "compressed W8A8, zeros": (
        _compressed("int-quantized", **_INT | {"num_bits": 8}, strategy="tensor", symmetric=False),
        int8_zeros,
    ),
    "compressed W4A8": (
        _compressed("int-quantized", **_INT, strategy="group", group_size=GROUP, inputs=_TOKENS),
        w4a8,
    ),
    "compressed nvfp4": (
        _compressed("nvfp4-pack-quantized", **_FP4, group_size=16, inputs=_FP4),
        packed_nvfp4,
    ),
    "compressed mxfp4": (
        _compressed("mxfp4-pack-quantized", **_FP4, group_size=32, inputs=_FP4),
        packed_mxfp4,
    ),
    "modelopt nvfp4": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
        nvfp4,
    ),
    "modelopt mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        mixed,
    ),
    "gptq, 8 bits": (_OF_GPTQ | {"bits": 8}, gptq_8),
    "auto-round": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"lm_head": {"bits": 16}},
        },
        gptq,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, per_tensor),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
        awq,
    ),
    "gptq": (_OF_GPTQ, gptq),
    "gptq, second format": (
        _OF_GPTQ | {"checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, lack=0),
    ),
    "gptq, sorted": (
        _OF_GPTQ | {"desc_act": True},
        lambda weight: gptq(weight, is_sorted=False),
    ),
}


# What config.json says of GPT-OSS, which alone is published so.
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def save_mxfp4(folder: Path) -> LoadingInfo:
    """Write a tiny GPT-OSS in its published format, and return its dequantised tensors."""
    model: Any = build("GptOssConfig")
    model.save_pretrained(folder)
    return quantise_mxfp4(folder)


def quantise_mxfp4(folder: Path) -> LoadingInfo:
    """Convert the experts of a folder's GPT-OSS to mxfp4; return its dequantised tensors."""
    stored, meant = {}, {}
    for key, tensor in load_file(folder / WHOLE).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            pieces, meant[key] = mxfp4(tensor)
            stored |= {f"{key}_{piece}": value for piece, value in pieces.items()}
        else:
            stored[key] = meant[key] = tensor
    _write(folder, stored, MXFP4)
    return meant


def save(name: str, folder: Path, family: str = "Qwen3Config") -> LoadingInfo:
    """Write a family's tiny model in a form, and return its dequantised tensors.

    Its embedding, its head and its last layer's values stay as they are, as does each router.
    """
    if name == "mxfp4":
        return save_mxfp4(folder)
    model: Any = build(family)
    model.save_pretrained(folder)
    return quantise(name, folder)


def quantise(name: str, folder: Path, *more: str) -> LoadingInfo:
    """Convert a folder's model to a form, and return its dequantised tensors.

    What is named by any of `more` stays as it is, too.
    """
    quantization_config, make = FORMS[name]
    kept = ("embed", "lm_head", "3.self_attn.v", "gate.w", *more)
    stored, meant = {}, {}
    for key, tensor in load_file(folder / WHOLE).items():
        module, _, last = key.rpartition(".")
        is_matrix = last == "weight" and tensor.ndim == 2
        if is_matrix and not any(part in key for part in kept):
            pieces, meant[key] = make(tensor.float())
            stored |= {f"{module}.{piece}": value for piece, value in pieces.items()}
        else:
            stored[key] = meant[key] = tensor
    _write(folder, stored, quantization_config)
    return meant


def _write(folder: Path, stored: LoadingInfo, quantization_config: dict[str, Any]) -> None:
    """Write tensors, and their quantization_config to config.json."""
    save_file(stored, folder / WHOLE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
