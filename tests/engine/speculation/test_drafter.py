"""The length of drafts depends on their acceptance rate and on the costs of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.speculation.drafter import MOST_DRAFTS, NgramDrafter

PHRASE = [*range(1, 40)]


class Desk:
    """A table with sequences that repeat a phrase, and its drafter."""

    def __init__(self, count: int = 4) -> None:
        self.table = SequenceTable(count, 400, 16)
        self.drafter = NgramDrafter(self.table)
        greedy = Sampling(temperature=0)
        for number in range(count):
            request = SequenceRequest([*PHRASE, 99, *PHRASE[:20]], 200, greedy)
            self.table.place(Sequence(request, number), 0)
        self.slots = np.sort(self.table.running)

    def draft(self, most: int = 100) -> list[int]:
        """Return how many tokens are drafted of each."""
        return self.drafter.draft(self.slots, np.full(len(self.slots), most)).tolist()

    def judge(self, share: float, rounds: int = 40) -> list[int]:
        """Let that share of the tokens be right for a while; return the next lengths."""
        rng = np.random.default_rng(0)
        for _ in range(rounds):
            counts = np.array(self.draft())
            right = [int(np.argmin([*(rng.random(n) < share), False])) for n in counts]
            self.drafter.note_accepted(
                self.slots[counts > 0], counts[counts > 0], np.array(right)[counts > 0]
            )
        return self.draft()

    def tell_costs(self, *, are_alike: bool = False, **costs: float) -> None:
        """Let steps of all shapes, or that all decode as much, take what these costs come to."""
        rng = np.random.default_rng(1)
        for number in range(64):
            decodes, prefilled, attended = rng.integers(1, 200, 3).tolist()
            if are_alike:
                decodes, attended = 4, 1
                prefilled *= number < 4
            seconds = (
                costs["step"]
                + costs["token"] * (decodes + prefilled)
                + costs["attended"] * attended * 100
            )
            plan = SimpleNamespace(
                num_decoded_tokens=decodes,
                num_tokens=decodes + prefilled,
                num_attended_tokens=attended * 100,
            )
            self.drafter.note_seconds(cast("StepPlan", cast("Any", plan)), seconds)


def test_drafts_are_written_after_the_known_tokens() -> None:
    """They end where the sequence must end."""
    desk = Desk(1)
    [count] = desk.draft(most=3)
    assert count == 3
    assert desk.table.tokens[0, 60:63].tolist() == PHRASE[20:23]
    assert desk.draft(most=0) == [0]


def test_accepted_drafts_are_long_and_rejected_ones_stop() -> None:
    """Drafting is tried again after a while."""
    assert Desk().judge(1.0) == [MOST_DRAFTS] * 4
    desk = Desk()
    assert desk.judge(0.02) == [0] * 4
    assert any(all(desk.draft()) for _ in range(3000))


def test_costs_determine_the_length_of_drafts() -> None:
    """If steps dominate the cost, drafts are long; if tokens dominate it, drafts are short."""
    dear, cheap = Desk(), Desk()
    dear.tell_costs(step=1e-4, token=1e-3, attended=0)
    cheap.tell_costs(step=1e-1, token=1e-4, attended=0)
    assert 0 <= max(dear.judge(0.7)) < min(cheap.judge(0.7))
    far = Desk()
    far.tell_costs(step=1e-4, token=1e-4, attended=1e-5)
    assert min(far.judge(0.7)) > max(dear.judge(0.7))


def test_steps_that_are_alike_make_no_token_free() -> None:
    """A decoded token is then assumed to cost as much as one of a prompt."""
    desk = Desk()
    desk.tell_costs(are_alike=True, step=1e-4, token=1e-3, attended=0)
    assert max(desk.judge(0.6)) <= 1


def test_no_draft_uses_the_tokens_of_a_salted_row() -> None:
    """Otherwise the speed of other requests would reveal its contents."""
    desk = Desk(1)
    for salt, expected in (("secret", 0), ("", 3)):
        request = SequenceRequest([5], 200, Sampling(), cache_salt=salt)
        ended = Sequence(request, 9)
        ended.generated = [*range(200, 240)]
        desk.drafter.note_end(ended)
        desk.table.tokens[0, :60] = [*range(300, 350), *range(200, 210)]
        assert desk.draft(most=3) == [expected]
