"""KV cache size: the pages, and rows of recurrent state, that fit the device's free memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from ...config import EngineConfig
from ...errors import OutOfCacheMemory
from ...kernels.step import MAX_SLOTS
from ...scheduling.step_budget import MAX_SCORED_ROWS
from ...state.groups import most_pages
from ..config.device import StepLimits, step_limits
from .loaded_model import LoadedModel

# A GPU is ours alone; on a CPU other programs and the page cache need a share.
SHARE_OF_FREE = {"cuda": 0.9, "cpu": 0.4}
# If the largest step was measured, this share is left for fragmentation.
SHARE_OF_MEASURED = 0.97
# Typical sequence length by which pages and rows are divided, and sequence rows per snapshot row.
TYPICAL_TOKENS = 1024
ROWS_A_SNAPSHOT = 8
CGROUP = Path("/sys/fs/cgroup")
# For either version: its folder, the limit, the usage, and the names in memory.stat of the idle and
# the mapped files in it.
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
    """The pages of the KV cache, and the longest sequence in tokens: never more than fit.

    Layers with recurrent state have rows, too.
    """

    num_pages: int
    max_model_len: int
    num_rows: int = 0


def compute_kv_cache_size(
    model: LoadedModel,
    settings: EngineConfig,
    *,
    step_bytes: int | None = None,
    free: int | None = None,
) -> KVCacheSize:
    """Return the room in memory: a context that does not fit is shortened.

    `step_bytes` is the memory of the largest step, if it was measured; else it is bounded. `free`
    is the device's free memory, if this process cannot determine it alone.
    Raises `OutOfCacheMemory` if there is none at all, or less than `settings.max_model_len`.
    """
    num_pages, num_rows = divide_memory(model, settings, step_bytes=step_bytes, free=free)
    limits, wanted = step_limits(settings, model.device), model.max_model_len
    room = most_tokens(model, limits, num_pages)
    if room < wanted and settings.max_model_len is not None:
        size = model.page_bytes
        raise OutOfCacheMemory(
            f"--max-model-len {wanted} needs {pages_of(model, limits, wanted) * size:,} bytes of "
            f"KV cache, but there is room for only {room} tokens ({num_pages * size:,} bytes). "
            "Lower it, leave it out to use the longest context that fits, free memory, or set "
            "--kv-cache-memory."
        )
    return KVCacheSize(num_pages, min(room, wanted), num_rows)


def pages_of(model: LoadedModel, limits: StepLimits, num_tokens: int) -> int:
    """Return the most pages that a sequence of `num_tokens` holds, in all groups of layers."""
    size, step_tokens = model.backend.page_size, limits.max_num_batched_tokens
    return sum(
        most_pages(
            num_tokens, size, group.visible.most_visible if group.visible else 0, step_tokens
        )
        for group in model.layer_groups
    )


def most_tokens(model: LoadedModel, limits: StepLimits, num_pages: int) -> int:
    """Return how many tokens a single sequence may have, in whole pages."""
    size = model.backend.page_size
    fitting = bisect_right(
        range(num_pages + 1), num_pages, key=lambda pages: pages_of(model, limits, pages * size)
    )
    return (fitting - 1) * size


def divide_memory(
    model: LoadedModel,
    settings: EngineConfig,
    *,
    step_bytes: int | None = None,
    free: int | None = None,
) -> tuple[int, int]:
    """Return the pages and rows to allocate: as many as fit and can be in use.

    If memory is short it is divided for sequences of `TYPICAL_TOKENS`.
    """
    page_size = model.backend.page_size
    size, row_size = model.page_bytes, model.row_bytes
    limits = step_limits(settings, model.device)
    budget = settings.kv_cache_memory
    if budget is None:
        share = SHARE_OF_FREE[model.device.type] if step_bytes is None else SHARE_OF_MEASURED
        free = free_bytes(model.device) if free is None else free
        free -= _activation_bytes(model, limits) if step_bytes is None else step_bytes
        budget = int(free * share)
    useful = limits.max_num_seqs * pages_of(model, limits, model.max_model_len)
    typical = pages_of(model, limits, min(model.max_model_len, TYPICAL_TOKENS)) * size
    num_rows = rows_of(budget, row_size, typical, limits.max_num_seqs)
    budget -= num_rows * row_size
    pages = min(budget // size if size else useful, useful, MAX_SLOTS // page_size)
    if pages < 1 or budget < 0:
        row = f" and {row_size:,} for the recurrent state of one sequence" if row_size else ""
        raise OutOfCacheMemory(
            f"The KV cache needs at least {size:,} bytes for one page of {page_size} tokens{row}, "
            f"but only {max(budget + num_rows * row_size, 0):,} are available: free memory, use a "
            "smaller model, or set --kv-cache-memory."
        )
    return pages, num_rows


def rows_of(budget: int, row_size: int, typical: int, max_num_seqs: int) -> int:
    """Return the rows of sequences whose pages typically take `num_bytes`, and of snapshots."""
    if not row_size:
        return 0
    with_snapshots = row_size + -(-row_size // ROWS_A_SNAPSHOT)
    num_rows = max(1, min(budget // (with_snapshots + typical), max_num_seqs))
    return num_rows + num_rows // ROWS_A_SNAPSHOT


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
    rows = limits.max_num_seqs + 2 * MAX_SCORED_ROWS  # for drafts, and for scored prompts
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
    """Return the memory left by the container's limit, by version 2 or 1 of control groups.

    The page cache counts as used until it is reclaimed, but is free when it is idle. Mapped files
    are in use: the weights may be among them.
    """
    for folder, most, used, stats in CGROUP_FILES:
        try:
            left = int(_cgroup_text(folder, most)) - int(_cgroup_text(folder, used))
        except (OSError, ValueError):
            continue
        return left + _idle_file_bytes(folder, *stats)
    return None


def _idle_file_bytes(folder: str, idle: str, mapped: str) -> int:
    """Return the size of idle, unmapped files in `memory.stat`; 0 if it is not there."""
    try:
        words = _cgroup_text(folder, "memory.stat").split()
        numbers = dict(zip(words[::2], map(int, words[1::2]), strict=False))
    except (OSError, ValueError):
        return 0
    return max(numbers.get(idle, 0) - numbers.get(mapped, 0), 0)


def _cgroup_text(folder: str, name: str) -> str:
    return (CGROUP / folder / name).read_text(encoding="ascii")
