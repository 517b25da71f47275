"""A step or a request that fails costs the others nothing."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.engine.loop.generation_rig import (
    GREEDY,
    VOCABULARY,
    Ending,
    Guesser,
    Rig,
    Watch,
    check_scores,
    finished_in,
    greedy,
    logits_of,
    only,
    outcome,
    request,
)
from tests.engine.paged_model import Tokens
from tidemill.engine.errors import DeviceFailed
from tidemill.engine.kernels.cpu import sampling as cpu_sampling
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.scheduling.sequence import (
    Sampling,
    Sequence,
    SequenceRequest,
    SequenceResult,
)
from tidemill.engine.state import rows
from tidemill.protocol.errors import InternalError

pytestmark = pytest.mark.usefixtures("steps_ahead", "is_late")


def broken_after(prompt: list[int], place: int, bad: float = math.nan) -> Any:
    """Return logits that are bad once a sequence with this prompt has `place` tokens."""

    def logits(tokens: Tokens) -> NDArray[np.float32]:
        row = np.array(logits_of(tokens), np.float32)
        if list(tokens[: len(prompt)]) == prompt and len(tokens) >= place:
            row[5] = bad
        return row

    return logits


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [3, 6])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(temperature=1.0, seed=1, top_p=0.9), replace(GREEDY, logprobs=2)],
)
def test_logits_that_are_not_finite_fail_only_their_request(
    bad: float, place: int, sampling: Sampling
) -> None:
    """The other rows do not change."""
    rig = Rig(broken_after([9, 9, 9], place, bad))
    watch = Watch(99)
    requests = [
        request([4, 4], sampling=sampling),
        request([9, 9, 9], sampling=sampling, stop_text=watch),
        request([5, 5], sampling=sampling),
    ]
    first, failed, last = rig.run(*requests)
    assert isinstance(failed, InternalError)
    assert failed.status_code == 500
    assert first == only(Rig(logits_of), requests[0])
    assert last == only(Rig(logits_of), requests[2])
    assert len(watch.seen) == place - 3


def test_state_of_a_failed_request_is_not_reused() -> None:
    """A temporary fault must not fail every request with the same prefix."""
    prompt = list(range(11)) * 2
    bad = [math.nan]

    def faulty(tokens: Tokens) -> NDArray[np.float32]:
        row = np.array(logits_of(tokens), np.float32)
        if tokens == tuple(prompt) and bad:
            row[0] = bad.pop()
        return row

    rig = Rig(faulty)
    assert isinstance(rig.run(request(prompt))[0], InternalError)
    again = only(rig, request(prompt))
    assert (again.token_ids, again.num_cached_tokens) == (greedy(prompt, 8), 0)


def test_only_pages_derived_from_a_broken_row_are_forgotten() -> None:
    """Successful sequences name their pages again, and unrelated pages stay cached."""
    shared, other = [1, 2, 3, 4], [7, 7, 7, 7]
    rig = Rig(broken_after([*shared, 9, 9, 9, 9], 10))
    assert isinstance(only(rig, request([*other, 5])), SequenceResult)
    answers = rig.run(
        request([*shared, 9, 9, 9, 9, 9], 8), request([*shared, 8], 12), request([*shared, 6], 12)
    )
    assert [isinstance(one, InternalError) for one in answers] == [True, False, False]
    cached = [
        only(rig, request(prompt, 1)).num_cached_tokens
        for prompt in ([*other, 6], [*shared, 3], [*shared, 9, 9, 9, 9, 3])
    ]
    assert cached == [4, 4, 4]


def test_a_device_without_finite_numbers_ends_the_engine_and_fails_no_request() -> None:
    """No row of any step is finite, not even the canary's."""
    rig = Rig(lambda _: np.full(VOCABULARY, np.nan, np.float32))
    for one in range(4):
        rig.work.add(request([one, 2]))
    with pytest.raises(DeviceFailed, match="not finite for any input"):
        rig.finish()


def test_a_step_that_fails_once_costs_no_request() -> None:
    """All sequences of the step start over and finish with the same results."""
    requests = [request([one, 2], 8, replace(GREEDY, logprobs=1)) for one in range(4)]
    rig = Rig(logits_of)
    failures = [RuntimeError("once"), None]

    def fails(sequences: list[Sequence]) -> Exception | None:
        if len(sequences) == 4 and len(rig.model.plans) == 5:
            return failures.pop(0)
        return None

    rig.model.fails = fails
    assert rig.run(*requests) == Rig(logits_of).run(*requests)
    assert len(failures) == 1
    assert rig.work.stats().failures == 1


