"""Which tiles a kernel is compiled with: read from a file that a script on a GPU writes anew.

Nothing is searched for at run time. `choices.json` has a list for each kernel; of its entries whose
`where` fits, the one that says most counts, and of equals the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("choices.json")


@dataclass(frozen=True, slots=True)
class Choice:
    """Sizes of tiles by the kernel's own names for them, and how it is compiled."""

    sizes: Mapping[str, int]
    num_warps: int
    num_stages: int


def choose(kernel: str, arch: str, **shape: int | str) -> Choice:
    """Return the choice for a kernel on an architecture such as "sm_90", and a shape in numbers."""
    return _chosen(kernel, frozenset({"arch": arch, **shape}.items()))


@cache
def _chosen(kernel: str, asked: frozenset[tuple[str, int | str]]) -> Choice:
    fits = [entry for entry in _entries()[kernel] if entry.get("where", {}).items() <= asked]
    best = max(reversed(fits), key=lambda entry: len(entry.get("where", {})))
    return Choice(best["sizes"], best["num_warps"], best["num_stages"])


@cache
def _entries() -> dict[str, list[dict]]:  # type: ignore[type-arg]
    entries: dict[str, list[dict]] = json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[type-arg]
    return entries
