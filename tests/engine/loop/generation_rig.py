"""Generation over a scripted model, requests for it, and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.paged_model import (
    LogitsOf,
    PagedModel,
    Tokens,
    further_groups,
    spread_logits,
)
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.loop.runner import Runner
from tidemill.engine.scheduling.admission import ArrivalOrder
from tidemill.engine.scheduling.drafts import Drafter
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import (
    Sampling,
    Sequence,
    SequenceRequest,
    SequenceResult,
)
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.scheduling.token_logprobs import TokenLogprob
from tidemill.engine.state.pages import PagePool
from tidemill.protocol.errors import RequestError

VOCABULARY = 11
GREEDY = Sampling(temperature=0)
logits_of = spread_logits(VOCABULARY)


def request(
    prompt: list[int] | None = None, max_tokens: int = 8, sampling: Sampling = GREEDY, **other: Any
) -> SequenceRequest:
    """Return a greedy request with changes."""
    return SequenceRequest(prompt or [1, 2, 3], max_tokens, sampling, **other)


def greedy(prompt: list[int], count: int) -> list[int]:
    """Return the scripted model's greedy output."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_of(tuple(tokens)))))
    return tokens[len(prompt) :]


def only(rig: Rig, wanted: SequenceRequest) -> SequenceResult:
    """Run one request that must not fail."""
    (answer,) = rig.run(wanted)
    assert isinstance(answer, SequenceResult), answer
    return answer


def logprobs_of(tokens: Tokens) -> NDArray[np.float64]:
    """Return the log-probabilities of the tokens that may follow some tokens."""
    logits = np.asarray(logits_of(tokens), np.float64)
    return logits - np.log(np.exp(logits).sum())


@dataclass(eq=False)
class Watch:
    """A `StopText` of one sequence, which matches after a number of tokens."""

    after: int
    seen: list[int] = field(default_factory=list)

    def watch(self) -> Watch:
        """Watch its only sequence."""
        return self

    def push(self, token_id: int) -> str | None:
        """Count a token."""
        self.seen.append(token_id)
        return "END" if len(self.seen) >= self.after else None


@dataclass(frozen=True)
class Ending:
    """A `StopText` for any number of sequences, each with a new watch."""

    after: int

    def watch(self) -> Watch:
        """Return a new watch."""
        return Watch(self.after)


def check_scores(scores: Sequence[TokenLogprob | None], tokens: list[int], top: int) -> None:
    """Compare scores with the softmax of the raw logits; they belong to the last of `tokens`."""
    start = len(tokens) - len(scores)
    for place, score in enumerate(scores, start=start):
        expected = logprobs_of(tuple(tokens[:place]))
        assert score is not None
        assert score.token_id == tokens[place]
        assert score.logprob == pytest.approx(expected[tokens[place]], abs=1e-5)
        best = np.argsort(-expected)[:top].tolist()
        assert [token for token, _ in score.top] == best
        assert [value for _, value in score.top] == pytest.approx(expected[best], abs=1e-5)


class Guesser:
    """Drafts three tokens of the scripted model's greedy output, some of them wrong."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self.num_accepted = self.num_wrong = 0

    def enter(self, slot: int) -> None:
        """Do nothing."""

    def draft(self, slots: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write drafts after the tokens of slots; every fourth position is wrong."""
        counts = np.minimum(most, 3)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            end = int(self._table.num_known_ids[slot])
            for place in range(end, end + count):
                token = int(np.argmax(logits_of(tuple(self._table.tokens[slot, :place].tolist()))))
                self._table.tokens[slot, place] = (token + (place % 4 == 0)) % VOCABULARY
        return counts

    def note_accepted(
        self,
        slots: NDArray[np.int64],
        num_drafts: NDArray[np.int64],
        num_accepted: NDArray[np.int64],
    ) -> None:
        """Count accepted drafts."""
        assert len(slots) == len(num_drafts) == len(num_accepted)
        assert (num_accepted <= num_drafts).all()
        self.num_accepted += int(num_accepted.sum())
        self.num_wrong += int((num_drafts - num_accepted).sum())

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Do nothing."""

    def note_end(self, sequence: Sequence) -> None:
        """Do nothing."""


class Rig:
    """Generation over a `PagedModel`, with access to its parts; pages have 4 tokens.

    A test with the fixture `steps_ahead` runs with both numbers of steps in flight; one with
    `is_late` runs with failures at launch or at collection.
    """

    steps_ahead = 0
    is_late = False

    def __init__(
        self,
        logits_of: LogitsOf,
        *,
        num_pages: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        budget: int = 32,
        steps_ahead: int | None = None,
        kinds: Mapping[str, int] = MappingProxyType({}),
        make_drafter: Callable[[SequenceTable], Drafter] | None = None,
        fewest_copied: int = 0,
    ) -> None:
        if steps_ahead is not None:
            self.steps_ahead = steps_ahead
        self.table = SequenceTable(max_num_seqs, max_model_len, 4)
        self.pool = PagePool(num_pages)
        self.groups = further_groups(self.table, self.pool, step_tokens=budget, **kinds)
        self.model = PagedModel(self.table, logits_of, self.groups)
        self.model.is_late = self.is_late
        self.scheduler = Scheduler(
            self.table,
            self.pool,
            ArrivalOrder(),
            budget,
            groups=self.groups,
            drafter=None if make_drafter is None else make_drafter(self.table),
            fewest_copied=fewest_copied,
        )
        # A scripted model replaces the runner: no other methods are used.
        runner = cast("Runner", self.model)
        vocabulary = len(logits_of((0,)))
        self.work = GenerationCore(self.scheduler, runner, vocabulary, self.steps_ahead)

    def run(self, *requests: SequenceRequest) -> list[SequenceResult | Exception]:
        """Run requests to their end and return their results."""
        sequences = [self.work.add(request) for request in requests]
        self.finish()
        return [outcome(sequence) for sequence in sequences]

    def finish(self, max_steps: int = 3000) -> list[StepOutput[SequenceResult]]:
        """Step until nothing is left to do; return the outputs, and check that no page is left."""
        events: list[StepOutput[SequenceResult]] = []
        for _ in range(max_steps):
            brought = self.work.step()
            if brought is None:
                break
            events += brought
        assert self.work.step() is None
        assert not self.model.violations
        assert self.pool.num_free == self.pool.num_pages
        assert all(group.pool.num_free == group.pool.num_pages for group in self.groups)
        assert len(self.table.free_slots) == len(self.table.sequences)
        return events


def finished_in(events: list[StepOutput[SequenceResult]]) -> list[Sequence]:
    """Return the sequences that some events finish."""
    return [cast("Sequence", event.request) for event in events if event.is_finished]


def outcome(sequence: Sequence) -> SequenceResult | Exception:
    """Return the result of a finished sequence, or its error."""
    try:
        return sequence.result()
    except RequestError as exc:
        return exc
