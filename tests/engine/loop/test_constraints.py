"""Sequences under a constraint: their outputs, their ends, and their independence."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.engine.loop.generation_rig import (
    GREEDY,
    VOCABULARY,
    Ending,
    Guesser,
    Rig,
    greedy,
    logits_of,
    only,
    outcome,
    request,
)
from tests.engine.paged_model import Tokens
from tidemill.engine.loop.runner import Readout
from tidemill.engine.loop.step_logits import StepLogits
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceResult
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.protocol.errors import InternalError, RequestError

END = 9


@dataclass(frozen=True)
class Places:
    """A constraint by position: the ids allowed there (empty: any); complete after the last."""

    ids: tuple[tuple[int, ...], ...]

    def start_state(self) -> PlacesWatch:
        """Return the state of one sequence."""
        return PlacesWatch(self.ids)


@dataclass(eq=False)
class PlacesWatch:
    """The state of one sequence under `Places`."""

    ids: tuple[tuple[int, ...], ...]
    seen: list[int] = field(default_factory=list)

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Allow the tokens of the next position."""
        allowed = self.ids[len(self.seen)]
        if not allowed:
            return False
        mask[:] = 0
        for token_id in allowed:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
        return True

    def push(self, token_id: int) -> bool:
        """Check a token against its position."""
        allowed = self.ids[len(self.seen)]
        assert not allowed or token_id in allowed
        self.seen.append(token_id)
        return len(self.seen) == len(self.ids)

    def fork(self) -> PlacesWatch:
        """Return an independent copy."""
        return PlacesWatch(self.ids, [*self.seen])


@dataclass(frozen=True)
class Broken:
    """A constraint that fails from a position on."""

    error: Exception
    place: int = 2
    fails_at_push: bool = False

    def start_state(self) -> BrokenWatch:
        """Return the state of one sequence."""
        return BrokenWatch(self)


@dataclass(eq=False)
class BrokenWatch:
    """The state of one sequence, which fails at its position."""

    constraint: Broken
    num_seen: int = 0

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Allow all, or fail."""
        del mask
        if not self.constraint.fails_at_push and self.num_seen == self.constraint.place:
            raise self.constraint.error
        return False

    def push(self, token_id: int) -> bool:
        """Count a token, or fail."""
        del token_id
        self.num_seen += 1
        if self.constraint.fails_at_push and self.num_seen == self.constraint.place:
            raise self.constraint.error
        return False

    def fork(self) -> BrokenWatch:
        """Return an independent copy."""
        return replace(self)


def best_of(places: Several[Several[int]], prompt: list[int] | None = None) -> list[int]:
    """Return the scripted model's greedy output among the ids allowed at each position."""
    tokens = list(prompt or [1, 2, 3])
    start = len(tokens)
    for allowed in places:
        logits = np.asarray(logits_of(tuple(tokens)))
        tokens.append(max(allowed or range(VOCABULARY), key=lambda token: float(logits[token])))
    return tokens[start:]


THREE = Places(((4, 7), (2, 5, 8), (6,)))


@pytest.mark.usefixtures("steps_ahead")
def test_each_token_is_the_likeliest_of_those_allowed() -> None:
    """The sequence ends when nothing may follow, without an end token."""
    answer = only(Rig(logits_of), request(constraint=THREE))
    assert answer == SequenceResult(best_of(THREE.ids), "stop")


@pytest.mark.usefixtures("steps_ahead")
def test_neighbours_under_other_constraints_and_none_change_nothing() -> None:
    """Each row equals its result alone, regardless of its neighbors."""
    requests = [
        request([1, 2, 3], constraint=THREE),
        request([3, 3]),
        request([4], constraint=Places(((), (1, 2), ()))),
        request([5, 6], constraint=Places(((0,),) * 5), max_tokens=3),
        request([2, 2], sampling=Sampling(temperature=2.0, seed=5), constraint=THREE),
    ]
    together = Rig(logits_of).run(*requests)
    assert together == [only(Rig(logits_of), one) for one in requests]
    assert isinstance(together[3], SequenceResult)
    assert (together[3].token_ids, together[3].finish_reason) == ([0, 0, 0], "length")


@pytest.mark.usefixtures("steps_ahead")
def test_a_preempted_sequence_continues_its_constraint() -> None:
    """After many preemptions its result is the same as without."""
    long = Places(tuple((token % VOCABULARY, (token + 3) % VOCABULARY) for token in range(20)))
    prompts = [[n, n + 1, n + 2] for n in range(1, 6)]
    rig = Rig(logits_of, num_pages=12)
    sequences = [rig.work.add(request(one, 20, constraint=long)) for one in prompts]
    rig.finish()
    assert rig.work.stats().preemptions
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert outcome(sequence) == SequenceResult(
            best_of(long.ids, prompt), "stop", num_cached_tokens=sequence.num_cached_tokens
        )