def test_a_failure_that_passes_costs_one_step() -> None:
    """No sequence starts over, and only the step's tokens are computed again."""

    def counts(failing: int) -> tuple[int, int]:
        rig = Rig(logits_of, num_pages=512, max_num_seqs=128, max_model_len=16, budget=512)
        rig.model.fails = lambda _: (
            RuntimeError("once") if len(rig.model.plans) == failing else None
        )
        rig.run(*(request([one // 11, one % 11], 6) for one in range(121)))
        return len(rig.model.plans), sum(plan.num_tokens for plan in rig.model.plans)

    steps, tokens = counts(0)
    failed_steps, failed_tokens = counts(4)
    num_lost = 1 + Rig.steps_ahead * Rig.is_late  # steps in flight after it are lost with it
    assert failed_steps <= steps + num_lost
    assert failed_tokens <= tokens + num_lost * 121


def test_steps_that_fail_only_in_company_become_smaller() -> None:
    """Every request finishes, although none succeeds together with three others."""
    rig = Rig(logits_of)
    rig.model.fails = lambda running: RuntimeError("too many") if len(running) > 3 else None
    requests = [request([one, 2], 12) for one in range(8)]
    assert rig.run(*requests) == Rig(logits_of).run(*requests)
    assert len(rig.model.plans[-1].slots) > 1


@pytest.mark.parametrize("error", [RuntimeError("odd shapes"), MemoryError(), IndexError("7")])
@pytest.mark.parametrize("place", [1, 4])
def test_a_request_that_fails_every_step_it_is_in_is_the_only_one_to_fail(
    error: Exception, place: int
) -> None:
    """It fails from its first step or later; the others finish normally."""
    requests = [
        request([one, 2, 3], 8, replace(GREEDY, logprobs=1), prompt_logprobs=1) for one in range(5)
    ]
    rig = Rig(logits_of)

    def fails(sequences: list[Sequence]) -> Exception | None:
        culprits = [one for one in sequences if one.request is requests[2]]
        is_there = [rig.table.num_tokens[rig.table.sequences.index(one)] for one in culprits]
        return error if any(length >= 2 + place for length in is_there) else None

    rig.model.fails = fails
    answers = rig.run(*requests)
    expected = Rig(logits_of).run(*requests)
    assert isinstance(answers[2], InternalError)
    assert [answers[i] for i in (0, 1, 3, 4)] == [expected[i] for i in (0, 1, 3, 4)]


def test_a_step_that_fails_half_scored_scores_no_token_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sampled tokens were scored before the scores of a prompt failed."""
    rig = Rig(logits_of)
    score, calls = cpu_sampling.compute_logprobs, []

    def failing(*rows: Any) -> object:
        calls.append(rows)
        if len(calls) == 3:
            raise MemoryError
        return score(*rows)

    monkeypatch.setattr(cpu_sampling, "compute_logprobs", failing)
    first = rig.work.add(request(sampling=replace(GREEDY, logprobs=1)))
    rig.work.step()
    rig.work.step()
    second = rig.work.add(request([4, 5, 6], prompt_logprobs=1))
    rig.work.step()
    assert rig.model.num_probes == 1
    rig.finish()
    for sequence, prompt in ((first, [1, 2, 3]), (second, [4, 5, 6])):
        assert sequence.result().token_ids == greedy(prompt, 8)
    scores = first.result().logprobs
    assert scores is not None
    assert len(scores) == 8
    check_scores(scores, [1, 2, 3, *first.generated], 1)


def test_two_culprits_each_get_their_error() -> None:
    """Later requests are served."""
    requests = [request([one, 2, 3]) for one in range(5)]
    rig = Rig(logits_of)
    culprits = {requests[1], requests[3]}
    rig.model.fails = lambda seqs: (
        ValueError("bad") if culprits & {one.request for one in seqs} else None
    )
    answers = rig.run(*requests)
    failed = [isinstance(answer, InternalError) for answer in answers]
    assert failed == [False, True, False, True, False]
    assert isinstance(rig.run(request([7, 7]))[0], SequenceResult)


def test_every_request_may_be_a_culprit() -> None:
    """Each has its own error, since canaries succeed in between: the device is not blamed."""
    rig = Rig(logits_of)
    rig.model.fails = lambda seqs: (
        ValueError("bad") if any(one.request.max_tokens == 8 for one in seqs) else None
    )
    answers = rig.run(*(request([one, 2, 3], 8) for one in range(12)))
    assert all(isinstance(answer, InternalError) for answer in answers)


def events_until_the_end(rig: Rig) -> list[StepOutput[SequenceResult]]:
    """Step until the device is given up, and return the earlier outputs."""
    events: list[StepOutput[SequenceResult]] = []
    for _ in range(1000):
        try:
            events += rig.work.step() or []
        except DeviceFailed:
            return events
    pytest.fail("the device was never given up")


@pytest.mark.parametrize("from_step", [1, 2, 6])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_device_that_fails_every_step_ends_the_engine_and_fails_no_request(
    from_step: int, *, is_gone: bool
) -> None:
    """A probe or only a canary detects it; no request has an error."""
    rig = Rig(logits_of)

    def fails(_: list[Sequence]) -> Exception | None:
        if len(rig.model.plans) < from_step:
            return None
        rig.model.is_gone = is_gone
        return RuntimeError("CUDA error: an illegal memory access was encountered")

    rig.model.fails = fails
    for one in range(4):
        rig.work.add(request([one, 2, 3], 3 + 2 * one))
    answers = [outcome(one) for one in finished_in(events_until_the_end(rig))]
    assert all(isinstance(answer, SequenceResult) for answer in answers)
    assert not is_gone or rig.model.num_probes == 1


def test_a_device_that_fails_every_second_step_is_given_up() -> None:
    """Each failure is temporary, so that no request is blamed, but the values are unreliable."""
    rig = Rig(logits_of, max_model_len=300, num_pages=200)
    rig.model.fails = lambda _: RuntimeError("flaky") if len(rig.model.plans) % 2 else None
    rig.work.add(request([1, 2, 3], 200))
    assert events_until_the_end(rig) == []


def test_a_machine_without_a_disk_ends_the_engine_and_fails_no_request() -> None:
    """No request is to blame for a kernel that cannot be compiled, even if other steps succeed."""
    rig = Rig(logits_of)
    rig.model.fails = lambda _: (
        OSError(28, "No space left on device") if rig.model.plans[-1].num_tokens == 3 else None
    )
    rig.work.add(request([1, 2, 3], 200))
    assert events_until_the_end(rig) == []


def test_a_request_aborted_while_accused_gets_no_event() -> None:
    """No canary is needed."""
    rig = Rig(logits_of)
    rig.model.fails = lambda seqs: ValueError("bad") if seqs else None
    sequence = rig.work.add(request())
    while not rig.work._blame.accused:
        assert not rig.work.step()
    rig.work.abort({sequence})
    assert rig.finish() == []


def test_pages_of_a_failed_step_are_never_read() -> None:
    """Its pages have no name, so that the same prompt is computed again."""
    prompt = list(range(11)) * 2
    rig = Rig(logits_of)
    failures = [RuntimeError("half way")]
    rig.model.fails = lambda _: failures.pop() if failures else None
    assert only(rig, request(prompt)).token_ids == greedy(prompt, 8)
    assert only(rig, request(prompt)).token_ids == greedy(prompt, 8)


@pytest.mark.usefixtures("steps_ahead", "is_late")
def test_a_page_that_a_culprit_never_filled_is_not_read() -> None:
    """A preempted sequence that shares it since the same step does not name it."""
    rig = Rig(logits_of, max_num_seqs=2)
    culprit, other = (rig.work.add(request([1, 2, 3, 4, last], 3)) for last in (5, 6))
    rig.model.fails = lambda running: ValueError("bad") if culprit in running else None
    rig.finish()
    assert isinstance(outcome(culprit), InternalError)
    assert outcome(other).token_ids == greedy([1, 2, 3, 4, 6], 3)


@dataclass(frozen=True)
class Storm:
    """Requests and their arrivals, sizes, and faults: steps, a culprit, and aborts."""

    requests: list[SequenceRequest]
    arrivals: list[int]
    extra_pages: int
    max_num_seqs: int
    budget: int
    failing_steps: frozenset[int]
    culprits: frozenset[int]
    dropped: dict[int, int]
    kinds: dict[str, int]  # of state in addition to full pages
    is_drafted: bool
    fewest_copied: int


@st.composite
def storms(draw: st.DrawFn) -> Storm:
    """Draw a small engine with too few pages and several faults."""
    common = draw(st.lists(st.integers(0, 10), min_size=1, max_size=14))
    prompts = st.tuples(
        st.integers(0, len(common)), st.lists(st.integers(0, 10), min_size=1, max_size=9)
    ).map(lambda parts: common[: parts[0]] + parts[1])
    sampling = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.0, 1.3]),
        top_k=st.sampled_from([0, 4]),
        frequency_penalty=st.sampled_from([0.0, 0.8]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        seed=st.integers(0, 3),
        logprobs=st.sampled_from([None, 0, 2]),
    )
    requests = draw(
        st.lists(
            st.builds(
                SequenceRequest,
                prompts,
                st.integers(0, 12),
                sampling,
                min_tokens=st.integers(0, 3),
                stop_token_ids=st.frozensets(st.integers(0, 10), max_size=2),
                stop_text=st.sampled_from([None, None, Ending(3), Ending(7)]),
                prompt_logprobs=st.sampled_from([None, None, 1]),
                cache_salt=st.sampled_from(["", "", "salt"]),
                is_streamed=st.booleans(),
            ),
            min_size=1,
            max_size=8,
        )
    )
    numbers = st.integers(0, len(requests) - 1)
    max_num_seqs = draw(st.integers(1, 6))
    arrivals = st.lists(st.integers(0, 12), min_size=len(requests), max_size=len(requests))
    return Storm(
        requests,
        sorted(draw(arrivals)),
        draw(st.integers(0, 6)),
        max_num_seqs,
        draw(st.integers(max_num_seqs, 20)),
        draw(st.frozensets(st.integers(1, 30), max_size=3)),
        draw(st.frozensets(numbers, max_size=1)),
        draw(st.dictionaries(st.integers(0, 25), numbers, max_size=2)),
        draw(
            st.one_of(
                st.just({}),
                st.builds(dict, window=st.integers(1, 12), chunk=st.integers(3, 16)),
                st.builds(dict, num_rows=st.integers(1, max_num_seqs + 2)),
            )
        ),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )


@given(storms())
def test_each_request_has_the_result_that_it_has_alone(storm: Storm) -> None:
    """It covers preemption, retries, drafts, few pages, and failing or leaving neighbors."""
    rows.FEWEST_TOKENS = 4  # snapshots of a page
    most = max(len(one.prompt_ids) + one.max_tokens for one in storm.requests)
    rig = Rig(
        logits_of,
        num_pages=(1 + len(storm.kinds.keys() - {"num_rows"})) * -(-most // 4) + storm.extra_pages,
        kinds=storm.kinds,
        max_num_seqs=storm.max_num_seqs,
        budget=storm.budget,
        make_drafter=Guesser if storm.is_drafted and "num_rows" not in storm.kinds else None,
        fewest_copied=storm.fewest_copied,
    )
    sequences: list[Sequence] = []

    def fails(running: list[Sequence]) -> Exception | None:
        culprits = {one for place, one in enumerate(sequences) if place in storm.culprits}
        is_bad = len(rig.model.plans) in storm.failing_steps or not culprits.isdisjoint(running)
        return RuntimeError("bad day") if is_bad else None

    rig.model.fails = fails
    events: list[StepOutput[SequenceResult]] = []
    dropped = set()
    try:
        for step in range(26):
            coming = storm.requests[len(sequences) : bisect(storm.arrivals, step)]
            sequences += [rig.work.add(one) for one in coming]
            leaving = storm.dropped.get(step, len(sequences))
            if leaving < len(sequences) and sequences[leaving] not in finished_in(events):
                dropped.add(sequences[leaving])
                rig.work.abort(dropped)
            events += rig.work.step() or []
        events += rig.finish()
    except DeviceFailed:  # a canary step was among the failing ones
        assert storm.failing_steps
        assert not rig.model.violations
        return
    finished = finished_in(events)
    assert len(finished) == len(set(finished))
    assert set(finished) == set(sequences) - dropped
    assert rig.work.stats().output_tokens == sum(len(one.generated) for one in sequences)
    culprits = {sequences[number] for number in storm.culprits}
    for sequence in finished:
        emitted = [event.new_token_ids for event in events if event.request is sequence]
        assert [*chain(*emitted)] == sequence.generated
        # A duplicate is not computed, so it cannot be blamed.
        is_repeat = sequence.num_cached_tokens == len(sequence.request.prompt_ids)
        seen = None if sequence.stop_watch is None or is_repeat else sequence.stop_watch.seen
        assert seen is None or seen == sequence.generated
        answer = outcome(sequence)
        if isinstance(answer, InternalError):
            # It was in a failed step, and alone in another, so it seemed to be the culprit.
            assert sequence in culprits or len(storm.failing_steps) + len(culprits) > 1
            continue
        assert isinstance(answer, SequenceResult)
        assert is_repeat or sequence not in culprits
        alone = only(Rig(logits_of, steps_ahead=0), sequence.request)
        assert approximately(answer) == approximately(alone)


def approximately(answer: SequenceResult) -> list[object]:
    """Return what two runs of one request have in common: all except rounding and cache hits."""
    scores = [*(answer.logprobs or []), *(answer.prompt_logprobs or [])]
    return [
        answer.token_ids,
        answer.finish_reason,
        answer.stop_reason,
        answer.logprobs is None,
        answer.prompt_logprobs is None,
        [
            score and (score.token_id, round(score.logprob, 3), [token for token, _ in score.top])
            for score in scores
        ],
    ]
