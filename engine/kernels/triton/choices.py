"""Which tiles a kernel is compiled with: read from a file that a script on a GPU writes anew.

Nothing is searched for at run time. `choices.json` has a list for each kernel; of its entries whose
`where` fits, the one that says most counts, and of equals the last. One of each list fits always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("choices.json")
FIELDS = {"where", "sizes", "num_warps", "num_stages"}
MAX_WARPS = 32

Shape = frozenset[tuple[str, int | str]]
# A kernel, and what is asked for it.
Asked = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class Choice:
    """Sizes of tiles by the kernel's own names for them, and how it is compiled."""

    sizes: Mapping[str, int]
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A choice, and what must be so of an architecture and a shape for it to count."""

    where: Shape
    choice: Choice


# What `trying` has counted instead of the file, and what was asked for meanwhile.
_tried: dict[Asked, Choice] = {}
_asked: set[Asked] = set()


def choose(kernel: str, arch: str, **shape: int | str) -> Choice:
    """Return the choice for a kernel on an architecture such as "sm_90", and a shape in numbers."""
    return chosen(kernel, frozenset({"arch": arch, **shape}.items()))


@contextmanager
def trying(choices: Mapping[Asked, Choice]) -> Iterator[set[Asked]]:
    """Let these choices count for what is asked just so; yield what is asked for meanwhile."""
    chosen.cache_clear()
    _asked.clear()
    _tried.update(choices)
    try:
        yield _asked
    finally:
        _tried.clear()
        chosen.cache_clear()


@cache
def chosen(kernel: str, asked: Shape) -> Choice:
    """Return the choice for what was asked for, the architecture among it."""
    _asked.add((kernel, asked))
    if (kernel, asked) in _tried:
        return _tried[kernel, asked]
    fits = [entry for entry in _entries()[kernel] if entry.where <= asked]
    return max(reversed(fits), key=lambda entry: len(entry.where)).choice


@cache
def _entries() -> dict[str, list[Entry]]:
    return read(json.loads(FILE.read_text(encoding="utf-8")))


def read(data: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Return the entries of each kernel; raises `ValueError`, with the place, for what is wrong."""
    entries = {
        kernel: [_entry(one, f"{kernel}[{index}]") for index, one in enumerate(listed)]
        for kernel, listed in data.items()
    }
    for kernel, listed in entries.items():
        places = [entry.where for entry in listed]
        if frozenset() not in places:
            raise ValueError(f"{kernel}: no entry fits always")
        if len(set(places)) < len(places):
            raise ValueError(f"{kernel}: two entries have the same `where`")
    return entries


def _entry(data: Mapping[str, Any], place: str) -> Entry:
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
    return Entry(frozenset(data.get("where", {}).items()), Choice(sizes, warps, stages))