@pytest.mark.usefixtures("is_late", "steps_ahead")
def test_a_failed_step_fills_the_mask_again() -> None:
    """The mask before the failure produced no token."""
    steps = count()

    def fails(_: list[Sequence]) -> Exception | None:
        return RuntimeError("a passing failure") if next(steps) in (0, 2) else None

    rig = Rig(logits_of)
    rig.model.fails = fails
    assert only(rig, request(constraint=THREE)).token_ids == best_of(THREE.ids)
    assert next(steps) > 4


@pytest.mark.usefixtures("steps_ahead")
def test_an_end_token_may_come_early_if_nothing_else_is_allowed() -> None:
    """A complete output ends before `min_tokens`; otherwise no stop token may come."""
    ends = frozenset({END})
    early = Places(((4,), (END,)))
    answer = only(Rig(logits_of), request(constraint=early, min_tokens=6, stop_token_ids=ends))
    assert answer == SequenceResult([4, END], "stop", stop_reason=END)
    later = Places(((END, 1), (END, 2), (END, 3), (END, 4), (5,)))
    answer = only(Rig(logits_of), request(constraint=later, min_tokens=4, stop_token_ids=ends))
    assert answer.token_ids[:3] == [1, 2, 3]
    whole = only(Rig(logits_of), request(constraint=THREE, min_tokens=6))
    assert whole == SequenceResult(best_of(THREE.ids), "stop")


def test_stops_apply_inside_a_constraint() -> None:
    """A stop text and the length limit have their own reasons."""
    stopped = only(Rig(logits_of), request(constraint=THREE, stop_text=Ending(2)))
    assert (len(stopped.token_ids), stopped.stop_reason) == (2, "END")
    short = only(Rig(logits_of), request(constraint=THREE, max_tokens=2))
    assert (len(short.token_ids), short.finish_reason) == (2, "length")
    just = only(Rig(logits_of), request(constraint=THREE, max_tokens=3))
    assert just == SequenceResult(best_of(THREE.ids), "stop")


def test_penalties_bias_and_cuts_choose_among_allowed_tokens() -> None:
    """None of them selects a forbidden token."""
    shaped = Sampling(
        temperature=1.5,
        top_p=0.5,
        top_k=2,
        min_p=0.2,
        presence_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={0: 100.0, 8: 50.0},
        seed=3,
    )
    answer = only(Rig(logits_of), request(sampling=shaped, constraint=THREE))
    assert all(token in may for token, may in zip(answer.token_ids, THREE.ids, strict=True))
    biased = replace(GREEDY, logit_bias={0: 100.0, 8: 50.0})
    assert only(Rig(logits_of), request(sampling=biased, constraint=THREE)).token_ids[1] == 8


def test_scores_ignore_the_mask() -> None:
    """The sampled token need not be among the most likely ones."""
    scored = replace(GREEDY, logprobs=1)
    answer = only(Rig(logits_of), request(sampling=scored, constraint=THREE))
    assert answer.logprobs is not None
    free = greedy([1, 2, 3], 1)[0]
    assert answer.logprobs[0].top[0][0] == free
    assert [score.token_id for score in answer.logprobs] == answer.token_ids


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("fails_at_push", [False, True], ids=["fill", "push"])
def test_a_failing_constraint_ends_only_its_own_row(*, fails_at_push: bool) -> None:
    """The row has the constraint's message; the others continue."""
    error = RequestError("nothing more", param="regex")
    broken = request([7, 7], constraint=Broken(error, fails_at_push=fails_at_push))
    failed, fine, free = Rig(logits_of).run(broken, request(constraint=THREE), request([4, 4]))
    assert failed is error
    assert fine == SequenceResult(best_of(THREE.ids), "stop")
    assert free == only(Rig(logits_of), request([4, 4]))


@pytest.mark.parametrize("fails_at_push", [False, True], ids=["fill", "push"])
def test_an_internal_error_in_a_constraint_is_a_500_of_its_row(*, fails_at_push: bool) -> None:
    """No other row is blamed."""
    broken = Broken(ValueError("a fault"), fails_at_push=fails_at_push)
    failed, fine = Rig(logits_of).run(request([7], constraint=broken), request(constraint=THREE))
    assert isinstance(failed, InternalError)
    assert "a fault" in failed.message
    assert isinstance(fine, SequenceResult)


