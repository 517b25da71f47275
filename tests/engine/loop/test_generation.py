"""Sequences through generation: ends, rejections, sharing and counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from tests.engine.loop.generation_rig import (
    GREEDY,
    VOCABULARY,
    Rig,
    Watch,
    finished_in,
    greedy,
    logits_of,
    only,
    request,
)
from tidemill.engine.scheduling.repetition import Repetition
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest, SequenceResult
from tidemill.protocol.errors import InternalError, RequestError

pytestmark = pytest.mark.usefixtures("steps_ahead")


def test_a_sequence_ends_at_its_length() -> None:
    """It has the model's most likely tokens."""
    answer = only(Rig(logits_of), request())
    assert answer == SequenceResult(greedy([1, 2, 3], 8), "length")


def test_a_stop_token_ends_a_sequence_and_is_its_last() -> None:
    """The result names the token."""
    expected = greedy([1, 2, 3], 8)
    stop = expected[4]
    answer = only(Rig(logits_of), request(stop_token_ids=frozenset({stop, 99, -5})))
    cut = expected[: expected.index(stop) + 1]
    assert answer == SequenceResult(cut, "stop", stop_reason=stop)


def test_one_sequences_stop_tokens_stop_no_other() -> None:
    """It also holds if they run together."""
    expected = greedy([1, 2, 3], 8)
    stopped, free = Rig(logits_of).run(request(stop_token_ids=frozenset({expected[0]})), request())
    assert isinstance(stopped, SequenceResult)
    assert isinstance(free, SequenceResult)
    assert stopped.token_ids == expected[:1]
    assert free.token_ids == expected


def test_a_stop_text_ends_a_sequence() -> None:
    """It sees every token once, in order, and provides the stop reason."""
    watch = Watch(5)
    answer = only(Rig(logits_of), request(stop_text=watch))
    assert watch.seen == answer.token_ids == greedy([1, 2, 3], 5)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "END")


def test_a_search_with_too_many_states_fails_its_own_request() -> None:
    """The row is a 400 that names the parameter, and the others continue."""

    class Endless(Watch):
        def push(self, _: int) -> str | None:
            raise RequestError("too many states", param="stop_regex")

    fault, other = Rig(logits_of).run(request(stop_text=Endless(1)), request([5]))
    assert isinstance(fault, RequestError)
    assert fault.param == "stop_regex"
    assert isinstance(other, SequenceResult)


def test_a_sequence_that_repeats_itself_ends_there() -> None:
    """It ends with the last copy of the pattern, and has a separate stop reason."""
    looping = Rig(lambda tokens: np.eye(VOCABULARY)[4 + len(tokens) % 2])
    ends = Repetition(1, 3, 3)
    answer = only(looping, request(max_tokens=20, repetition=ends))
    assert len(answer.token_ids) == 6
    assert (answer.finish_reason, answer.stop_reason) == ("repetition", "repetition_detected")
    later = only(looping, request(max_tokens=20, repetition=ends, min_tokens=9))
    assert len(later.token_ids) == 9
    stopped = only(looping, request(max_tokens=20, repetition=ends, stop_text=Watch(6)))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "END")


def test_nothing_stops_a_sequence_before_its_minimum() -> None:
    """Stop tokens are masked, and an early match is ignored."""
    watch = Watch(2)
    answer = only(Rig(logits_of), request(stop_text=watch, min_tokens=5))
    assert (len(answer.token_ids), answer.stop_reason) == (5, "END")
    first = greedy([1, 2, 3], 1)[0]
    answer = only(Rig(logits_of), request(stop_token_ids=frozenset({first}), min_tokens=3))
    assert first not in answer.token_ids[:3]


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    """Both limits are reached; the model's own end takes precedence."""
    expected = greedy([1, 2, 3], 3)
    stops = frozenset({expected[2]}) - set(expected[:2])
    assert stops
    answer = only(Rig(logits_of), request(max_tokens=3, stop_token_ids=stops))
    assert answer.finish_reason == "stop"


