"""Cache of parity checks that passed on this machine, so that a later load skips them.

A proof says that our decoder gives what transformers' class gives, for a model described so, with
tensors of these shapes, on a processor of this kind. So it holds until any of that is another, and
is made anew when a file of weights was written again; of a snapshot, which is never written again,
it holds on every machine of the kind. Whether weights are numbers at all is no part of it: that is
looked at whenever they are loaded.
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
    """Return the fact of how the proof of a checkpoint goes, in a dtype on a device.

    `config` is what its config.json is taken to say, `others` what else it follows from.
    """
    causes: list[str | bytes] = [str(dtype), json.dumps(config), *others]
    for path in checkpoint.files:
        status = path.stat()
        version = snapshot_commit(path.parent) or status.st_mtime_ns
        causes += [f"{path.name} {status.st_size} {version}", _header(path)]
    return device_fact("proof", device, *causes)


def device_fact(kind: str, device: torch.device, *causes: str | bytes) -> CacheEntry:
    """Return a fact that follows from these causes, a device, and the packages that compute."""
    versions = package_versions("torch", "transformers", "numba", "triton")
    return CacheEntry.from_inputs(kind, versions, _processor(device), *causes)


def run_once(
    fact: CacheEntry, check: Callable[[], ParityResult], num_layers: int | None = 0
) -> ParityResult:
    """Return the cached result, or make it; one that holds is cached then.

    One of fewer layers than `num_layers`, None being all, is made anew: another machine had no room
    for more.
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
    """Return what a file of safetensors says of its tensors."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _processor(device: torch.device) -> str:
    """Return what is another text for a processor that may round otherwise."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return "\n".join([torch.backends.cpu.get_cpu_capability(), *cpu_lines()])
