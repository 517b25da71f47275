"""Log-probabilities of outputs and prompts: the model's own, each exactly once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.loop.generation_rig import (
    GREEDY,
    VOCABULARY,
    Rig,
    check_scores,
    greedy,
    logits_of,
    logprobs_of,
    only,
    request,
)
from tidemill.engine.scheduling.sequence import Sampling, SequenceResult
from tidemill.engine.scheduling.state_cache import LogprobCache
from tidemill.engine.scheduling.step_budget import MAX_SCORED_ROWS
from tidemill.engine.scheduling.token_logprobs import TokenLogprob, pack_logprobs, record_bytes

pytestmark = pytest.mark.usefixtures("steps_ahead")


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=0, logit_bias={4: 100.0}),
        Sampling(temperature=3.0, seed=1, top_k=5, presence_penalty=1.5),
    ],
)
@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_are_those_of_the_models_own_logits(sampling: Sampling, top: int) -> None:
    """They are computed before penalties, bias and temperature, for any sampled token."""
    answer = only(Rig(logits_of), request(sampling=replace(sampling, logprobs=top)))
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 8
    check_scores(answer.logprobs, [1, 2, 3, *answer.token_ids], top)


def test_named_tokens_are_scored_instead_of_the_most_likely() -> None:
    """They are in order of score; other rows of the step get their requested scores."""
    named = replace(GREEDY, logprobs=0, logprob_token_ids=(7, 0, 4))
    answers = Rig(logits_of).run(
        request(sampling=replace(GREEDY, logprobs=2)),
        request([4, 5], sampling=named),
        request([6], sampling=replace(GREEDY, logprobs=1), prompt_logprobs=1),
    )
    for answer, prompt, top in zip(answers, ([1, 2, 3], [4, 5], [6]), (2, None, 1), strict=True):
        assert isinstance(answer, SequenceResult)
        assert answer.logprobs is not None
        tokens = [*prompt, *answer.token_ids]
        if top is not None:
            check_scores(answer.logprobs, tokens, top)
            continue
        for place, score in enumerate(answer.logprobs, start=len(prompt)):
            expected = logprobs_of(tuple(tokens[:place]))
            assert score.logprob == pytest.approx(expected[tokens[place]], abs=1e-5)
            best = sorted((7, 0, 4), key=lambda token: -expected[token])
            assert [token for token, _ in score.top] == best
            assert [value for _, value in score.top] == pytest.approx(expected[best], abs=1e-5)


def test_logprobs_end_with_the_sequence_and_only_requested_ones_are_returned() -> None:
    """Neighbors with other parameters change nothing."""
    expected = greedy([1, 2, 3], 8)
    answers = Rig(logits_of).run(
        request(sampling=replace(GREEDY, logprobs=1), stop_token_ids=frozenset({expected[2]})),
        request(),
        request(sampling=replace(GREEDY, logprobs=0)),
    )
    stopped, none, all_of_them = answers
    assert isinstance(stopped, SequenceResult)
    assert isinstance(none, SequenceResult)
    assert isinstance(all_of_them, SequenceResult)
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == len(stopped.token_ids)
    assert none.logprobs is none.prompt_logprobs is None
    assert all_of_them.logprobs is not None
    assert all(score.top == () for score in all_of_them.logprobs)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 31, 32, 33, 60])
@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_cover_the_prompt_across_chunks(length: int, top: int) -> None:
    """The first token has none; chunks of 7 leave every remainder."""
    prompt = np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()
    rig = Rig(logits_of, max_num_seqs=2, budget=7)
    before = rig.run(request(prompt, 1))  # its pages are cached, their scores are not
    answer = only(rig, request(prompt, 2, prompt_logprobs=top))
    assert isinstance(before[0], SequenceResult)
    assert answer.num_cached_tokens == 0
    scores = answer.prompt_logprobs
    assert scores is not None
    assert len(scores) == length
    assert scores[0] is None
    check_scores(scores[1:], prompt, top)
    assert answer.token_ids == greedy(prompt, 2)


def test_a_prompt_that_was_scored_is_scored_from_the_cache() -> None:
    """Only its last page is computed, which scores the next token; fewer alternatives work too."""
    prompt = np.random.default_rng(4).integers(0, VOCABULARY, 30).tolist()
    rig = Rig(logits_of, max_num_seqs=1, budget=9)
    requests = [
        request(prompt, 1, prompt_logprobs=2),
        request([*prompt[:21], 7, 3, 5], 1, prompt_logprobs=1),
        request(prompt, 1, prompt_logprobs=3),
        request(prompt, 1, prompt_logprobs=0),
        request(prompt, 1, prompt_logprobs=3, cache_salt="another"),
    ]
    answers = rig.run(*requests)
    cached = []
    for one, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, SequenceResult)
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == len(one.prompt_ids)
        check_scores(answer.prompt_logprobs[1:], one.prompt_ids, one.prompt_logprobs or 0)
        cached.append(answer.num_cached_tokens)
    assert cached == [0, 16, 0, 24, 0]


def test_a_prompt_is_scored_from_a_given_token() -> None:
    """Pages before it come from the cache, and their logits are not computed."""
    prompt = np.random.default_rng(5).integers(0, VOCABULARY, 30).tolist()
    rig = Rig(logits_of, max_num_seqs=1, budget=9)
    starts = [0, 1, 2, 17, 29, 30, 99]
    rig.run(request(prompt, 1))
    answers = rig.run(
        *(request(prompt, 1, prompt_logprobs=1, logprob_start=start) for start in starts[::-1])
    )
    for start, answer in zip(starts[::-1], answers, strict=True):
        assert isinstance(answer, SequenceResult)
        scores = answer.prompt_logprobs
        assert scores is not None
        assert len(scores) == 30
        first = min(max(start, 1), 30)
        assert scores[:first] == [None] * first
        check_scores(scores[first:], prompt, 1)
    num_rows = sum(int(plan.num_logits.sum()) for plan in rig.model.plans)
    assert num_rows < 30 + 5 * 16


def test_the_score_cache_is_limited_and_stores_no_nan() -> None:
    """The most recently used are retained; more alternatives replace fewer."""
    cache = LogprobCache(max_bytes=3 * 4 * record_bytes(1))
    page = bytes(4 * record_bytes(1))
    for name in (b"a", b"b", b"c"):
        cache.put(name, 1, page)
    assert cache.get(b"a", 0) == bytes(4 * record_bytes(0))
    cache.put(b"d", 1, page)
    assert [cache.covers(name, 1) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    cache.put(b"a", 2, bytes(4 * record_bytes(2)))
    assert [cache.covers(name, 2) for name in (b"a", b"c", b"d")] == [True, False, False]
    broken = pack_logprobs(np.arange(4), np.full(4, np.nan), *np.zeros((2, 4, 1)))
    cache.put(b"e", 1, broken.tobytes())
    assert not cache.covers(b"e", 0)


def test_prompt_logprobs_of_a_long_prompt_come_in_small_chunks() -> None:
    """The budget does not matter."""
    length = 2 * MAX_SCORED_ROWS + 3
    rig = Rig(logits_of, num_pages=300, max_model_len=2 * length, budget=4 * length)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, length).tolist()
    answer = only(rig, request(prompt, 1, prompt_logprobs=0))
    assert answer.prompt_logprobs is not None
    check_scores(answer.prompt_logprobs[1:], prompt, 0)


def test_prompt_logprobs_survive_preemption() -> None:
    """Recomputed tokens are not scored again."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, 17).tolist() for _ in range(4)]
    rig = Rig(logits_of, num_pages=13, max_num_seqs=4, budget=9)
    sampling = replace(GREEDY, logprobs=2)
    answers = rig.run(*(request(one, 30, sampling, prompt_logprobs=1) for one in prompts))
    assert rig.work.stats().preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert isinstance(answer, SequenceResult)
        assert answer.token_ids == greedy(prompt, 30)
        assert answer.prompt_logprobs is not None
        check_scores(answer.prompt_logprobs[1:], prompt, 1)
        assert answer.logprobs is not None
        assert len(answer.logprobs) == 30
        check_scores(answer.logprobs, prompt + answer.token_ids, 2)


