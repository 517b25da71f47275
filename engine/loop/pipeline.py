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

    Of rows that `failed` nothing comes: their constraints could not be asked.
    """

    plan: StepPlan
    launched_at: float
    logprobs: StepLogprobs | None
    unsampled: Unsampled | None
    failed: Mapping[int, RequestError] = field(default_factory=dict)
    readout: Readout | None = None


class Pipeline:
    """Steps in flight; the newest may be unsampled, since it waits for the one before."""

    def __init__(self) -> None:
        self.flights: deque[Flight] = deque()  # oldest first

    def lose(self) -> list[StepPlan]:
        """Empty the pipeline and return its plans: each step needs what the one before made."""
        lost = [flight.plan for flight in self.flights]
        self.flights.clear()
        return lost
