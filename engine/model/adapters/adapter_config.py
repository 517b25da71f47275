"""LoRA adapter config (adapter_config.json): its target modules, their ranks and scales.

As PEFT reads it. What would compute something else than x · W + scale · (x · A) · B is refused by
name, and so is every field that nobody here knows, unless it says nothing.
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
# vLLM takes no adapter of a higher rank either.
MAX_RANK = 512
# What is read is the trained tensors: how they began, or were trained, says nothing of them.
_SILENT = """
    auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode
    loftq_config megatron_config megatron_core peft_version qalora_group_size revision
    runtime_config
""".split()
# With another start PEFT changes the weights of the model, too.
_STARTS = (True, "gaussian", "eva", "orthogonal")
_WHY = {
    "use_dora": "DoRA changes the length of weights, too; merge it into the model",
    "modules_to_save": "it replaces whole modules of the model; merge it into the model",
    "trainable_token_indices": "it changes embeddings; merge it into the model",
    "target_parameters": "it adapts parameters that are no linear module's, such as experts",
    "layer_replication": "it makes another model of more layers",
    "lora_bias": "biases are not adapted; merge it into the model",
    "bias": "biases are not adapted; merge it into the model",
    "init_lora_weights": "it began by changing the model; convert it to plain LoRA by PEFT first",
    "alora_invocation_tokens": "it begins in mid-prompt, by certain tokens",
    "task_type": "it is not for a model that writes text",
    "peft_type": "only LoRA is served",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales of modules by their names, and which modules are meant.

    `targets` are a pattern of whole names, or ends of names. `layers` bounds them to some layers,
    whose number follows one of `layers_patterns` in a name.
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
        """Raise `PatternRefused` for what is no pattern, whatever the modules of the model are."""
        for key, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            self.patterns.first_of(key, patterns, "")
        for key, names in (("target_modules", self.targets), ("exclude_modules", self.excluded)):
            self._is_among(key, "", names)
        for pattern in self.layers_patterns:
            self.patterns.match("layers_pattern", pattern, "", IN_LAYER)

    def rank_of(self, module: str) -> int:
        """Return the rank of what is added to a module."""
        pattern = self.patterns.first_of("rank_pattern", self.ranks, module)
        return self.rank if pattern is None else self.ranks[pattern]

    def scale_of(self, module: str) -> float:
        """Return what (x · A) · B is multiplied by."""
        rank = self.rank_of(module)
        pattern = self.patterns.first_of("alpha_pattern", self.alphas, module)
        alpha = self.alpha if pattern is None else self.alphas[pattern]
        return alpha / (sqrt(rank) if self.is_rank_stabilised else rank)

    def takes(self, module: str) -> bool:
        """Say whether a module is meant; `ALL_LINEAR` means every one that is not the head."""
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
        """Say whether a name is one of some, or ends with one after a dot; a text is a pattern."""
        if isinstance(names, str):
            return self.patterns.match(key, names, module) is not None
        parts = module.split(".")
        return any(".".join(parts[start:]) in names for start in range(len(parts)))


def read_adapter_config(path: Path, where: str) -> AdapterConfig:
    """Return what a file says; `ModelRefused` begins with `where` and says what is not served."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelRefused(f"{where}: {CONFIG} is no JSON: {first_line_of(exc)}") from exc
    if not isinstance(said, dict):
        raise ModelRefused(f"{where}: {CONFIG} holds no JSON object.")
    try:
        return _described(said)
    except PatternRefused as exc:
        raise ModelRefused(f"{where}: {CONFIG} says {exc}.") from exc
    except UnsupportedConfig as exc:
        field = re.split(r"[ ,]", str(exc).partition(" says ")[2])[0]
        why = f": {_WHY[field]}" if field in _WHY else ""
        raise ModelRefused(f"{where}: {exc}{why}.") from exc


def _described(said: Mapping[str, Any]) -> AdapterConfig:
    fields = ConfigFields(CONFIG, said)
    for name in _SILENT:
        fields.get(name)
    if fields.get("peft_type") != "LORA":
        raise UnsupportedConfig(f"{CONFIG} says peft_type {said.get('peft_type')!r}")
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
        raise UnsupportedConfig(f"{CONFIG} says {field} {value!r}; ranks are 1 to {MAX_RANK}")
    return value


def _layers(fields: ConfigFields) -> frozenset[int] | None:
    """Return the numbers of layers; none of them, or no field, are all."""
    value = fields.get("layers_to_transform")
    numbers = [value] if type(value) is int else value
    if numbers is None or numbers == []:
        return None
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise UnsupportedConfig(f"{CONFIG} says layers_to_transform {value!r}")
    return frozenset(numbers)


def _names(fields: ConfigFields, key: str) -> str | tuple[str, ...]:
    """Return a text as it is, a list of them as a tuple; what says nothing is the empty text."""
    value = fields.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnsupportedConfig(f"{CONFIG} says {key} {value!r}")
    return tuple(value)


def _patterns(fields: ConfigFields, key: str) -> Mapping[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise UnsupportedConfig(f"{CONFIG} says {key} {value!r}")
    return value


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,) if names else ()


def _set_of(names: str | tuple[str, ...]) -> str | frozenset[str]:
    return names if isinstance(names, str) else frozenset(names)
