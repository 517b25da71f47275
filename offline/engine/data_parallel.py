"""Data parallelism: the number of engine processes of a command, and their GPUs or cores."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

from ..arguments.argument_types import data_parallel_size
from ..console.errors import Refused
from .options import EngineOptions

DataParallelSize: TypeAlias = int | Literal["auto"] | None

_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def add_data_parallel_flag(group: argparse._ActionsContainer) -> None:
    """Add `--data-parallel-size`."""
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=data_parallel_size,
        metavar="N",
        help="share the work among N engine processes, each with its own GPUs "
        "(--tensor-parallel-size) or cores; auto: as many as the GPUs allow (default: 1)",
    )


def num_replicas(options: EngineOptions, size: DataParallelSize) -> int:
    """Return the number of engines for a size; raises Refused if the machine is too small."""
    if size is None or size == 1:
        return 1
    gpus, of_one = visible_gpus(options), options.tensor_parallel_size or 1
    count = max(1, len(gpus) // of_one) if size == "auto" else size
    if gpus and count * of_one > len(gpus):
        raise Refused(
            f"--data-parallel-size {count} needs {count * of_one} GPUs, but this machine has "
            f"{len(gpus)}"
        )
    if not gpus and count > len(_cores()):
        raise Refused(
            f"--data-parallel-size {count} needs {count} cores, but this machine has "
            f"{len(_cores())}"
        )
    return count


def visible_gpus(options: EngineOptions) -> Sequence[str]:
    """Return the GPUs that engines may use, as in CUDA_VISIBLE_DEVICES."""
    if options.device == "cpu":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(_GPUS.glob("*"))]


def replica_commands(
    command: Sequence[str], options: EngineOptions, count: int
) -> list[Sequence[str]]:
    """Return the command of each engine process with its GPUs or cores; a single one has all."""
    if count == 1:
        return [command]
    gpus, of_one, cores = visible_gpus(options), options.tensor_parallel_size or 1, _cores()
    commands: list[Sequence[str]] = []
    for number in range(count):
        if gpus:
            mine = ",".join(gpus[number * of_one : (number + 1) * of_one])
            commands.append(["env", f"CUDA_VISIBLE_DEVICES={mine}", *command])
        else:
            some = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
            commands.append([*command, f"--cpus={','.join(map(str, some))}"])
    return commands


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
