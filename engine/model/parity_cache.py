"""Cache of parity checks that passed on this machine, so that later loads skip them.

A check shows that our decoder computes the same as transformers' class, for one config, tensors of
these shapes, and one kind of processor. Its result is valid until any of these changes. A folder's
check is repeated when a file of weights was rewritten; a snapshot never changes, so its check is
valid on every machine of the kind. Whether weights are finite numbers is not part of it: every
load checks that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..storage.disk_cache import CacheEntry, package_versions
from ..storage.hub import snapshot_commit
from ..storage.processor import cpu_lines
from .native import ParityResult
from .weights.checkpoint import Checkpoint


def parity_fact(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *others: str,
) -> CacheEntry:
    """Return the fact that identifies the check of a checkpoint, in a dtype on a device.

    `config` is its config.json after overrides, `others` are further inputs.
    """
    causes: list[str | bytes] = [str(dtype), json.dumps(config), *others]
    for path in checkpoint.files:
        status = path.stat()
        version = snapshot_commit(path.parent) or status.st_mtime_ns
        causes += [f"{path.name} {status.st_size} {version}", _header(path)]
    return device_fact("proof", device, *causes)


def device_fact(kind: str, device: torch.device, *causes: str | bytes) -> CacheEntry:
    """Return a fact for these inputs, a device, and the packages that compute."""
    versions = package_versions("torch", "transformers", "numba", "triton")
    return CacheEntry.from_inputs(kind, versions, _processor(device), *causes)


def run_once(
    fact: CacheEntry, check: Callable[[], ParityResult], num_layers: int | None = 0
) -> ParityResult:
    """Return the cached result, or run the check; a result that passed is cached.

    A cached result with fewer layers than `num_layers`, None being all, is computed again: another
    machine may have lacked the memory.
    """
    data = fact.load()
    if data is not None:
        result = ParityResult(**json.loads(data))
        covered = result.num_layers
        if covered is None or (num_layers is not None and num_layers <= covered):
            return result
    result = check()
    if result.holds:
        fact.save(json.dumps(asdict(result)).encode())
    return result


def _header(path: Path) -> bytes:
    """Return the header of a safetensors file."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _processor(device: torch.device) -> str:
    """Return a text that differs for processors that may round differently."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return "\n".join([torch.backends.cpu.get_cpu_capability(), *cpu_lines()])
