"""Memory of the host: weights share blocks of huge pages, and zeros take none until written."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from tidemill.engine.heap_trim import trim_heap
from tidemill.engine.kernels import host_memory
from tidemill.engine.kernels.cpu import linear
from tidemill.engine.kernels.cpu.linear import pack_panels
from tidemill.engine.kernels.host_memory import WeightBlocks, reports_free_pages, zeros

MIB = 2**20
# Two huge pages: a machine whose memory is in small pieces has not one for each request.
SOME_KIB = 4 * 1024


def mapped_kib(address: int, field: str) -> int:
    """Return a field of the mapping that contains an address, from Linux's smaps."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, end = (int(word, 16) for word in name.split("-"))
            is_inside = start <= address < end
        elif is_inside and name == f"{field}:":
            return int(values[0])
    raise AssertionError(f"no mapping contains {address:#x}")


def resident_kib() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4


@pytest.fixture
def _huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip if the system gives no huge pages to a program that requests them."""
    monkeypatch.setattr(host_memory, "_is_kept_small", lambda: False)
    if sys.platform != "linux":
        pytest.skip("huge pages are requested on Linux")
    block = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    probe = np.frombuffer(block, np.uint8)
    probe[:] = 1
    if mapped_kib(probe.ctypes.data + 8 * MIB, "AnonHugePages") < 8 * 1024:
        pytest.skip("the system has no huge pages")
    trim_heap()  # freed memory of other tests would be used again as it is, in small pages


def test_weights_share_blocks_which_end_with_the_last_of_them() -> None:
    """Their bytes are apart, each starts at a line of the cache, and a large one has its own."""
    blocks = WeightBlocks(1000)
    weights = [blocks.allocate((count, 3), torch.float32) for count in (7, 20, 50, 200, 9)]
    for number, weight in enumerate(weights):
        weight.fill_(number)
        assert weight.data_ptr() % 64 == 0
    assert [int(weight.min()) for weight in weights] == [int(weight.max()) for weight in weights]
    assert [int(weight.min()) for weight in weights] == [0, 1, 2, 3, 4]
    assert weights[1].data_ptr() - weights[0].data_ptr() == 128
    block = blocks._block
    assert block is not None
    assert block() is not None
    weights.clear()
    del weight
    assert block() is None


@pytest.mark.usefixtures("_huge_pages")
def test_small_weights_are_packed_into_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is half as large as a huge page; together they fill several."""
    monkeypatch.setattr(linear, "_weights", WeightBlocks())
    panels = [pack_panels(torch.zeros(512, 512), 1) for _ in range(24)]
    middle = panels[12].data_ptr()
    assert mapped_kib(middle, "AnonHugePages") >= SOME_KIB


@pytest.mark.usefixtures("_huge_pages")
def test_zeros_take_memory_in_huge_pages_when_they_are_written() -> None:
    """A cache that is never used takes none."""
    before = resident_kib()
    cache = zeros((2048 * MIB,), torch.uint8)  # more than the heap keeps for engines' steps
    assert resident_kib() - before < 4 * 1024
    place = cache.data_ptr() + 1024 * MIB
    before, huge = mapped_kib(place, "Rss"), mapped_kib(place, "AnonHugePages")
    cache[: 16 * MIB] = 1
    assert mapped_kib(place, "AnonHugePages") - huge >= SOME_KIB
    assert mapped_kib(place, "Rss") - before <= 20 * 1024


def test_a_machine_whose_host_takes_memory_back_gets_small_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are zeros as well, which take no memory until written, and are freed with the tensor."""
    if sys.platform != "linux":
        pytest.skip("huge pages are requested on Linux")
    monkeypatch.setattr(host_memory, "_is_kept_small", lambda: True)
    before = resident_kib()
    cache = zeros((2048 * MIB,), torch.uint8)
    weight = WeightBlocks().allocate((16 * MIB,), torch.float32)
    assert resident_kib() - before < 4 * 1024
    assert not cache[:: 64 * MIB].any()
    weight.fill_(1)
    assert float(weight.min()) == 1.0
    assert mapped_kib(weight.data_ptr() + 8 * MIB, "AnonHugePages") == 0
    del cache, weight
    assert resident_kib() - before < 12 * 1024  # the weights were 64 MiB; other threads allocate
    assert zeros((0, 4), torch.float32).shape == (0, 4)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="1,024 bytes could not be allocated: no room"):
        zeros((1024,), torch.uint8)


class _Advised(mmap.mmap):
    """A mapping that records advice; a system without huge pages refuses it."""

    advice: ClassVar[list[int]] = []

    def madvise(self, option: int, *_: int) -> None:
        self.advice.append(option)
        raise OSError(22, "no huge pages")


def test_small_pages_are_requested_even_if_the_system_always_uses_huge_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A system without huge pages may refuse the advice."""
    if sys.platform != "linux":
        pytest.skip("huge pages are requested on Linux")
    monkeypatch.setattr(host_memory, "_is_kept_small", lambda: True)
    monkeypatch.setattr(mmap, "mmap", _Advised)
    monkeypatch.setattr(_Advised, "advice", [])
    assert not zeros((1024,), torch.uint8).any()
    assert _Advised.advice == [mmap.MADV_NOHUGEPAGE]


def refuse(*_: object) -> None:
    """Fail as mmap does without memory."""
    raise OSError(12, "no room")


@pytest.mark.parametrize(
    ("device", "features", "expected"),
    [
        ("0x0005", "01100101", True),
        ("0x0005", "01100001", False),
        ("0x0002", "00100110", False),
        ("0x0005", "", False),
        ("?", "01100101", False),
    ],
    ids=["reporting", "another balloon", "a disk", "cut off", "unreadable"],
)
def test_free_pages_are_reported_if_the_balloon_has_that_feature(
    tmp_path: Path, device: str, features: str, *, expected: bool
) -> None:
    """Linux writes the feature bits of each virtio device, the lowest first."""
    assert not reports_free_pages(tmp_path / "missing")
    assert not reports_free_pages(tmp_path)
    (tmp_path / "virtio0").mkdir()
    (tmp_path / "virtio0" / "device").write_text(f"{device}\n", encoding="ascii")
    (tmp_path / "virtio0" / "features").write_text(f"{features}\n", encoding="ascii")
    assert reports_free_pages(tmp_path) is expected
