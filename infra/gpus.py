"""The GPUs that a model can ask for, and the instances of AWS that carry them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU: what ECS calls it, and an instance type for each number of them.

    `instances` maps the GPUs of an instance to a type; `memory_gib` and `vcpus` are what a worker
    gets of it for each GPU: less than the instance has, which keeps some for the system and ECS.
    """

    accelerator: str
    instances: dict[int, str]
    memory_gib: int
    vcpus: int


# Source: the instance types' pages of EC2. A worker's share of memory leaves about a tenth.
GPUS: Final = {
    "t4": Gpu("T4", {1: "g4dn.xlarge", 4: "g4dn.12xlarge", 8: "g4dn.metal"}, 13, 3),
    "a10g": Gpu("A10G", {1: "g5.xlarge", 4: "g5.12xlarge", 8: "g5.48xlarge"}, 13, 3),
    "l4": Gpu("L4", {1: "g6.xlarge", 4: "g6.12xlarge", 8: "g6.48xlarge"}, 13, 3),
    "l40s": Gpu("L40S", {1: "g6e.xlarge", 4: "g6e.12xlarge", 8: "g6e.48xlarge"}, 28, 3),
    "a100": Gpu("A100", {8: "p4d.24xlarge"}, 120, 11),
    "h100": Gpu("H100", {1: "p5.4xlarge", 8: "p5.48xlarge"}, 220, 15),
    "h200": Gpu("H200", {8: "p5en.48xlarge"}, 220, 22),
}
