"""Loading of adapters from folders, with checks of their tensors against the model's modules.

An adapter that does not fit as a whole is refused with the reason: a missing or surplus tensor, a
wrong shape, or a number that is not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...config import EngineConfig
from ...errors import ModelRefused, first_line_of
from ...kernels.adapters import AdapterWeights
from ...kernels.communicator import Shard
from ...storage.hub import find_file
from ..config.architecture import Architecture
from ..config.hf_config import HFConfig
from ..families.registry import FAMILIES
from ..weights.checkpoint import FLOATS, check_inside, some
from ..weights.sanity import check_numbers
from ..weights.weight_map import weights_of
from ..weights.weight_parts import WHOLE, Place, Weight
from ..weights.weights import TEXT_OF_WHOLE
from .adapter_config import (
    ALL_LINEAR,
    CONFIG,
    AdapterConfig,
    read_adapter_config,
)
from .patterns import PatternRefused

TENSORS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
# PEFT's prefix for the model that it wraps, and the two halves of a low-rank product.
WRAPPED = "base_model.model."
WEIGHT = ".weight"
_HALF = re.compile(r"(.+)\.lora_([AB])\.weight")
# Products of a layer that can be adapted; those of experts are more than one matrix.
LARGEST_PRODUCT = 1e4
"""Largest change of a weight by one rank: in trained models it is below 1, or a few hundred."""

ROLES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Site:
    """A module's place in the weight of a role: its rows begin at `start`."""

    role: str
    place: Place
    start: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Module:
    """LoRA weights of one module, which add `scale` · `up [O, R]` · `down [R, I]` to its weight."""

    down: Tensor
    up: Tensor
    scale: float

    def delta(self) -> Tensor:
        """Return that product in fp32, `[O, I]`."""
        return self.scale * (self.up.float() @ self.down.float())


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: its name, the folder of its files, and its modules by name."""

    name: str
    folder: Path
    modules: Mapping[str, Module]

    def placed(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> dict[str, AdapterWeights]:
        """Return a rank's additions to the products of each role, for merged weights.

        Modules of layers that `architecture` leaves out are left out.
        """
        by_role: dict[str, list[tuple[Site, Module]]] = {}
        sites = sites_of(architecture)
        for name, site in sites.items():
            if name in self.modules:
                by_role.setdefault(site.role, []).append((site, self.modules[name]))
        heights = {weight.role: weight.shape[0] for weight in weights_of(architecture)}
        placed = {}
        for weight in weights_of(architecture, shard=shard):
            if weight.role in by_role:
                rows, columns = _own(weight, sites)
                whole = _joined(heights[weight.role], by_role[weight.role])
                own = AdapterWeights(whole.down[:, columns], whole.up[rows])
                placed[weight.role] = AdapterWeights(
                    own.down.to(device, dtype), own.up.to(device, dtype)
                )
        return placed


def read_adapters(
    settings: EngineConfig, hf_config: HFConfig, architecture: Architecture
) -> tuple[Adapter, ...]:
    """Return the adapters of the settings, in order; `ModelRefused` names one that does not fit."""
    if not settings.lora_modules:
        return ()
    if not FAMILIES[hf_config.model_type].takes_adapters:
        raise ModelRefused(
            f"{settings.model}: adapters are not supported for {hf_config.model_type} models: "
            "merge the adapter into the model."
        )
    return tuple(
        _read(name, path, settings, hf_config, architecture) for name, path in settings.lora_modules
    )


def sites_of(architecture: Architecture) -> dict[str, Site]:
    """Return the modules that may be adapted, by their names in checkpoints."""
    sites = {}
    for weight in weights_of(architecture):
        if weight.role.partition(".")[2] in ROLES and len(weight.shape) == 2:  # not experts
            start = 0
            for part in weight.parts:
                height, width = part.shape
                name = part.key.removesuffix(WEIGHT)
                sites[name] = Site(weight.role, part.place, start, height, width)
                start += height
    return sites


def _own(weight: Weight, sites: Mapping[str, Site]) -> tuple[Tensor, slice]:
    """Return a rank's rows and columns of a merged weight."""
    starts = [sites[part.key.removesuffix(WEIGHT)].start for part in weight.parts]
    taken = [(*part.taken, *map(range, part.shape[len(part.taken) :])) for part in weight.parts]
    rows = [
        torch.arange(start + own.start, start + own.stop)
        for start, (own, _) in zip(starts, taken, strict=True)
    ]
    columns = taken[0][1]  # the same for all parts
    return torch.cat(rows), slice(columns.start, columns.stop)


