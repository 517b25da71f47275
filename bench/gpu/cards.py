"""Accelerators by their ceilings: the limits of memory and products, and the amount of memory.

A data sheet contains more than any kernel reaches. An H200 has 4.8 TB/s and 989 TFLOP/s, of which
published copies and large products reach 4.3 and 790; the others are assumed to reach the same
shares. `bench.gpu.gpu` measures both on a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_BANDWIDTH_SHARE = 4.3 / 4.8
_FLOPS_SHARE = 790 / 989
# Share of the memory left after the weights; the rest is for a step's own tensors.
KV_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Card:
    """Limits of a GPU: bytes and products (of 16 bits) a second; `memory` is bytes."""

    name: str
    memory: float
    bandwidth: float
    flops: float

    def pool(self, weight_bytes: float) -> float:
        """Return the bytes left for keys and values after `weight_bytes` of weights."""
        left = self.memory - weight_bytes
        if left <= 0:
            raise SystemExit(f"{weight_bytes / 1e9:.0f} GB of weights do not fit {self.name}")
        return KV_SHARE * left

    def reaching(self, bandwidth: float, flops: float) -> Card:
        """Return the card with measured ceilings."""
        return replace(self, bandwidth=bandwidth, flops=flops)


def _from_data_sheet(name: str, gibibytes: float, terabytes: float, teraflops: float) -> Card:
    return Card(
        name,
        gibibytes * 2**30,
        terabytes * 1e12 * _BANDWIDTH_SHARE,
        teraflops * 1e12 * _FLOPS_SHARE,
    )


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        _from_data_sheet("h200", 139, 4.8, 989),
        _from_data_sheet("h100", 78, 3.35, 989),
        _from_data_sheet("a100", 79, 2.04, 312),
        _from_data_sheet("l40s", 44, 0.864, 362),
        _from_data_sheet("l4", 22, 0.3, 121),
    )
}
