"""KV cache size: the pages that fit the device's free memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import EngineConfig
from ..errors import OutOfCacheMemory
from ..kernels.step import MAX_SLOTS
from ..scheduling.scheduler import MAX_SCORED_ROWS
from .device import StepLimits, step_limits
from .loaded_model import LoadedModel

# A GPU is ours alone; on a CPU the machine's other programs and page cache want their share.
SHARE_OF_FREE = {"cuda": 0.9, "cpu": 0.4}
# Where the largest step was measured, what is left is for pieces of memory that fit nowhere.
SHARE_OF_MEASURED = 0.97
CGROUP = Path("/sys/fs/cgroup")
# Of either version: its folder, the limit, what is used, and of that the names in memory.stat of
# idle and of mapped files.
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("inactive_file", "file_mapped")),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_mapped_file"),
    ),
)


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """The pages of the KV cache, and the tokens that one sequence may have: never more than fit."""

    num_pages: int
    max_model_len: int


def compute_kv_cache_size(
    model: LoadedModel,
    settings: EngineConfig,
    *,
    step_bytes: int | None = None,
    free: int | None = None,
) -> KVCacheSize:
    """Return the room that there is: a context that does not fit is shortened to what does.

    `step_bytes` is what the largest step takes, where that was measured; else it is bounded. `free`
    is what the device has left, where that is not this process's alone to say.
    Raises `OutOfCacheMemory` when there is none at all, or less than `settings.max_model_len`.
    """
    num_pages = count_pages(model, settings, step_bytes=step_bytes, free=free)
    page_size, wanted = model.backend.page_size, model.max_model_len
    room = num_pages * page_size
    if room < wanted and settings.max_model_len is not None:
        size = model.page_bytes
        raise OutOfCacheMemory(
            f"--max-model-len {wanted} needs {-(-wanted // page_size) * size:,} bytes of "
            f"KV cache, but there is room for {room} tokens ({num_pages * size:,} bytes): lower "
            "it, leave it out to serve what fits, free memory, or set --kv-cache-memory."
        )
    return KVCacheSize(num_pages, min(room, wanted))


def count_pages(
    model: LoadedModel,
    settings: EngineConfig,
    *,
    step_bytes: int | None = None,
    free: int | None = None,
) -> int:
    """Return the pages to allocate: what fits the memory, and no more than can ever be in use."""
    page_size = model.backend.page_size
    size = model.page_bytes
    limits = step_limits(settings, model.device)
    budget = settings.kv_cache_memory
    if budget is None:
        share = SHARE_OF_FREE[model.device.type] if step_bytes is None else SHARE_OF_MEASURED
        free = free_bytes(model.device) if free is None else free
        free -= _activation_bytes(model, limits) if step_bytes is None else step_bytes
        budget = int(free * share)
    useful = limits.max_num_seqs * -(-model.max_model_len // page_size)
    pages = min(budget // size, useful, MAX_SLOTS // page_size)
    if pages < 1:
        raise OutOfCacheMemory(
            f"The KV cache needs at least {size:,} bytes for one page of {page_size} "
            f"tokens, but has {max(budget, 0):,}: free memory, use a smaller model, or set "
            "--kv-cache-memory."
        )
    return pages


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process could still take on `device`, by its own account."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    left = _cgroup_left()
    return _meminfo_available() if left is None else min(left, _meminfo_available())


def _activation_bytes(model: LoadedModel, limits: StepLimits) -> int:
    """Bound one step's transient tensors: hidden states of all tokens and logits of all rows."""
    widths = 8 * model.hidden_size + 3 * model.max_intermediate_size
    per_step = limits.max_num_batched_tokens * widths * model.dtype.itemsize
    rows = limits.max_num_seqs + MAX_SCORED_ROWS
    return per_step + rows * model.vocab_size * (model.dtype.itemsize + 4)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_left() -> int | None:
    """Return what the container's limit leaves, by version 2 or 1 of control groups.

    Files that were read stay in memory and count as used until somebody needs it: what is of no
    use now is free. Files that are mapped are in use: the weights may be among them.
    """
    for folder, most, used, stats in CGROUP_FILES:
        try:
            left = int(_cgroup_text(folder, most)) - int(_cgroup_text(folder, used))
        except (OSError, ValueError):
            continue
        return left + _idle_file_bytes(folder, *stats)
    return None


def _idle_file_bytes(folder: str, idle: str, mapped: str) -> int:
    """Return what `memory.stat` says of idle files that are not mapped; 0 where it says nothing."""
    try:
        words = _cgroup_text(folder, "memory.stat").split()
        numbers = dict(zip(words[::2], map(int, words[1::2]), strict=False))
    except (OSError, ValueError):
        return 0
    return max(numbers.get(idle, 0) - numbers.get(mapped, 0), 0)


def _cgroup_text(folder: str, name: str) -> str:
    return (CGROUP / folder / name).read_text(encoding="ascii")
