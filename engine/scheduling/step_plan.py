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
    The last `num_drafts[s]` tokens are drafts (speculative decoding): their logits and those before
    them give a token each, of which the ones behind a wrong draft are dropped.
    """

    num_decodes: int
    slots: NDArray[np.int64]  # [S]
    starts: NDArray[np.int64]  # [S]
    stops: NDArray[np.int64]  # [S]
    num_logits: NDArray[np.int64]  # [S]
    samples: NDArray[np.bool_]  # [S]
    is_scored: NDArray[np.bool_]  # [S]
    starts_anew: NDArray[np.bool_]  # [S]
    num_drafts: NDArray[np.int64]  # [S]

    @property
    def has_drafts(self) -> bool:
        """Say whether the step verifies drafts."""
        return bool(self.num_drafts.any())

    @property
    def num_sampled(self) -> NDArray[np.int64]:
        """Tokens that each span samples, `[S]`."""
        return np.where(self.samples, self.num_drafts + 1, 0)

    @property
    def sampled(self) -> NDArray[np.int64]:
        """Slots that get a new token from this step, in the order of its logits.

        A slot stands there once for each token.
        """
        if not self.has_drafts:
            return self.slots[self.samples]
        return np.repeat(self.slots, self.num_sampled)

    @property
    def sampled_places(self) -> NDArray[np.int64]:
        """Numbers of drafts before each token of `sampled`."""
        counts = self.num_sampled[self.samples]
        return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """Rows of the step's logits that the tokens of `sampled` are chosen from."""
        last_rows = (np.cumsum(self.num_logits) - 1)[self.samples]
        if not self.has_drafts:
            return last_rows
        num_drafts = self.num_drafts[self.samples]
        return np.repeat(last_rows - num_drafts, num_drafts + 1) + self.sampled_places

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int((self.stops - self.starts).sum())

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens that the step computes for others than prompts."""
        return self.num_decodes + int((self.num_drafts + (self.num_drafts > 0)).sum())

    @property
    def num_attended_tokens(self) -> int:
        """Tokens that the decodes of the step attend to, in layers that see all of them."""
        drafted = self.num_drafts > 0
        return int(self.stops[: self.num_decodes].sum() + self.stops[drafted].sum())

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
            num_drafts=self.num_drafts[chosen],
        )
