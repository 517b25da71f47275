"""Pipeline of a loop: launched steps that are not collected yet, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tidemill.protocol.errors import RequestError

from ..kernels.sampling import SamplingMetadata
from ..scheduling.step_plan import StepPlan
from .confidence import StepConfidence
from .logprobs import StepLogprobs
from .runner import Readout
from .step_logits import StepLogits


class Unsampled(NamedTuple):
    """A step whose tokens are not chosen yet: its logits, the `wanted` ones, and parameters."""

    logits: StepLogits
    wanted: Tensor  # [M, V]
    sampling: SamplingMetadata


@dataclass(slots=True)
class Flight:
    """A step in flight: `unsampled` until its tokens are chosen; `readout` then returns them.

    Rows that `failed` have no token: their constraints raised an error.
    """

    plan: StepPlan
    launched_at: float
    logprobs: StepLogprobs | None
    unsampled: Unsampled | None
    failed: Mapping[int, RequestError] = field(default_factory=dict)
    confidence: StepConfidence | None = None
    readout: Readout | None = None

    def keep_scores(
        self,
        scored: Sequence[NDArray[Any]],
        token_ids: NDArray[np.int64],
        taken: NDArray[np.bool_],
    ) -> None:
        """Store the scores that have arrived in their sequences; `taken` marks sampled tokens."""
        if self.confidence is not None:
            *scored, few, many = scored
            self.confidence.keep(token_ids, few, many, taken)
        if self.logprobs is not None:
            self.logprobs.keep(scored, taken)


class Pipeline(deque[Flight]):
    """Steps in flight, oldest first; the newest may be unsampled, and wait for the previous one."""

    def lose(self) -> list[StepPlan]:
        """Empty the pipeline and return its plans: each step needs the previous one."""
        lost = [flight.plan for flight in self]
        self.clear()
        return lost
