"""Pipeline of a loop: steps that were launched and are not collected, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tidemill.protocol.errors import RequestError

from ..kernels.sampling import SamplingMetadata
from ..scheduling.step_plan import StepPlan
from .logprobs import StepLogprobs
from .runner import Readout
from .step_logits import StepLogits


class Unsampled(NamedTuple):
    """A step whose tokens are not chosen yet: its logits, those `wanted`, and how to sample."""

    logits: StepLogits
    wanted: Tensor  # [M, V]
    sampling: SamplingMetadata


@dataclass(slots=True)
class Flight:
    """A step in flight: `unsampled` until its tokens are chosen, which `readout` then brings.

    Rows that `failed` have no token: their constraints raised an error.
    """

    plan: StepPlan
    launched_at: float
    logprobs: StepLogprobs | None
    unsampled: Unsampled | None
    failed: Mapping[int, RequestError] = field(default_factory=dict)
    readout: Readout | None = None


class Pipeline(deque[Flight]):
    """Steps in flight, oldest first; the newest may be unsampled: it waits for the one before."""

    def lose(self) -> list[StepPlan]:
        """Empty the pipeline and return its plans: each step needs the one before."""
        lost = [flight.plan for flight in self]
        self.clear()
        return lost
