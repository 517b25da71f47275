"""Adapters in PEFT's format, and models with an adapter merged into their weights."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def halves(
    network: nn.Module,
    targets: tuple[str, ...] = ALL,
    *,
    rank: int = 4,
    seed: int = 1,
    size: float = 0.2,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return random A `[R, I]` and B `[O, R]` for each module whose name ends with the suffix."""
    generator = torch.Generator().manual_seed(seed)
    adapters = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            shapes = (rank, module.in_features), (module.out_features, rank)
            down, up = (size * torch.randn(shape, generator=generator) for shape in shapes)
            adapters[name] = down, up
    assert adapters
    return adapters


def write_adapter(folder: Path, modules: dict[str, tuple[Tensor, Tensor]], **config: Any) -> Path:
    """Write a folder like PEFT; `config` contains additional fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {len(down) for down, _ in modules.values()}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
        "r": min(ranks),
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    tensors = {
        f"base_model.model.{name}.lora_{half}.weight": tensor.contiguous()
        for name, pair in modules.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(network: Any, modules: dict[str, tuple[Tensor, Tensor]], scale: float) -> Any:
    """Return a copy of a network with an adapter in its weights: W + scale · B · A."""
    copy = deepcopy(network)
    for name, (down, up) in modules.items():
        copy.get_submodule(name).weight.data += scale * (up @ down)
    return copy
