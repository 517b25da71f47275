"""Messages of the leader to the other ranks, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..errors import first_line_of
from ..kernels.communicator import Shard
from ..kernels.layer_groups import LayerGroup
from ..kernels.step import Step

# Advice for a rank that runs out of memory.
LESS = " (reduce --max-num-batched-tokens or --kv-cache-memory)"
_ARRAYS = [field.name for field in fields(Step) if field.name not in {"num_decodes", "shown"}]


class Init(NamedTuple):
    """First command: the rank's settings and shard, and the time limit for other ranks."""

    settings: EngineConfig
    shard: Shard
    device: str
    patience_seconds: float


class Load(NamedTuple):
    """Load your share of the model, or of its first layers, as model `number`; answered."""

    number: int
    dtype: torch.dtype
    num_layers: int | None
    has_adapters: bool


class InitProcessGroup(NamedTuple):
    """Connect to the other ranks through a folder that all of them know; answered."""

    folder: Path


class Allocate(NamedTuple):
    """Allocate pages and rows of a model's layers as attention `number`; answered.

    Keys and values are stored in `cache_dtype`; None is the network's dtype.
    """

    number: int
    model: int
    num_pages: int
    num_rows: int
    groups: tuple[LayerGroup, ...]
    cache_dtype: torch.dtype | None = None


class MeasureMemory(NamedTuple):
    """Report the free memory of your device."""


class Ping(NamedTuple):
    """Answer at once, also during other work."""


class GraphSizes(NamedTuple):
    """Limits of the CUDA graphs of one attention: tokens, pages, and slots' ids."""

    most_tokens: int
    most_pages: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a step with a model and its attention.

    Its arrays are laid end to end in `numbers`. `shown` is the shape of image vectors, which the
    first rank sends, as well as ids below zero. With `graphs` the step runs in CUDA graphs with
    these limits.
    """

    model: int
    attention: int
    num_decodes: int
    lengths: Mapping[str, int]
    numbers: NDArray[np.int32]
    shown: tuple[int, int] | None
    graphs: GraphSizes | None

    @classmethod
    def from_step(
        cls, step: Step, model: int, attention: int, graphs: GraphSizes | None = None
    ) -> Forward:
        """Return the message of a step."""
        arrays = {
            name: array.numpy()
            for name in _ARRAYS
            if isinstance(array := getattr(step.host, name), torch.Tensor)
        }
        return cls(
            model,
            attention,
            step.num_decodes,
            {name: len(array) for name, array in arrays.items()},
            np.concatenate(list(arrays.values())),
            None if step.shown is None else (step.shown.shape[0], step.shown.shape[1]),
            graphs,
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the step."""
        ends = np.cumsum([*self.lengths.values()])
        return dict(zip(self.lengths, np.split(self.numbers, ends[:-1]), strict=True))

    @property
    def has_unknown_ids(self) -> bool:
        """Return whether only a device knows some of the ids."""
        first = next(iter(self.lengths.values()))
        return bool((self.numbers[:first] < 0).any())


class ExactLogits(NamedTuple):
    """Compute your part of the exact logits of tokens in rows of the last step of a model."""

    model: int
    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]


Message = Init | Load | InitProcessGroup | Allocate | MeasureMemory | Ping | Forward | ExactLogits


class Command(NamedTuple):
    """A message; models and attentions with the numbers `dropped` are no longer used."""

    message: Message
    dropped: tuple[int, ...] = ()


class Done(NamedTuple):
    """The command was executed."""


class FreeMemory(NamedTuple):
    """The answer to `MeasureMemory`."""

    num_bytes: int


class Pong(NamedTuple):
    """The answer to `Ping`."""


class Failed(NamedTuple):
    """A rank's last message: its own failure, or one that another rank's end may have caused."""

    words: str
    is_own: bool = True

    @classmethod
    def from_exception(cls, exc: Exception) -> Failed:
        """Return the message of an exception; groups report another rank's end as RuntimeError."""
        if isinstance(exc, torch.OutOfMemoryError | MemoryError):
            return cls(f"it ran out of memory{LESS}: {first_line_of(exc)}")
        if isinstance(exc, EngineError):
            return cls(str(exc))
        words = f"{type(exc).__name__}: {first_line_of(exc)}"
        return cls(words, not isinstance(exc, RuntimeError))


Answer = Done | FreeMemory | Pong | Failed
