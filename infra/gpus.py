"""The GPUs that a model can ask for, and the instances of AWS that carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU on EC2.

    `families` are patterns of the instance types that have it, `instances` maps numbers of GPUs to
    the cheapest type with so many. `vcpus` and `memory_gib` are what a worker gets for each GPU:
    what such an instance has at least, less a share for the system and for ECS.
    """

    families: tuple[str, ...]
    instances: Mapping[int, str]
    vcpus: int
    memory_gib: int


# Source: the pages of EC2's instance types.
GPUS: Final[Mapping[str, Gpu]] = {
    "t4": Gpu(("g4dn.*",), {1: "g4dn.xlarge", 4: "g4dn.12xlarge"}, 3, 13),
    "a10g": Gpu(("g5.*",), {1: "g5.xlarge", 4: "g5.12xlarge", 8: "g5.48xlarge"}, 3, 13),
    "l4": Gpu(("g6.*",), {1: "g6.xlarge", 4: "g6.12xlarge", 8: "g6.48xlarge"}, 3, 13),
    "l40s": Gpu(("g6e.*",), {1: "g6e.xlarge", 4: "g6e.12xlarge", 8: "g6e.48xlarge"}, 3, 28),
    "a100": Gpu(("p4d.*", "p4de.*"), {8: "p4d.24xlarge"}, 11, 128),
    "h100": Gpu(("p5.*",), {1: "p5.4xlarge", 8: "p5.48xlarge"}, 15, 225),
    "h200": Gpu(("p5e.*", "p5en.*"), {8: "p5en.48xlarge"}, 23, 230),
}