def test_equal_constraints_are_deduplicated() -> None:
    """Equality is by value, not by identity."""
    rig = Rig(logits_of)
    same = [request(constraint=Places(((4, 7), (2, 5)))) for _ in range(2)]
    for one in (*same, request(constraint=Places(((4, 7), (2, 6)))), request()):
        rig.work.add(one)
    assert rig.work.stats().waiting == 1 + 3
    assert len(rig.work._duplicates) == 1


def test_a_plain_step_uses_no_thread() -> None:
    """Files without constraints have no cost from constraints of others."""

    def logits(tokens: Tokens) -> list[float]:
        return list(logits_of(tokens))

    rig = Rig(logits)
    rig.run(request())
    assert not rig.work._masks._threads._threads


class Notes:
    """Records the order in which a rig's steps are computed and their results awaited."""

    def __init__(self, rig: Rig) -> None:
        self.events: list[str] = []
        run, read_out = rig.model.run, rig.model.read_out

        def noted_run(plan: StepPlan) -> StepLogits:
            self.events.append("run")
            return run(plan)

        def noted_read_out(tensors: Several[Tensor]) -> Readout:
            readout = read_out(tensors)
            wait = readout.wait

            def noted_wait() -> list[NDArray[Any]]:
                self.events.append("wait")
                return wait()

            readout.wait = noted_wait  # type: ignore[method-assign]
            return readout

        rig.model.run, rig.model.read_out = noted_run, noted_read_out  # type: ignore[method-assign]


def test_the_device_computes_while_the_host_fills_masks() -> None:
    """The layers of a step run before the tokens that its constraints need have arrived."""
    rig = Rig(logits_of, steps_ahead=1)
    notes = Notes(rig)
    rig.run(request(constraint=Places(((1, 2),) * 5)), request([4], constraint=THREE))
    assert notes.events[:8] == ["run", "run", "wait", "run", "wait", "run", "wait", "run"]


def test_a_step_whose_tokens_cannot_be_chosen_runs_again() -> None:
    """Tokens of the previous step may have arrived: each row equals its result alone."""
    long = Places(((1, 2, 5), (3, 4, 8)) * 4)
    requests = [request([1, 2], constraint=long), request([3]), request([4], constraint=THREE)]
    alone = [only(Rig(logits_of), one) for one in requests]
    for failing in range(10):
        rig, calls = Rig(logits_of, steps_ahead=1), count()
        sample = rig.work._sampler.sample

        def fails_once(
            *arguments: Any, calls: Any = calls, failing: int = failing, sample: Any = sample
        ) -> Any:
            if next(calls) == failing:
                raise RuntimeError("a passing failure")
            return sample(*arguments)

        rig.work._sampler.sample = fails_once  # type: ignore[method-assign]
        assert rig.run(*requests) == alone


MIXED = st.tuples(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    st.sampled_from([None, THREE, Places(((),) * 7), Places(((1, 2, 5), (3, 4, 8)) * 4)]),
    st.integers(1, 9),
    st.sampled_from(
        [
            GREEDY,
            Sampling(temperature=1.0, seed=3),
            replace(GREEDY, logprobs=1),
            replace(GREEDY, logprobs=1, reads_confidence=True),
        ]
    ),
)


@given(
    drawn=st.lists(MIXED, min_size=1, max_size=8),
    failing=st.integers(0, 25),
    is_late=st.booleans(),
    is_drafted=st.booleans(),
    num_pages=st.integers(8, 40),
)
def test_rows_next_to_constraints_equal_their_results_alone(
    drawn: list[tuple[list[int], Places | None, int, Sampling]],
    failing: int,
    *,
    is_late: bool,
    is_drafted: bool,
    num_pages: int,
) -> None:
    """It covers few pages, failing steps, mixed constraints, and drafts."""
    requests = [
        request(prompt, most, sampling, constraint=places)
        for prompt, places, most, sampling in drawn
    ]
    steps, make_drafter = count(), Guesser if is_drafted else None
    ahead = int(not is_drafted)
    rig = Rig(logits_of, steps_ahead=ahead, num_pages=num_pages, make_drafter=make_drafter)
    rig.model.is_late = is_late
    rig.model.fails = lambda _: RuntimeError("passes") if next(steps) == failing else None
    for actual, one in zip(rig.run(*requests), requests, strict=True):
        expected = only(Rig(logits_of, steps_ahead=0), one)
        assert isinstance(actual, SequenceResult)
        assert (actual.token_ids, actual.finish_reason) == (
            expected.token_ids,
            expected.finish_reason,
        )
        assert list(actual.logprobs or ()) == list(expected.logprobs or ())
        assert list(map(repr, actual.token_choices)) == list(map(repr, expected.token_choices))
        num_choices = len(actual.token_ids) if one.sampling.reads_confidence else 0
        assert len(actual.token_choices) == num_choices