@pytest.mark.parametrize("budget", [2, 3, 4, 5])
def test_prompt_logprobs_survive_a_preemption_within_the_prompt(budget: int) -> None:
    """A half-scored prompt continues at its position, in chunks that may begin before it."""
    old = [3] * 8
    young = np.random.default_rng(2).integers(0, VOCABULARY, 30).tolist()
    rig = Rig(logits_of, num_pages=12, max_num_seqs=2, budget=budget)
    first = rig.work.add(request(old, 24))
    while len(rig.model.plans) < 4:
        rig.work.step()
    second = rig.work.add(request(young, 3, prompt_logprobs=0))
    while not second.num_preemptions:
        rig.work.step()
    assert 1 < len(second.prompt_logprobs) < 30
    rig.finish()
    assert first.result().token_ids == greedy(old, 24)
    scores = second.result().prompt_logprobs
    assert scores is not None
    assert len(scores) == 30
    check_scores(scores[1:], young, 0)


def test_very_small_probabilities_are_preserved() -> None:
    """A token that the model nearly excludes has a logprob far below zero, and may be -inf."""
    rig = Rig(lambda _: [0.0, 1e4, -math.inf])
    sampling = Sampling(temperature=0, logit_bias={1: -1e5}, logprobs=3)
    answer = only(rig, request([0, 1, 2], 1, sampling, prompt_logprobs=1))
    assert list(answer.logprobs or ()) == [
        TokenLogprob(0, -1e4, ((1, 0.0), (0, -1e4), (2, -math.inf)))
    ]
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[2] == TokenLogprob(2, -math.inf, ((1, 0.0),), rank=3)
