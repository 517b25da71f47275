"""Steps that do not fit into memory: smaller ones follow, and every request finishes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.loop.generation_rig import GREEDY, Rig, logits_of, only, outcome, request
from tests.engine.scheduling.yard import waiting
from tidemill.engine.errors import DeviceFailed
from tidemill.engine.kernels.cpu import sampling as cpu_sampling
from tidemill.engine.scheduling import step_budget
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest, SequenceResult
from tidemill.engine.scheduling.step_failures import MAX_FAILURES_IN_COMPANY
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.protocol.errors import InternalError

pytestmark = pytest.mark.usefixtures("steps_ahead", "is_late")


def out_of_memory() -> torch.OutOfMemoryError:
    """Return torch's error for a failed allocation."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def lacking(fits: Callable[[StepPlan], bool], **sizes: int) -> Rig:
    """Return a rig on a device with memory for only those steps."""
    rig = Rig(logits_of, **sizes)
    rig.model.fails = lambda _: None if fits(rig.model.plans[-1]) else out_of_memory()
    return rig


def alone(request_: SequenceRequest) -> SequenceResult:
    """Return the result of a request that has all memory."""
    return only(Rig(logits_of, steps_ahead=0), request_)


def test_steps_above_a_size_are_split_until_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    """No request fails, all answers are the same, and the log has a warning."""
    requests = [request([one, 2, 3, 4, 5], 8, replace(GREEDY, logprobs=1)) for one in range(8)]
    rig = lacking(lambda plan: plan.num_tokens <= 5)
    with caplog.at_level(logging.WARNING):
        answers = rig.run(*requests)
    assert answers == [alone(one) for one in requests]
    failed = [plan for plan in rig.model.plans if plan.num_tokens > 5]
    assert 0 < len(caplog.records) == rig.model.num_memory_freed <= len(failed)
    assert "a step of 32 tokens did not fit into memory: the limit is 16 from now on" in caplog.text
    assert max(len(plan.slots) for plan in rig.model.plans[-8:]) > 1


def test_the_oldest_half_continues_undisturbed() -> None:
    """The newest half wait, first in the queue, and return as the others end."""
    rig = lacking(lambda plan: plan.num_decodes <= 4)
    sequences = [rig.work.add(request([one, 2], 12)) for one in range(8)]
    while rig.model.num_memory_freed == 0:
        rig.work.step()
    assert rig.table.sequences.count(None) == 4
    assert waiting(rig.scheduler) == sequences[4:]
    rig.finish()
    assert [sequence.num_preemptions > 0 for sequence in sequences] == [False] * 4 + [True] * 4


def test_sequences_that_started_with_the_step_start_again() -> None:
    """They may share pages that the failed step did not compute."""
    prompt = [*range(11), *range(10)]  # five pages that all share, and one token
    rig = lacking(lambda plan: plan.starts_fresh.sum() < 4, budget=64)
    answers = rig.run(*(request(prompt, min_tokens=number) for number in range(4)))
    assert rig.model.num_memory_freed == 1
    for answer in answers:
        assert isinstance(answer, SequenceResult)
        assert answer.token_ids == alone(request(prompt)).token_ids


def test_prompts_are_computed_in_smaller_chunks() -> None:
    """A single long prompt fits too, and its scores are complete, none of them twice."""
    scored = request(list(range(11)) * 3, 4, replace(GREEDY, logprobs=2), prompt_logprobs=2)
    rig = lacking(lambda plan: plan.num_tokens <= 3)
    assert only(rig, scored) == alone(scored)


def test_a_step_that_runs_out_while_it_scores_scores_no_token_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The remaining sequences already have some of their scores."""
    rig = Rig(logits_of)
    score, calls = cpu_sampling.compute_logprobs, []

    def failing(*rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 3:  # with the first sequence's third token, and the second's prompt
            raise out_of_memory()
        return score(*rows)

    monkeypatch.setattr(cpu_sampling, "compute_logprobs", failing)
    requests = [
        request([1, 2, 3], 8, replace(GREEDY, logprobs=1)),
        request([4, 5, 6], 8, prompt_logprobs=1),
    ]
    sequences = [rig.work.add(requests[0])]
    rig.work.step()
    rig.work.step()
    sequences.append(rig.work.add(requests[1]))
    rig.work.step()
    assert rig.model.num_memory_freed == 1
    assert sequences[0].num_preemptions == 0
    rig.finish()
    assert [outcome(sequence) for sequence in sequences] == [alone(one) for one in requests]


@pytest.mark.parametrize("place", [3, 6])
def test_a_request_that_does_not_even_fit_alone_is_the_only_one_to_fail(place: int) -> None:
    """Its row has the error; the others finish, in steps as large as before."""
    requests = [request([one, 2, 3], 8) for one in range(6)]
    rig = Rig(logits_of)

    def fails(sequences: list[Sequence]) -> Exception | None:
        for one in sequences:
            length = rig.table.num_tokens[rig.table.sequences.index(one)]
            if one.request is requests[2] and length >= place:
                return out_of_memory()
        return None

    rig.model.fails = fails
    answers = rig.run(*requests)
    failed = answers[2]
    assert isinstance(failed, InternalError)
    assert (failed.code, failed.status_code) == ("out_of_memory", 500)
    assert "out of memory" in failed.message
    assert [answers[i] for i in (0, 1, 3, 4, 5)] == [alone(requests[i]) for i in (0, 1, 3, 4, 5)]


def test_a_request_that_fits_only_alone_soon_runs_alone() -> None:
    """It does not break the others' steps repeatedly, and also finishes."""
    requests = [request([one, 2, 3], 8 + 5 * one) for one in range(8)]
    rig = Rig(logits_of)

    def fails(sequences: list[Sequence]) -> Exception | None:
        is_there = any(one.request is requests[6] for one in sequences)
        return out_of_memory() if is_there and len(sequences) > 1 else None

    rig.model.fails = fails
    assert rig.run(*requests) == [alone(one) for one in requests]
    assert rig.model.num_memory_freed == MAX_FAILURES_IN_COMPANY


