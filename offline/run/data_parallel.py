"""The engine processes of a run that is data-parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from tidemill.engine.config import EngineConfig

from ..arguments.default_flags import default_arguments
from ..console.errors import Refused
from ..engine.data_parallel import num_replicas, replica_commands
from ..engine.engine import held_weights
from ..engine.options import engine_command, stall_limit
from ..plan.line_index import LineIndex
from .replicas import EngineReplicas
from .run_options import RunOptions

_PREFIX_LEVEL: Final = 2  # lines whose first 512 bytes are the same begin alike


def num_engines(options: RunOptions) -> int:
    """Return how many engines a run has; raises Refused for more than the machine has room for."""
    count = num_replicas(options, options.data_parallel_size)
    if options.reuse is not None and count > 1:
        raise Refused("--data-parallel-size and --reuse exclude each other")
    return count


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
            replica_commands(command, options, num_engines(options)),
            created=created,
            home=_home(index),
            stall_seconds=stall_limit(options),
        )


def _home(index: LineIndex) -> Callable[[int], int]:
    prefixes = index.records["prefixes"][:, _PREFIX_LEVEL].copy()
    return lambda place: int(prefixes[place])
