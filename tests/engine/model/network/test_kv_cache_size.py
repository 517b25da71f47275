"""The number of pages: by free memory, requested memory, and the most that can be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import OutOfCacheMemory
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.reference import ReferenceAttention
from tidemill.engine.model.network import kv_cache_size
from tidemill.engine.model.network.loaded_model import LoadedModel, Network

CPU = torch.device("cpu")
SHAPES = (AttentionShape(4, 2, 8, 8, 1.0), AttentionShape(4, 1, 24, 16, 1.0))
# Two layers of 2·(8+8) and 1·(24+16) numbers a token, 16 tokens a page, 4 bytes a number.
PAGE_BYTES = (32 + 40) * 16 * 4


def model(*, max_model_len: int = 100) -> LoadedModel:
    """Return a model of which only the sizes matter."""
    network = cast("Network", None)
    sizes = {"hidden_size": 64, "max_intermediate_size": 128}
    return LoadedModel(
        network, SHAPES, ReferenceAttention, torch.float32, CPU, 500, max_model_len, **sizes
    )


def settings(**changes: Any) -> EngineConfig:
    """Return settings for few sequences."""
    return EngineConfig("m", **({"max_num_seqs": 4, "max_num_batched_tokens": 256} | changes))


@pytest.fixture(name="machine")
def fixture_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 10 GB free in all, whose control group is the returned folder's."""
    monkeypatch.setattr(kv_cache_size, "CGROUP", tmp_path)
    monkeypatch.setattr(kv_cache_size, "_meminfo_available", lambda: 10 * 10**9)
    return tmp_path


def test_a_pages_size_matches_its_allocation() -> None:
    """Keys and values of every layer, of unequal widths too."""
    assert ReferenceAttention.page_bytes(SHAPES, torch.float32) == PAGE_BYTES
    attention = ReferenceAttention(SHAPES, 7, torch.bfloat16, CPU)
    tensors = [*attention.keys, *attention.values]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert total == 7 * ReferenceAttention.page_bytes(SHAPES, torch.bfloat16)
    assert not any(tensor.any() for tensor in tensors)


def test_requested_memory_is_filled_with_whole_pages() -> None:
    """No byte more is used."""
    requested = 5 * PAGE_BYTES
    assert kv_cache_size.divide_memory(model(), settings(kv_cache_memory=requested))[0] == 5
    assert kv_cache_size.divide_memory(model(), settings(kv_cache_memory=requested - 1))[0] == 4


def test_no_more_pages_than_can_ever_be_in_use() -> None:
    """Every sequence as long as it may be: 4 of 100 tokens in pages of 16."""
    assert kv_cache_size.divide_memory(model(), settings(kv_cache_memory=10**12))[0] == 4 * 7
    assert (
        kv_cache_size.divide_memory(model(max_model_len=96), settings(kv_cache_memory=10**12))[0]
        == 4 * 6
    )


def test_no_more_pages_than_a_steps_numbers_reach() -> None:
    """Slots are int32: beyond them they would wrap, and sequences share what is not theirs."""
    many = settings(kv_cache_memory=10**15, max_num_seqs=256)
    assert kv_cache_size.divide_memory(model(max_model_len=10**8), many)[0] == 2**31 // 16


def test_a_context_that_does_not_fit_is_shortened_to_whole_pages() -> None:
    """Lines that request the rest of the context then run; a context that fits is unchanged."""
    few = settings(kv_cache_memory=5 * PAGE_BYTES)
    assert kv_cache_size.compute_kv_cache_size(
        model(max_model_len=1000), few
    ) == kv_cache_size.KVCacheSize(5, 80)
    assert kv_cache_size.compute_kv_cache_size(
        model(max_model_len=80), few
    ) == kv_cache_size.KVCacheSize(5, 80)
    assert kv_cache_size.compute_kv_cache_size(
        model(max_model_len=79), few
    ) == kv_cache_size.KVCacheSize(5, 79)


def test_a_requested_context_fits_or_is_refused() -> None:
    """It is never shortened: the message contains the required and the available memory."""
    few = settings(kv_cache_memory=5 * PAGE_BYTES, max_model_len=81)
    with pytest.raises(OutOfCacheMemory, match="--max-model-len 81 needs") as refused:
        kv_cache_size.compute_kv_cache_size(model(max_model_len=81), few)
    assert f"{6 * PAGE_BYTES:,} bytes" in str(refused.value)
    assert f"80 tokens ({5 * PAGE_BYTES:,} bytes)" in str(refused.value)
    fits = settings(kv_cache_memory=5 * PAGE_BYTES, max_model_len=80)
    assert kv_cache_size.compute_kv_cache_size(
        model(max_model_len=80), fits
    ) == kv_cache_size.KVCacheSize(5, 80)


