"""Step plan: the spans of tokens that one step computes, as arrays. No tensor, no table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of `S` spans: tokens `starts[s] : stops[s]` of the sequence in `slots[s]`, for each.

    The first `num_decodes` spans are of one token, their sequence's last. The logits of a span's
    last `num_logits[s]` tokens are wanted. Where the span `samples`, the last of these gives the
    sequence its next token; where it `is_scored`, all score its prompt. Where it `starts_anew`, no
    step held the sequence before: pages that it shares may be of this step, or of one in flight.
    """

    num_decodes: int
    slots: NDArray[np.int64]  # [S]
    starts: NDArray[np.int64]  # [S]
    stops: NDArray[np.int64]  # [S]
    num_logits: NDArray[np.int64]  # [S]
    samples: NDArray[np.bool_]  # [S]
    is_scored: NDArray[np.bool_]  # [S]
    starts_anew: NDArray[np.bool_]  # [S]

    @property
    def sampled(self) -> NDArray[np.int64]:
        """Slots that get a new token from this step, in the order of its logits."""
        return self.slots[self.samples]

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """Rows of the step's logits that the tokens of `sampled` are chosen from."""
        return (np.cumsum(self.num_logits) - 1)[self.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int((self.stops - self.starts).sum())

    @property
    def num_attended_tokens(self) -> int:
        """Tokens that the decodes of the step attend to, in layers that see all of them."""
        return int(self.stops[: self.num_decodes].sum())

    def only(self, chosen: NDArray[np.bool_]) -> StepPlan:
        """Return the step of some of these spans, `chosen [S]`, in the same order."""
        return StepPlan(
            num_decodes=int(chosen[: self.num_decodes].sum()),
            slots=self.slots[chosen],
            starts=self.starts[chosen],
            stops=self.stops[chosen],
            num_logits=self.num_logits[chosen],
            samples=self.samples[chosen],
            is_scored=self.is_scored[chosen],
            starts_anew=self.starts_anew[chosen],
        )
