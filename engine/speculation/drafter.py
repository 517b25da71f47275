"""N-gram drafter: drafts as many tokens as measured acceptance and costs make worth verifying."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.ngram import MOST_MATCH, FinishedRows, find_matches, write_drafts
from ..scheduling.sequence import Sequence
from ..scheduling.step_plan import StepPlan
from ..scheduling.table import SequenceTable
from .cost_model import CostModel, Work

MOST_DRAFTS = 15
"""Limit per sequence and step: with the token before them, drafts fill an attention tile."""

# Prior of a kind of draft without data, in accepted and tried tokens.
_PRIOR_ACCEPTED, _PRIOR_TRIED = 3.0, 4.0
# Data loses weight with each step, so that a kind is tried again after a while.
_DECAY = 0.998
_MOST_TRIED = 500.0
# Costs in tokens of a step: for a step, for a token, and for an attended token.
_USUAL_COSTS = Work(steps=20.0, prefilled=1.0, decoded=1.0, attended=1e-3)
# A separate span costs more than a decode among others.
_MARGIN = 1.5
_STEPS_A_FIT = 32
_HISTORIES = 3  # of a sequence: no draft yet, last draft rejected at its first token, or accepted


class NgramDrafter:
    """Drafts by n-gram lookup for the sequences of one table; see `Drafter`.

    A draft's kind is the length of its match and the outcome of the sequence's previous draft. A
    draft is extended while the acceptance rate of its kind exceeds the cost of one more token
    relative to the step that it saves.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._finished = FinishedRows()
        self._costs, self._cost_model = _USUAL_COSTS, CostModel()
        self._num_steps = 0
        self._history = np.zeros(len(table.sequences), np.int64)
        self._kinds = np.zeros(len(table.sequences), np.int64)  # of drafts in flight
        num_kinds = (MOST_MATCH + 1) * _HISTORIES
        self._accepted = np.zeros(num_kinds)
        self._tried = np.zeros(num_kinds)

    def enter(self, slot: int) -> None:
        """Reset the draft outcomes of the sequence that was in a slot before."""
        self._history[slot] = 0

    def draft(self, slots: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write drafts after the tokens of slots; return the number for each."""
        table = self._table
        self._accepted *= _DECAY
        self._tried *= _DECAY
        num_known = table.num_known_ids[slots]
        matches = find_matches(table.tokens, slots, num_known, self._finished)
        kinds = matches.lengths * _HISTORIES + self._history[slots]
        counts = np.minimum(self._worthwhile(kinds, num_known), most)
        counts = np.where(matches.lengths > 0, counts, 0)
        if counts.any():
            write_drafts(table.tokens, slots, num_known, self._finished, matches.places, counts)
        self._kinds[slots] = kinds
        return counts

    def note_accepted(
        self,
        slots: NDArray[np.int64],
        num_drafts: NDArray[np.int64],
        num_accepted: NDArray[np.int64],
    ) -> None:
        """Record the outcome of drafts: each was tried up to its first wrong token."""
        kinds = self._kinds[slots]
        np.add.at(self._accepted, kinds, num_accepted)
        np.add.at(self._tried, kinds, num_accepted + (num_accepted < num_drafts))
        scale = np.minimum(1.0, _MOST_TRIED / np.maximum(self._tried, 1.0))
        self._accepted *= scale
        self._tried *= scale
        self._history[slots] = np.where(num_accepted > 0, 2, 1)

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""
        decoded = plan.num_decoded_tokens
        prefilled = plan.num_tokens - decoded
        self._cost_model.add(Work(1, prefilled, decoded, plan.num_attended_tokens), seconds)
        self._num_steps += 1
        if self._num_steps % _STEPS_A_FIT == 0:
            self._costs = self._cost_model.costs() or self._costs
            self._cost_model.scale(0.5)

    def note_end(self, sequence: Sequence) -> None:
        """Store a finished row as a source of drafts, unless it has a cache salt."""
        if sequence.request.cache_salt or not sequence.generated:
            return
        before = sequence.prompt[-MOST_MATCH:]
        self._finished.add(np.concatenate([before, np.array(sequence.generated, np.int32)]))

    def _worthwhile(
        self, kinds: NDArray[np.int64], num_known: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the number of tokens of each draft that are worth verifying."""
        costs = self._costs
        # While all steps are similar, the cost of tokens cannot be separated from that of steps.
        token = max(costs.decoded, costs.prefilled, 1e-12)
        saved = token + costs.attended * num_known + costs.steps / len(num_known)
        least = np.minimum(_MARGIN * token / saved, 0.99)  # probability of being accepted
        likely = (self._accepted[kinds] + _PRIOR_ACCEPTED) / (self._tried[kinds] + _PRIOR_TRIED)
        counts = np.log(least) / np.log(np.clip(likely, 1e-6, 0.999))
        whole: NDArray[np.int64] = np.minimum(counts, MOST_DRAFTS).astype(np.int64)
        return whole
