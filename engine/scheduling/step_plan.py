"""Step plan: the spans of tokens that one step computes, as arrays, without tensors or tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of `S` spans: for each, tokens `starts[s] : stops[s]` of the sequence in `slots[s]`.

    The first `num_decodes` spans have one token, their sequence's last. The logits of a span's last
    `num_logits[s]` tokens are computed. If the span `samples`, the last of them yields the
    sequence's next token; if it `is_scored`, all of them score its prompt. If it `starts_fresh`, no
    earlier step included the sequence: its shared pages may be from this step or one in flight.
    The last `num_drafts[s]` tokens are drafts (speculative decoding): their logits and the ones
    before them yield one token each; tokens after a wrong draft are dropped.
    """

    num_decodes: int
    slots: NDArray[np.int64]  # [S]
    starts: NDArray[np.int64]  # [S]
    stops: NDArray[np.int64]  # [S]
    num_logits: NDArray[np.int64]  # [S]
    samples: NDArray[np.bool_]  # [S]
    is_scored: NDArray[np.bool_]  # [S]
    starts_fresh: NDArray[np.bool_]  # [S]
    num_drafts: NDArray[np.int64]  # [S]

    @property
    def has_drafts(self) -> bool:
        """Return whether the step verifies drafts."""
        return bool(self.num_drafts.any())

    @property
    def num_sampled(self) -> NDArray[np.int64]:
        """Return the number of tokens that each span samples, `[S]`."""
        return np.where(self.samples, self.num_drafts + 1, 0)

    @property
    def sampled(self) -> NDArray[np.int64]:
        """Return the slots that get a new token from this step, in the order of its logits.

        A slot appears once for each token.
        """
        if not self.has_drafts:
            return self.slots[self.samples]
        return np.repeat(self.slots, self.num_sampled)

    @property
    def sampled_places(self) -> NDArray[np.int64]:
        """Return the number of drafts before each token of `sampled`."""
        counts = self.num_sampled[self.samples]
        return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """Return the rows of the step's logits from which the tokens of `sampled` are chosen."""
        last_rows = (np.cumsum(self.num_logits) - 1)[self.samples]
        if not self.has_drafts:
            return last_rows
        num_drafts = self.num_drafts[self.samples]
        return np.repeat(last_rows - num_drafts, num_drafts + 1) + self.sampled_places

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return int((self.stops - self.starts).sum())

    @property
    def num_decoded_tokens(self) -> int:
        """Return the number of tokens that the step computes outside prompts."""
        return self.num_decodes + int((self.num_drafts + (self.num_drafts > 0)).sum())

    @property
    def num_attended_tokens(self) -> int:
        """Return the number of tokens that decodes attend to, in layers with full attention."""
        drafted = self.num_drafts > 0
        return int(self.stops[: self.num_decodes].sum() + self.stops[drafted].sum())

    def only(self, chosen: NDArray[np.bool_]) -> StepPlan:
        """Return a step with the spans in `chosen [S]`, in the same order."""
        return StepPlan(
            num_decodes=int(chosen[: self.num_decodes].sum()),
            slots=self.slots[chosen],
            starts=self.starts[chosen],
            stops=self.stops[chosen],
            num_logits=self.num_logits[chosen],
            samples=self.samples[chosen],
            is_scored=self.is_scored[chosen],
            starts_fresh=self.starts_fresh[chosen],
            num_drafts=self.num_drafts[chosen],
        )