def test_a_stop_text_that_raises_costs_its_own_request() -> None:
    """The others continue."""

    class Broken:
        """A `StopText` that cannot read the second token."""

        count = 0

        def watch(self) -> Broken:
            """Watch its only sequence."""
            return self

        def push(self, token_id: int) -> str | None:
            """Fail at the second call."""
            self.count += 1
            if self.count == 2:
                raise KeyError(token_id)
            return None

    rig = Rig(logits_of)
    failed, fine = rig.run(request(stop_text=Broken()), request())
    assert isinstance(failed, InternalError)
    assert isinstance(fine, SequenceResult)
    assert fine.token_ids == greedy([1, 2, 3], 8)


def test_scoring_a_prompt_generates_nothing() -> None:
    """`max_tokens` 0: neither stop tokens nor stop texts matter."""
    watch = Watch(1)
    everything = frozenset(range(VOCABULARY))
    scoring = request(
        [1, 2, 3, 4, 5],
        0,
        replace(GREEDY, logprobs=2),
        stop_token_ids=everything,
        stop_text=watch,
        prompt_logprobs=0,
    )
    answer = only(Rig(logits_of), scoring)
    assert (answer.token_ids, list(answer.logprobs or ()), watch.seen) == ([], [], [])
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == 5


def test_a_prompt_that_fills_the_context_ends_at_its_length() -> None:
    """The token without room stops nothing."""
    watch = Watch(1)
    everything = frozenset(range(VOCABULARY))
    rig = Rig(logits_of, max_model_len=8)
    answer = only(rig, request([1] * 8, 4, stop_token_ids=everything, stop_text=watch))
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([], "length", None)
    assert watch.seen == []


def test_the_context_is_filled_to_its_last_token() -> None:
    """A higher `max_tokens` is limited."""
    rig = Rig(logits_of, max_model_len=8)
    assert only(rig, request(max_tokens=100)).token_ids == greedy([1, 2, 3], 5)


def test_choices_of_one_prompt_share_it_and_differ_by_seed() -> None:
    """Each choice equals its result alone."""
    requests = [
        request(list(range(10)), 12, Sampling(temperature=2.0, seed=seed)) for seed in range(5)
    ]
    rig = Rig(logits_of)
    together = rig.run(*requests)
    ids = [answer.token_ids for answer in together if isinstance(answer, SequenceResult)]
    assert [only(Rig(logits_of), one).token_ids for one in requests] == ids
    assert len(set(map(tuple, ids))) == 5
    assert rig.work.stats().cached_tokens == 4 * 8


def test_a_sampled_row_is_the_same_after_preemption() -> None:
    """Randomness is keyed by position, regardless of repeated steps."""
    requests = [
        request([seed, 2, 3], 28, Sampling(temperature=1.5, seed=seed, frequency_penalty=0.5))
        for seed in range(5)
    ]
    tight = Rig(logits_of, num_pages=9, max_num_seqs=5, budget=6)
    answers = tight.run(*requests)
    assert tight.work.stats().preemptions > 0
    assert answers == Rig(logits_of, num_pages=200).run(*requests)


def test_no_sequence_is_preempted_just_before_another_ends() -> None:
    """The step in flight may free the needed page, so the scheduler waits for it."""
    rig = Rig(logits_of, num_pages=3)
    ends, goes_on = rig.run(request([1, 2, 3, 4], 2), request([5, 6, 7], 8))
    assert isinstance(ends, SequenceResult)
    assert isinstance(goes_on, SequenceResult)
    assert ends.token_ids == greedy([1, 2, 3, 4], 2)
    assert goes_on.token_ids == greedy([5, 6, 7], 8)
    assert rig.work.stats().preemptions == 0