def test_less_than_a_page_is_refused_with_the_way_out() -> None:
    """The message contains the required memory, the available memory, and the option."""
    with pytest.raises(OutOfCacheMemory, match="--kv-cache-memory") as refused:
        kv_cache_size.divide_memory(model(), settings(kv_cache_memory=PAGE_BYTES - 1))[0]
    assert f"{PAGE_BYTES:,}" in str(refused.value)
    assert f"{PAGE_BYTES - 1:,}" in str(refused.value)


def test_by_default_the_cache_is_a_share_of_free_memory(machine: Path) -> None:
    """Less what one step needs; the rest is other programs'."""
    del machine
    most = settings(max_num_seqs=2000, max_num_batched_tokens=4096)
    pages = kv_cache_size.divide_memory(model(max_model_len=10**6), most)[0]
    share = kv_cache_size.SHARE_OF_FREE["cpu"]
    assert 0.8 * share * 10**10 < pages * PAGE_BYTES < share * 10**10


def test_where_the_largest_step_was_measured_nearly_all_else_is_pages(machine: Path) -> None:
    """Three hundredths are left for pieces that fit nowhere, not six tenths for other programs."""
    del machine
    most = settings(max_num_seqs=2000, max_num_batched_tokens=2000)
    pages = kv_cache_size.divide_memory(model(max_model_len=10**7), most, step_bytes=4 * 10**9)[0]
    assert pages == int(0.97 * 6 * 10**9) // PAGE_BYTES


VERSIONS = {
    2: ("", "memory.max", "memory.current", "inactive_file", "file_mapped"),
    1: (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_mapped_file",
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("stats", "free"),
    [
        ("anon 500\n{0} 0\n{1} 0\n", 2 * 10**9),
        ("anon 500\n{0} 700000000\n{1} 0\n", 27 * 10**8),
        ("anon 500\n{0} 700000000\n{1} 600000000\n", 21 * 10**8),
        ("anon 500\n{0} 700000000\n{1} 900000000\n", 2 * 10**9),
        ("", 2 * 10**9),
    ],
    ids=["none", "page-cache", "weights", "mapped", "no-limit"],
)
def test_a_control_group_with_little_left_decides(
    machine: Path, version: int, stats: str, free: int
) -> None:
    """A container's limit less its usage counts; idle mapped files do not count as used."""
    folder, limit, used, idle, mapped = VERSIONS[version]
    (machine / folder).mkdir(exist_ok=True)
    (machine / folder / limit).write_text("3000000000\n")
    (machine / folder / used).write_text("1000000000\n")
    (machine / folder / "memory.stat").write_text(stats.format(idle, mapped))
    assert kv_cache_size.free_bytes(CPU) == free


def test_a_limit_applies_without_statistics_of_idle_memory(machine: Path) -> None:
    """Nothing is added then, and the whole machine does not count as free."""
    (machine / "memory.max").write_text("3000000000")
    (machine / "memory.current").write_text("1000000000")
    (machine / "memory.stat").unlink(missing_ok=True)
    assert kv_cache_size.free_bytes(CPU) == 2 * 10**9


@pytest.mark.parametrize("limit", ["max\n", "", "many\n"])
def test_a_control_group_without_a_limit_decides_nothing(machine: Path, limit: str) -> None:
    """An unreadable one does not count, either."""
    (machine / "memory.max").write_text(limit)
    assert kv_cache_size.free_bytes(CPU) == 10 * 10**9


def test_a_machine_that_is_full_is_out_of_cache_memory(machine: Path) -> None:
    """A group may use more than its limit: there is nothing left then, and no negative bytes."""
    (machine / "memory.max").write_text("1000")
    (machine / "memory.current").write_text("2000000000")
    (machine / "memory.stat").write_text("inactive_file 5000\n")
    with pytest.raises(OutOfCacheMemory, match="only 0 are available:"):
        kv_cache_size.divide_memory(model(), settings())[0]


def test_this_machine_has_memory_free() -> None:
    """Measured for real: more than nothing, less than there is."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < kv_cache_size.free_bytes(CPU) <= total


@pytest.mark.parametrize("typical", [0, 3, 1000])
def test_rows_of_sequences_and_snapshots_fit_the_budget(typical: int) -> None:
    """Even tiny pages fit; there is always at least one row."""
    for budget in (0, 99, 1000, 5050, 100_000):
        rows = kv_cache_size.rows_of(budget, 100, typical, 512)
        assert rows == 1 or rows * 100 <= budget
    assert kv_cache_size.rows_of(10**9, 100, typical, 512) == 512 + 64
    assert kv_cache_size.rows_of(10**9, 0, typical, 512) == 0