def _joined(height: int, parts: Sequence[tuple[Site, Module]]) -> AdapterWeights:
    """Return modules side by side: each reads its own rows of `down` and fills its own of `up`."""
    down = torch.cat([module.down.float() for _, module in parts])
    up = torch.zeros(height, len(down))
    column = 0
    for site, module in parts:
        rank = len(module.down)
        own = site.place(up[:, column : column + rank])
        own.copy_((module.scale * module.up.float()).view(own.shape))
        column += rank
    return AdapterWeights(down, up)


def _read(
    name: str,
    path: str,
    settings: EngineConfig,
    hf_config: HFConfig,
    architecture: Architecture,
) -> Adapter:
    where = f"adapter {name} ({path})"
    folder = _folder(path, where)
    adapter_config = read_adapter_config(folder / CONFIG, where)
    sites = sites_of(architecture)
    tensors = _tensors(folder, where, architecture, is_multimodal=hf_config.is_multimodal)
    modules = {}
    try:
        _check_modules(where, tensors, adapter_config, architecture, hf_config)
        for module, halves in tensors.items():
            rank, site = adapter_config.rank_of(module), sites[module]
            _check_halves(where, module, halves, rank, site)
            _check_product(where, module, halves, adapter_config.scale_of(module))
            modules[module] = Module(halves["A"], halves["B"], adapter_config.scale_of(module))
    except PatternRefused as exc:
        raise ModelRefused(f"{where}: {CONFIG} has unsupported {exc}.") from exc
    most = settings.max_lora_rank
    highest = max(len(module.down) for module in modules.values())
    if most is not None and highest > most:
        raise ModelRefused(
            f"{where}: its rank is {highest}, above --max-lora-rank {most}: use "
            f"--max-lora-rank {highest}."
        )
    return Adapter(name, folder, modules)


def _folder(path: str, where: str) -> Path:
    """Return the folder of an adapter's files, fetched if need be; refuse any other folder."""
    try:
        config, tensors = find_file(path, CONFIG), find_file(path, TENSORS)
    except (OSError, ValueError) as exc:
        raise ModelRefused(f"{where}: cannot be read: {first_line_of(exc)}") from exc
    if config is None:
        raise ModelRefused(f"{where}: has no {CONFIG}: it is not an adapter saved by PEFT.")
    if tensors is None:
        others = [file for file in PICKLES if find_file(path, file)]
        unread = f" ({others[0]} is not read: a pickle may run any code)" if others else ""
        raise ModelRefused(
            f"{where}: has no {TENSORS}{unread}; save the adapter with PEFT's save_pretrained."
        )
    for file in (config, tensors):
        check_inside(where, "adapter", config.parent, file.name)
    return config.parent