def test_a_request_that_fits_only_alone_outlives_a_step_that_fails_once() -> None:
    """Running alone for lack of memory does not count against a request."""
    requests = [request([one, 2, 3], 8 + 5 * one) for one in range(8)]
    rig = Rig(logits_of)
    failures: list[Exception] = [RuntimeError("once")]

    def fails(sequences: list[Sequence]) -> Exception | None:
        if not any(one.request is requests[6] for one in sequences):
            return None
        if len(sequences) > 1:
            return out_of_memory()
        is_late = rig.model.num_memory_freed == MAX_FAILURES_IN_COMPANY
        return failures.pop() if is_late and failures else None

    rig.model.fails = fails
    assert rig.run(*requests) == [alone(one) for one in requests]
    assert not failures


def test_a_device_without_any_memory_ends_the_engine_and_fails_no_request() -> None:
    """Another program uses it: not even a canary fits, so no request is blamed."""
    rig = lacking(lambda _: False)
    sequences = [rig.work.add(request([one, 2, 3])) for one in range(4)]
    with pytest.raises(DeviceFailed, match="one token fails as well"):
        rig.finish()
    assert len(rig.model.plans[-1].slots) == rig.model.plans[-1].num_tokens == 1
    assert sum(sequence.error is not None for sequence in sequences) == 1  # which is never reported


def test_steps_grow_again_once_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow slowly: a temporary bottleneck does not slow down the rest of the job."""
    monkeypatch.setattr(step_budget, "GROW_AFTER_STEPS", 16)
    rig = lacking(lambda _: len(rig.model.plans) > 1, max_model_len=102, num_pages=900, budget=8)
    rig.run(*(request([one], 100) for one in range(8)))
    sizes = [plan.num_tokens for plan in rig.model.plans]
    assert rig.model.num_memory_freed == 1
    assert sizes[0] == 8
    sizes = sizes[sizes.index(4) :]
    assert max(sizes[:15]) == 4
    assert [size for size in sorted(set(sizes)) if size >= 4] == [4, 5, 6, 7, 8]


def test_memory_is_freed_after_the_step_is_released() -> None:
    """Memory held by an exception's frames could not be freed."""
    rig = Rig(logits_of)
    run = rig.model.run
    held: list[weakref.ref[torch.Tensor]] = []
    was_held: list[bool] = []

    def run_out(plan: StepPlan) -> object:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        if len(held) == 1:
            raise out_of_memory()
        return run(plan)

    rig.model.run = run_out  # type: ignore[method-assign, assignment]
    rig.model.free_memory = lambda: was_held.append(held[0]() is not None)  # type: ignore[method-assign]
    rig.run(request())
    assert was_held == [False]


@st.composite
def requests_with_common_beginnings(draw: st.DrawFn) -> list[SequenceRequest]:
    """Draw a few requests that share pages and request scores."""
    common = draw(st.lists(st.integers(0, 10), min_size=1, max_size=14))
    prompts = st.tuples(
        st.integers(0, len(common)), st.lists(st.integers(0, 10), min_size=1, max_size=9)
    ).map(lambda parts: common[: parts[0]] + parts[1])
    sampling = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 3),
        logprobs=st.sampled_from([None, 0, 2]),
    )
    one = st.builds(
        SequenceRequest,
        prompts,
        st.integers(0, 12),
        sampling,
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    return draw(st.lists(one, min_size=1, max_size=8))


@given(
    requests_with_common_beginnings(),
    st.lists(st.integers(1, 24), min_size=1, max_size=8),
    st.integers(0, 6),
    st.integers(1, 6),
    st.frozensets(st.integers(1, 30), max_size=1),
)
def test_with_varying_memory_each_request_has_the_result_that_it_has_alone(
    requests: list[SequenceRequest],
    capacities: list[int],
    extra_pages: int,
    max_num_seqs: int,
    failing_steps: frozenset[int],
) -> None:
    """It includes too few pages, and a step that fails for another reason."""
    most = max(len(one.prompt_ids) + one.max_tokens for one in requests)
    rig = Rig(
        logits_of,
        num_pages=-(-most // 4) + extra_pages,
        max_num_seqs=max_num_seqs,
        budget=max(20, max_num_seqs),
        fewest_copied=1,
    )
    capacity = cycle(capacities)

    def fails(_: list[Sequence]) -> Exception | None:
        if len(rig.model.plans) in failing_steps:
            return RuntimeError("bad day")
        return out_of_memory() if rig.model.plans[-1].num_tokens > next(capacity) else None

    rig.model.fails = fails
    sequences = [rig.work.add(one) for one in requests]
    rig.finish()
    for sequence in sequences:
        answer, expected = outcome(sequence), alone(sequence.request)
        assert isinstance(answer, SequenceResult), answer
        assert answer.token_ids == expected.token_ids
        for scores, expected_scores in (
            (answer.logprobs, expected.logprobs),
            (answer.prompt_logprobs, expected.prompt_logprobs),
        ):
            ids = [score and score.token_id for score in scores or []]
            assert ids == [score and score.token_id for score in expected_scores or []]
