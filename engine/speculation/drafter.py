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
"""Of one sequence in one step: with the token before them they fill tiles of attention."""

# Of a kind of draft of which nothing is known, as if so many tokens had been tried.
_PRIOR_ACCEPTED, _PRIOR_TRIED = 3.0, 4.0
# What was learned loses weight from step to step, so that it is tried again after a while.
_KEPT = 0.998
_MOST_TRIED = 500.0
# Costs, in tokens of a step: of a step, of a token, and of one that is attended to.
_USUAL_COSTS = Work(steps=20.0, prefilled=1.0, decoded=1.0, attended=1e-3)
# A span of its own costs more than a decode among others does.
_MARGIN = 1.5
_STEPS_A_FIT = 32
_HISTORIES = 3  # of a sequence: no draft yet, the last one wrong from its first token, or right


class NgramDrafter:
    """Drafts by n-gram lookup for the sequences of one table; see `Drafter`.

    A draft's kind is the length of its match and what became of the sequence's draft before. It is
    as long as the next token is likelier to be right, by what was accepted of its kind, than a
    token of the step costs beside the step that it saves.
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
        """Forget what became of drafts of the sequence that was in a slot before."""
        self._history[slot] = 0

    def draft(self, slots: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write drafts behind the tokens of slots; return how many of each."""
        table = self._table
        self._accepted *= _KEPT
        self._tried *= _KEPT
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
        """Learn from drafts: of each, tokens were tried up to the first that was wrong."""
        kinds = self._kinds[slots]
        np.add.at(self._accepted, kinds, num_accepted)
        np.add.at(self._tried, kinds, num_accepted + (num_accepted < num_drafts))
        scale = np.minimum(1.0, _MOST_TRIED / np.maximum(self._tried, 1.0))
        self._accepted *= scale
        self._tried *= scale
        self._history[slots] = np.where(num_accepted > 0, 2, 1)

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Learn what steps and their tokens cost."""
        decoded = plan.num_decoded_tokens
        prefilled = plan.num_tokens - decoded
        self._cost_model.add(Work(1, prefilled, decoded, plan.num_attended_tokens), seconds)
        self._num_steps += 1
        if self._num_steps % _STEPS_A_FIT == 0:
            self._costs = self._cost_model.costs() or self._costs
            self._cost_model.scale(0.5)

    def note_end(self, sequence: Sequence) -> None:
        """Keep a finished row, unless its prefix is to be shared with nobody."""
        if sequence.request.cache_salt or not sequence.generated:
            return
        before = sequence.prompt[-MOST_MATCH:]
        self._finished.add(np.concatenate([before, np.array(sequence.generated, np.int32)]))

    def _worthwhile(
        self, kinds: NDArray[np.int64], num_known: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return how many tokens of each draft are worth verifying."""
        costs = self._costs
        # While all steps decode alike, nothing tells their tokens' cost from their own.
        token = max(costs.decoded, costs.prefilled, 1e-12)
        saved = token + costs.attended * num_known + costs.steps / len(num_known)
        least = np.minimum(_MARGIN * token / saved, 0.99)  # likelihood of being right
        likely = (self._accepted[kinds] + _PRIOR_ACCEPTED) / (self._tried[kinds] + _PRIOR_TRIED)
        counts = np.log(least) / np.log(np.clip(likely, 1e-6, 0.999))
        whole: NDArray[np.int64] = np.minimum(counts, MOST_DRAFTS).astype(np.int64)
        return whole