def _tensors(
    folder: Path, where: str, architecture: Architecture, *, is_multimodal: bool
) -> dict[str, dict[str, Tensor]]:
    """Return the halves A and B of each module in the file; refuse any other tensor."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                half = _HALF.fullmatch(key)
                if half is None or not half[1].startswith(WRAPPED):
                    raise ModelRefused(f"{where}: contains {key}, {_why_not(key)}.")
                module = _text_name(half[1].removeprefix(WRAPPED), is_multimodal=is_multimodal)
                kind = file.get_slice(key).get_dtype()
                if kind not in FLOATS:
                    raise ModelRefused(
                        f"{where}: {key} is stored as {kind}, which is not a floating-point type."
                    )
                tensors.setdefault(module, {})[half[2]] = file.get_tensor(key)
    except (OSError, SafetensorError) as exc:
        raise ModelRefused(
            f"{where}: {TENSORS} is truncated or not a safetensors file ({exc}): copy or fetch it "
            "again."
        ) from exc
    if not tensors:
        raise ModelRefused(f"{where}: {TENSORS} contains no tensors.")
    _check_names(where, tensors, architecture)
    return tensors


def _why_not(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return "which belongs to DoRA: merge the adapter into the model"
    if "lora_embedding" in key:
        return "an adapter of embeddings, which is not supported: merge the adapter into the model"
    return "which is not part of a LoRA adapter"


def _text_name(module: str, *, is_multimodal: bool) -> str:
    """Return the name of a module in the text model, without the prefixes of larger models."""
    for pattern, instead in TEXT_OF_WHOLE.items() if is_multimodal else ():
        module = re.sub(pattern, instead, module)
    return module


def _check_names(where: str, modules: Collection[str], architecture: Architecture) -> None:
    """Refuse modules that the model does not have or that cannot be adapted."""
    sites = sites_of(architecture)
    others = sorted(set(modules) - sites.keys())
    if not others:
        return
    known = {part.key.removesuffix(".weight") for w in weights_of(architecture) for part in w.parts}
    known |= {architecture.names.lm_head, architecture.names.embed_tokens}
    if strange := [name for name in others if name not in known and ".experts" not in name]:
        raise ModelRefused(
            f"{where}: adapts {some(strange)}, which {architecture.class_name} does not have: it "
            "was trained for another model."
        )
    raise ModelRefused(
        f"{where}: adapts {some(others)}: only adapters of attention and of MLPs without experts "
        "are supported, not of embeddings, the head or experts; merge the adapter into the model."
    )


def _check_modules(
    where: str,
    modules: Collection[str],
    adapter_config: AdapterConfig,
    architecture: Architecture,
    hf_config: HFConfig,
) -> None:
    """Refuse tensors that do not match the modules targeted by the config."""
    meant = {
        name
        for name in sites_of(architecture)
        if any(
            adapter_config.takes(form)
            for form in _forms(name, is_multimodal=hf_config.is_multimodal)
        )
    }
    if adapter_config.targets == ALL_LINEAR and any(block.experts for block in architecture.blocks):
        meant = set(modules)  # versions of PEFT differ in whether experts count
    if lost := sorted(meant - set(modules)):
        raise ModelRefused(
            f"{where}: lacks the tensors of {some(lost)}, which its {CONFIG} targets: one of the "
            "two files belongs to another adapter or is incomplete."
        )
    if others := sorted(set(modules) - meant):
        raise ModelRefused(
            f"{where}: contains tensors of {some(others)}, which its {CONFIG} does not target: one "
            "of the two files belongs to another adapter."
        )


def _forms(name: str, *, is_multimodal: bool) -> Iterator[str]:
    """Yield a module's name in the text model, and in models of more than text."""
    yield name
    if is_multimodal:
        yield f"language_model.{name}"
        yield re.sub(r"^model\.", "model.language_model.", name)


def _check_halves(
    where: str, module: str, halves: Mapping[str, Tensor], rank: int, site: Site
) -> None:
    """Refuse modules with a missing half, a wrong shape, or a number that is not finite."""
    for half, shape in (("A", (rank, site.width)), ("B", (site.height, rank))):
        name = f"{module}.lora_{half}.weight"
        if half not in halves:
            raise ModelRefused(f"{where}: lacks {name}.")
        if halves[half].shape != shape:
            raise ModelRefused(
                f"{where}: {name} has shape {[*halves[half].shape]} instead of {[*shape]}: it was "
                f"trained for another model, or {CONFIG} belongs to another adapter."
            )
        check_numbers(where, [(name, halves[half])])


def _check_product(where: str, module: str, halves: Mapping[str, Tensor], scale: float) -> None:
    """Refuse halves whose product is so large that the model's own weights are lost in it."""
    largest = abs(scale) * math.prod(float(half.abs().max()) for half in halves.values())
    if not largest <= LARGEST_PRODUCT:
        raise ModelRefused(
            f"{where}: {module} adds numbers up to {largest:.2g} to weights, but trained adapters "
            f"add less than {LARGEST_PRODUCT:,.0f}: its files are damaged, or `lora_alpha` in "
            f"{CONFIG} is wrong."
        )