@pytest.mark.parametrize("prompt", [[], [1] * 65])
def test_a_prompt_without_tokens_or_beyond_the_context_is_refused(prompt: list[int]) -> None:
    """The error is the request's own."""
    with pytest.raises(RequestError) as refused:
        Rig(logits_of).work.add(SequenceRequest(prompt, 1))
    assert refused.value.status_code == 400


def test_a_request_that_can_never_fit_is_refused() -> None:
    """The message has the available room and advice; a request that just fits runs."""
    rig = Rig(logits_of, num_pages=4)
    with pytest.raises(RequestError, match="--kv-cache-memory") as refused:
        rig.work.add(request(max_tokens=14))
    assert (refused.value.code, refused.value.param) == ("kv_cache_exceeded", "max_tokens")
    assert only(rig, request(max_tokens=13)).token_ids == greedy([1, 2, 3], 13)


def test_dropped_sequences_leave_no_trace_and_the_rest_continues() -> None:
    """They wait, are in the middle of a prompt, or generate."""
    rig = Rig(logits_of, max_num_seqs=3, budget=6)
    prompts = [[1, 2], [3] * 20, [4] * 20, [5, 6], [7, 8]]
    sequences = [rig.work.add(request(prompt, 10)) for prompt in prompts]
    for _ in range(3):
        rig.work.step()
    assert rig.work.stats().waiting
    rig.work.abort({sequences[0], sequences[1], sequences[4]})
    finished = finished_in(rig.finish())
    assert set(finished) == {sequences[2], sequences[3]}
    assert sequences[2].result().token_ids == greedy([4] * 20, 10)
    assert sequences[3].result().token_ids == greedy([5, 6], 10)


def test_only_streamed_requests_have_an_event_per_token() -> None:
    """The others have one, at their end, with all their tokens; preemption repeats nothing."""
    rig = Rig(logits_of, num_pages=9, max_num_seqs=4, budget=6)
    requests = [request([one, 2, 3], 20, is_streamed=one % 2 == 0) for one in range(4)]
    sequences = [rig.work.add(one) for one in requests]
    emitted: list[list[list[int]]] = [[] for _ in requests]
    while (events := rig.work.step()) is not None:
        for event in events:
            place = sequences.index(event.request)
            emitted[place].append(event.new_token_ids)
            assert event.is_finished is (sum(map(len, emitted[place])) == 20)
    assert rig.work.stats().preemptions > 0
    for one, ids, sequence in zip(requests, emitted, sequences, strict=True):
        assert [*chain(*ids)] == sequence.result().token_ids == greedy(one.prompt_ids, 20)
        assert len(ids) == (20 if one.is_streamed else 1)


def test_dropping_finished_or_unknown_sequences_has_no_effect() -> None:
    """A cancelled call may have ended already."""
    rig = Rig(logits_of)
    sequence = rig.work.add(request())
    rig.finish()
    rig.work.abort({sequence})
    rig.work.abort(set())
    assert sequence.result().token_ids == greedy([1, 2, 3], 8)


def test_stats_count_finished_and_running_work(steps_ahead: int) -> None:
    """They count prompts and hits of finished sequences, outputs, and running sequences."""
    rig = Rig(logits_of, num_pages=10, max_num_seqs=1)
    rig.work.add(request(list(range(9)), 4))
    rig.work.add(request(list(range(9)), 4, min_tokens=1))
    for _ in range(1 + steps_ahead):
        assert rig.work.stats().output_tokens == 0
        rig.work.step()
    now = rig.work.stats()
    assert (now.running, now.waiting, now.kv_cache_usage) == (1, 1, 0.3)
    assert (now.steps, now.output_tokens) == (1 + steps_ahead, 1)
    rig.finish()
    done = rig.work.stats()
    assert (done.running, done.waiting, done.kv_cache_usage) == (0, 0, 0)
    assert (done.prompt_tokens, done.cached_tokens, done.output_tokens) == (18, 8, 8)
    assert done.steps == 8
