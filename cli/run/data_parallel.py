"""Data-parallel size of a run, and the engine processes that it comes to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from tidemill.engine.config import EngineConfig
from tidemill.engine.plan.line_index import LineIndex

from ..arguments.default_flags import default_arguments
from ..console.errors import Refused
from ..engine.engine import held_weights
from ..engine.options import engine_command
from .replicas import EngineReplicas
from .run_options import RunOptions

_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_PREFIX_LEVEL: Final = 2  # lines whose first 512 bytes are the same begin alike


def num_replicas(options: RunOptions) -> int:
    """Return how many engines a run has; raises Refused for more than the machine has room for."""
    asked = options.data_parallel_size
    if asked is None or asked == 1:
        return 1
    gpus, of_one = visible_gpus(options), options.tensor_parallel_size or 1
    count = max(1, len(gpus) // of_one) if asked == "auto" else asked
    if gpus and count * of_one > len(gpus):
        raise Refused(
            f"--data-parallel-size {count} needs {count * of_one} GPUs, and there are {len(gpus)}"
        )
    if not gpus and count > len(_cores()):
        raise Refused(
            f"--data-parallel-size {count} needs as many cores, and there are {len(_cores())}"
        )
    if options.reuse is not None and count > 1:
        raise Refused("--data-parallel-size and --reuse exclude each other")
    return count


def visible_gpus(options: RunOptions) -> Sequence[str]:
    """Return the GPUs that engines may have, as CUDA_VISIBLE_DEVICES names them."""
    if options.device == "cpu":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(_GPUS.glob("*"))]


@contextmanager
def replicas(
    options: RunOptions,
    config: EngineConfig,
    names: Sequence[str],
    index: LineIndex,
    created: int,
) -> Iterator[EngineReplicas]:
    """Yield the engines of a run, not started, with their weights on this machine."""
    with held_weights(config, options.weights_cache) as here:
        given = replace(
            options,
            model=here.model,
            served_model_names=tuple(names),
            lora_modules=tuple(f"{each.name}={each.path}" for each in here.lora_modules),
        )
        command = engine_command(given)
        command += [*default_arguments(options.defaults), f"--dialect={options.dialect}"]
        yield EngineReplicas(
            [[*before, *command, *after] for before, after in _places(options)],
            created=created,
            home=_home(index),
        )


def _places(options: RunOptions) -> Iterator[tuple[list[str], list[str]]]:
    """Yield what stands before and after the command of each engine: its GPUs, or its cores."""
    count, gpus = num_replicas(options), visible_gpus(options)
    of_one, cores = options.tensor_parallel_size or 1, _cores()
    for number in range(count):
        if gpus:
            mine = ",".join(gpus[number * of_one : (number + 1) * of_one])
            yield ["env", f"CUDA_VISIBLE_DEVICES={mine}"], []
        else:
            some = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
            yield [], [f"--cpus={','.join(map(str, some))}"]


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _home(index: LineIndex) -> Callable[[int], int]:
    prefixes = index.records["prefixes"][:, _PREFIX_LEVEL].copy()
    return lambda place: int(prefixes[place])
