"""The supported kinds of GPUs, and the EC2 instance types that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU on EC2.

    `families` are patterns of the instance types that have it, `instances` maps numbers of GPUs to
    the types with that number, the cheapest first. `vcpus` and `memory_gib` are a worker's share
    per GPU: that of the smallest such instance, less a share for the system and for ECS.
    """

    families: tuple[str, ...]
    instances: Mapping[int, tuple[str, ...]]
    vcpus: int
    memory_gib: int

    def machines(self, num_gpus: int, worker_gib: int) -> tuple[str, ...]:
        """Return the types with that many GPUs on which a worker of `worker_gib` has room."""
        return tuple(
            name
            for name in self.instances[num_gpus]
            if worker_gib <= _WORKER_SHARE * machine_gib(name)
        )


# A worker's share of a machine's memory; the rest is for the system and ECS.
_WORKER_SHARE = 0.9
# GiB per `xlarge` of a machine's size, or in total.
_GIB_OF_XLARGE = {"g4dn": 16, "g5": 16, "g6": 16, "g6e": 32, "p4d": 48, "p4de": 48}
_GIB = {"p5.4xlarge": 256, "p5.48xlarge": 2048, "p5e.48xlarge": 2048, "p5en.48xlarge": 2048}


def machine_gib(name: str) -> int:
    """Return the memory of an instance type."""
    family, _, size = name.partition(".")
    return _GIB.get(name) or _GIB_OF_XLARGE[family] * int(size.removesuffix("xlarge") or 1)


def _sizes(family: str, *sizes: int) -> tuple[str, ...]:
    return tuple(f"{family}.{size}xlarge" if size else f"{family}.xlarge" for size in sizes)


# Source: AWS's pages on EC2 instance types.
GPUS: Final[Mapping[str, Gpu]] = {
    "t4": Gpu(("g4dn.*",), {1: _sizes("g4dn", 0, 2, 4, 8, 16), 4: _sizes("g4dn", 12)}, 3, 13),
    "a10g": Gpu(
        ("g5.*",),
        {1: _sizes("g5", 0, 2, 4, 8, 16), 4: _sizes("g5", 12, 24), 8: _sizes("g5", 48)},
        3,
        13,
    ),
    "l4": Gpu(
        ("g6.*",),
        {1: _sizes("g6", 0, 2, 4, 8, 16), 4: _sizes("g6", 12, 24), 8: _sizes("g6", 48)},
        3,
        13,
    ),
    "l40s": Gpu(
        ("g6e.*",),
        {1: _sizes("g6e", 0, 2, 4, 8, 16), 4: _sizes("g6e", 12, 24), 8: _sizes("g6e", 48)},
        3,
        28,
    ),
    "a100": Gpu(("p4d.*", "p4de.*"), {8: (*_sizes("p4d", 24), *_sizes("p4de", 24))}, 11, 128),
    "h100": Gpu(("p5.*",), {1: _sizes("p5", 4), 8: _sizes("p5", 48)}, 15, 225),
    "h200": Gpu(("p5e.*", "p5en.*"), {8: (*_sizes("p5en", 48), *_sizes("p5e", 48))}, 23, 230),
}


def num_vcpus(instance_type: str) -> int:
    """Return the vCPUs of a type of these families: four per `x` of its size."""
    size = instance_type.partition(".")[2].removesuffix("xlarge")
    return 4 * int(size or 1)
