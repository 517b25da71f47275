"""Data parallelism: the engine processes of a command, and their GPUs or cores."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ..arguments.argument_types import data_parallel_size
from ..console.errors import Refused
from ..console.terminal import log
from .options import EngineOptions, engine_command, stall_limit

if TYPE_CHECKING:
    from tidemill.engine.config import EngineConfig
    from tidemill.engine_process.served_replicas import ServedReplicas

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


def load_replicas(
    config: EngineConfig,
    *,
    served_names: tuple[str, ...],
    chat_template: str | None,
    options: EngineOptions,
    count: int,
) -> ServedReplicas:
    """Start engines with a config's weights, and otherwise the options; raises EngineError."""
    from tidemill.engine_process.served_replicas import ServedReplicas

    del chat_template  # each process reads it itself
    command = engine_command(with_weights(options, config, served_names))
    commands = replica_commands(command, options, count)
    return ServedReplicas(commands, log=log, stall_seconds=stall_limit(options))


def with_weights(
    options: EngineOptions, config: EngineConfig, served_names: Sequence[str]
) -> EngineOptions:
    """Return the options with the weights of a config, which are on this machine, and the names."""
    return replace(
        options,
        model=config.model,
        served_model_names=tuple(served_names),
        lora_modules=tuple(f"{each.name}={each.path}" for each in config.lora_modules),
    )


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
