"""Autotuned kernel configs: tile sizes, warps and stages, read from `tuned_tiles.json`.

There is no autotuning at run time: `bench.gpu.choose` writes the file on a GPU. It has a list for
each kernel; of the entries whose `where` matches, the most specific one wins, and of equals the
last. Each list has a default entry that always matches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

FILE = Path(__file__).with_name("tuned_tiles.json")
FIELDS = {"where", "sizes", "num_warps", "num_stages"}
MAX_WARPS = 32

Shape = frozenset[tuple[str, int | str]]
# A kernel, and the architecture and shape that it is launched with.
ConfigKey = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Config of a kernel: tile sizes by their names in the kernel, warps and pipeline stages."""

    sizes: Mapping[str, int]
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TunedConfig:
    """Tuned config, and the architecture and shape that it applies to."""

    where: Shape
    config: KernelConfig


# Set by `override_configs`: configs that replace the file's, and the keys that were looked up.
_overrides: dict[ConfigKey, KernelConfig] = {}
_requested: set[ConfigKey] = set()
_caches: list[Callable[[], None]] = []  # functions that empty each cache of choices

F = TypeVar("F", bound=Callable[..., Any])


def cached_choice(function: F) -> F:
    """Cache a function's choice of configs, until `override_configs` begins or ends."""
    cached = cache(function)
    _caches.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


@cached_choice
def config_for(kernel: str, arch: str, **shape: int | str) -> KernelConfig:
    """Return the config of a kernel for an architecture such as "sm_90" and a shape in numbers."""
    return lookup_config(kernel, frozenset({"arch": arch, **shape}.items()))


@contextmanager
def override_configs(choices: Mapping[ConfigKey, KernelConfig]) -> Iterator[set[ConfigKey]]:
    """Use these configs for exactly these keys; yield the set of keys that are looked up."""
    _clear_caches()
    _requested.clear()
    _overrides.update(choices)
    try:
        yield _requested
    finally:
        _overrides.clear()
        _clear_caches()


def _clear_caches() -> None:
    for clear in _caches:
        clear()


@cached_choice
def lookup_config(kernel: str, shape: Shape) -> KernelConfig:
    """Look up the config of a kernel for an architecture and shape."""
    _requested.add((kernel, shape))
    if (kernel, shape) in _overrides:
        return _overrides[kernel, shape]
    fits = [entry for entry in _tuned_configs()[kernel] if entry.where <= shape]
    return max(reversed(fits), key=lambda entry: len(entry.where)).config


@cache
def _tuned_configs() -> dict[str, list[TunedConfig]]:
    return parse_configs(json.loads(FILE.read_text(encoding="utf-8")))


def parse_configs(data: Mapping[str, Any]) -> dict[str, list[TunedConfig]]:
    """Parse the entries of each kernel; raises `ValueError`, with the place, if one is invalid."""
    entries = {
        kernel: [_parse_config(one, f"{kernel}[{index}]") for index, one in enumerate(listed)]
        for kernel, listed in data.items()
    }
    for kernel, listed in entries.items():
        places = [entry.where for entry in listed]
        if frozenset() not in places:
            raise ValueError(f"{kernel}: one entry must have an empty `where`")
        if len(set(places)) < len(places):
            raise ValueError(f"{kernel}: two entries have the same `where`")
    return entries


def _parse_config(data: Mapping[str, Any], place: str) -> TunedConfig:
    if unknown := data.keys() - FIELDS:
        raise ValueError(f"{place}: unknown {min(unknown)}")
    sizes, warps, stages = data["sizes"], data["num_warps"], data["num_stages"]
    for name, size in {**sizes, "num_warps": warps}.items():
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise ValueError(f"{place}: {name} is {size}, not a power of two")
    if warps > MAX_WARPS:
        raise ValueError(f"{place}: num_warps is {warps}, more than {MAX_WARPS}")
    if not isinstance(stages, int) or stages < 1:
        raise ValueError(f"{place}: num_stages is {stages}, not 1 or more")
    return TunedConfig(frozenset(data.get("where", {}).items()), KernelConfig(sizes, warps, stages))
