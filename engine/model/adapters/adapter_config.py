"""LoRA adapter config (adapter_config.json): its target modules, their ranks and scales.

The file is read as PEFT reads it. Anything that would compute something other than
x · W + scale · (x · A) · B is refused by name. So is every unknown field, unless its value is
empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

from ...errors import ModelRefused, first_line_of
from ..config.hf_config import ConfigFields, UnsupportedConfig
from .patterns import IN_LAYER, PatternRefused, Patterns

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
# vLLM has the same limit.
MAX_RANK = 512
# Only trained tensors are loaded, so how they were initialised or trained does not matter.
_SILENT = """
    auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode
    loftq_config megatron_config megatron_core peft_version qalora_group_size revision
    runtime_config
""".split()
# Any other initialisation makes PEFT change the weights of the model, too.
_STARTS = (True, "gaussian", "eva", "orthogonal")
_WHY = {
    "use_dora": "DoRA also changes the magnitude of weights; merge the adapter into the model",
    "modules_to_save": "it replaces whole modules of the model; merge the adapter into the model",
    "trainable_token_indices": "it changes embeddings; merge the adapter into the model",
    "target_parameters": "it adapts parameters outside linear modules, such as experts",
    "layer_replication": "it adds layers to the model",
    "lora_bias": "biases are not adapted; merge the adapter into the model",
    "bias": "biases are not adapted; merge the adapter into the model",
    "init_lora_weights": "its initialisation changes the model; convert it to plain LoRA with PEFT",
    "alora_invocation_tokens": "activation by tokens in the prompt (aLoRA) is not supported",
    "task_type": "only adapters for text generation are supported",
    "peft_type": "only LoRA is supported",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Target modules of an adapter, with their ranks and scales by module name.

    `targets` is a pattern of whole names, or a list of name endings. `layers` restricts them to
    some layers, whose number follows one of `layers_patterns` in a name.
    """

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: str | frozenset[str]
    excluded: str | frozenset[str]
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]
    patterns: Patterns = field(default_factory=Patterns, compare=False, repr=False)

    def check_patterns(self) -> None:
        """Raise `PatternRefused` for an invalid pattern, whatever the modules of the model are."""
        for key, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            self.patterns.first_of(key, patterns, "")
        for key, names in (("target_modules", self.targets), ("exclude_modules", self.excluded)):
            self._is_among(key, "", names)
        for pattern in self.layers_patterns:
            self.patterns.match("layers_pattern", pattern, "", IN_LAYER)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        pattern = self.patterns.first_of("rank_pattern", self.ranks, module)
        return self.rank if pattern is None else self.ranks[pattern]

    def scale_of(self, module: str) -> float:
        """Return the factor of (x · A) · B."""
        rank = self.rank_of(module)
        pattern = self.patterns.first_of("alpha_pattern", self.alphas, module)
        alpha = self.alpha if pattern is None else self.alphas[pattern]
        return alpha / (sqrt(rank) if self.is_rank_stabilised else rank)

    def takes(self, module: str) -> bool:
        """Return whether a module is targeted; `ALL_LINEAR` means every one except the head."""
        if self.excluded and self._is_among("exclude_modules", module, self.excluded):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not self._is_among("target_modules", module, self.targets):
            return False
        if isinstance(self.targets, str) or self.layers is None or module in self.targets:
            return True
        patterns = self.layers_patterns or (r"[^.]*",)
        found = (self.patterns.match("layers_pattern", one, module, IN_LAYER) for one in patterns)
        layer = next((match[1] for match in found if match), None) or ""
        return layer.isdecimal() and int(layer) in self.layers

    def _is_among(self, key: str, module: str, names: str | frozenset[str]) -> bool:
        """Return whether a name equals or ends with one of some names; a string is a pattern."""
        if isinstance(names, str):
            return self.patterns.match(key, names, module) is not None
        parts = module.split(".")
        return any(".".join(parts[start:]) in names for start in range(len(parts)))


def read_adapter_config(path: Path, where: str) -> AdapterConfig:
    """Return the config in a file; `ModelRefused` begins with `where` and names what is wrong."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelRefused(f"{where}: {CONFIG} is not valid JSON: {first_line_of(exc)}") from exc
    if not isinstance(raw, dict):
        raise ModelRefused(f"{where}: {CONFIG} is not a JSON object.")
    try:
        return _described(raw)
    except PatternRefused as exc:
        raise ModelRefused(f"{where}: {CONFIG} has unsupported {exc}.") from exc
    except UnsupportedConfig as exc:
        field = re.split(r"[ ,]", str(exc).partition(" has unsupported ")[2])[0]
        why = f": {_WHY[field]}" if field in _WHY else ""
        raise ModelRefused(f"{where}: {exc}{why}.") from exc


def _described(raw: Mapping[str, Any]) -> AdapterConfig:
    fields = ConfigFields(CONFIG, raw)
    for name in _SILENT:
        fields.get(name)
    if fields.get("peft_type") != "LORA":
        raise UnsupportedConfig(f"{CONFIG} has unsupported peft_type {raw.get('peft_type')!r}")
    fields.allow("task_type", "CAUSAL_LM")
    fields.allow("bias", "none")
    fields.allow("init_lora_weights", *_STARTS)
    rank = _rank(fields.count("r"), "r")
    description = AdapterConfig(
        rank=rank,
        alpha=fields.number("lora_alpha"),
        is_rank_stabilised=fields.flag("use_rslora"),
        ranks={
            pattern: _rank(value, f"rank_pattern of {pattern!r}")
            for pattern, value in _patterns(fields, "rank_pattern").items()
        },
        alphas={
            pattern: ConfigFields(CONFIG, {"alpha_pattern": value}).number("alpha_pattern")
            for pattern, value in _patterns(fields, "alpha_pattern").items()
        },
        targets=_set_of(_names(fields, "target_modules")) or ALL_LINEAR,
        excluded=_set_of(_names(fields, "exclude_modules")),
        layers=_layers(fields),
        layers_patterns=tuple(_listed(_names(fields, "layers_pattern"))),
    )
    fields.check_all_read()
    description.check_patterns()
    return description


def _rank(value: object, field: str) -> int:
    if type(value) is not int or not 0 < value <= MAX_RANK:
        raise UnsupportedConfig(
            f"{CONFIG} has unsupported {field} {value!r}; ranks are 1 to {MAX_RANK}"
        )
    return value


def _layers(fields: ConfigFields) -> frozenset[int] | None:
    """Return the numbers of the adapted layers; None, or a missing field, means all layers."""
    value = fields.get("layers_to_transform")
    numbers = [value] if type(value) is int else value
    if numbers is None or numbers == []:
        return None
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise UnsupportedConfig(f"{CONFIG} has unsupported layers_to_transform {value!r}")
    return frozenset(numbers)


def _names(fields: ConfigFields, key: str) -> str | tuple[str, ...]:
    """Return a string as it is, a list as a tuple, and an empty value as the empty string."""
    value = fields.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnsupportedConfig(f"{CONFIG} has unsupported {key} {value!r}")
    return tuple(value)


def _patterns(fields: ConfigFields, key: str) -> Mapping[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise UnsupportedConfig(f"{CONFIG} has unsupported {key} {value!r}")
    return value


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,) if names else ()


def _set_of(names: str | tuple[str, ...]) -> str | frozenset[str]:
    return names if isinstance(names, str) else frozenset(names)
