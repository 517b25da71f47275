"""Steps plan every token once, within the budget, on pages with the right contents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.engine.paged_model import chunks_of, spans_of
from tests.engine.scheduling.yard import (
    END,
    PAGE,
    LongestFirst,
    Yard,
    expected_tokens,
    long,
    waiting,
)
from tidemill.engine.scheduling import state_cache
from tidemill.engine.scheduling.admission import ArrivalOrder, PrefixOrder, UrgentFirst
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.engine.scheduling.step_budget import MAX_SCORED_ROWS, LineTokenLimit
from tidemill.engine.state.pages import PagePool, page_digests


@dataclass(frozen=True)
class Case:
    """A yard's sizes and the requests that come to it, each with the step before which it comes."""

    max_num_seqs: int
    budget: int
    max_model_len: int
    extra_pages: int
    policy: type[ArrivalOrder | PrefixOrder | LongestFirst]
    steps_ahead: int
    tokens_of_lines: int
    fewest_copied: int
    requests: list[tuple[int, SequenceRequest]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw few pages for many sequences, half of them with common beginnings."""
    max_model_len = draw(st.sampled_from([8, 24, 41]))
    common = draw(st.lists(st.integers(0, 2), min_size=1, max_size=max_model_len))
    prompts = st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=max_model_len),
        st.integers(1, len(common)).map(lambda length: common[:length]),
        st.tuples(st.integers(1, len(common)), st.lists(st.integers(0, 2), max_size=6)).map(
            lambda parts: [*common[: parts[0]], *parts[1]][:max_model_len]
        ),
    )
    request = st.builds(
        SequenceRequest,
        prompts,
        st.integers(0, 14),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        cache_salt=st.sampled_from(["", "", "one", "two"]),
        adapter=st.sampled_from([0, 0, 1, 2]),
        priority=st.sampled_from([0, 0, 1]),
    )
    requests = draw(st.lists(st.tuples(st.integers(0, 12), request), min_size=1, max_size=12))
    max_num_seqs = draw(st.integers(1, 6))
    return Case(
        max_num_seqs,
        draw(st.integers(max_num_seqs, 40)),
        max_model_len,
        draw(st.integers(0, 8)),
        draw(st.sampled_from([ArrivalOrder, PrefixOrder, LongestFirst])),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 9)),
        draw(st.integers(0, 2)),
        sorted(requests, key=lambda item: item[0]),
    )


@given(cases())
def test_every_sequence_generates_what_it_would_alone(case: Case) -> None:
    """It holds for any budget, pages, order and neighbors, and every page is released."""
    most = max(
        min(len(request.prompt_ids) + request.max_tokens, case.max_model_len)
        for _, request in case.requests
    )
    num_pages = -(-most // PAGE) + case.extra_pages
    yard = Yard(
        num_pages,
        case.max_num_seqs,
        case.max_model_len,
        case.budget,
        END,
        UrgentFirst(case.policy()),
        case.steps_ahead,
        line_limit=LineTokenLimit(tokens=case.tokens_of_lines),
        fewest_copied=case.fewest_copied,
    )
    assert yard.scheduler.can_ever_fit(most)
    for before, request in case.requests:
        while yard.num_steps < before and yard.is_busy:
            yard.step()
        yard.add_request(request)
    yard.run_all()
    assert len(yard.finished) == len(case.requests)
    for sequence in yard.finished:
        expected = expected_tokens(sequence.request, case.max_model_len, END)
        assert sequence.generated == expected
        assert 0 <= sequence.num_cached_tokens < len(sequence.request.prompt_ids)
    yard.check_empty()


def test_an_idle_scheduler_plans_no_step() -> None:
    """An idle engine waits for requests."""
    assert Yard().scheduler.plan() is None


def test_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    """Only its last chunk gets a token."""
    yard = Yard(budget=10)
    yard.add(long(27))
    plans = [yard.step() for _ in range(3)]
    spans = [span for plan in plans for span in chunks_of(plan)]
    assert spans == [(0, 10), (10, 20), (20, 27)]
    assert [len(plan.sampled) for plan in plans] == [0, 0, 1]


def test_running_sequences_have_priority_over_prompts() -> None:
    """Prompts use the rest of the budget, so they never stall running sequences."""
    yard = Yard(budget=6, max_num_seqs=3)
    first = yard.add([0, 0, 0], 20)
    yard.step()
    yard.add(long(30), 1)
    plan = yard.step()
    assert plan.slots[: plan.num_decodes].tolist() == [yard.slot_of(first)]
    assert chunks_of(plan) == [(0, 5)]


def test_prompts_are_chunked_oldest_first() -> None:
    """A newer prompt uses the budget that an older one leaves."""
    yard = Yard(budget=10)
    sequences = [yard.add(long(14, seed)) for seed in range(2)]
    yard.step()
    plan = yard.plan()
    slots = [yard.slot_of(sequence) for sequence in sequences]
    assert spans_of(plan) == [(slots[0], 10, 14), (slots[1], 0, 6)]


def test_the_last_token_of_a_chunked_prompt_is_a_decode() -> None:
    """A sequence with one token to compute is a decode, whether prompt or output."""
    yard = Yard(budget=10)
    sequence = yard.add(long(11), 1)
    yard.step()
    plan = yard.step()
    assert (plan.num_decodes, chunks_of(plan)) == (1, [])
    assert sequence.generated == expected_tokens(sequence.request)


def test_no_more_sequences_run_than_there_are_slots() -> None:
    """The other sequences wait in order."""
    yard = Yard(max_num_seqs=2)
    sequences = [yard.add([0, 0, number], 30) for number in range(3)]
    yard.step()
    assert waiting(yard.scheduler) == sequences[2:]


def test_a_fully_cached_prompt_of_whole_pages_computes_its_last_page() -> None:
    """Its last token must be computed for its logits, and a shared page is never written."""
    yard = Yard()
    prompt = long(3 * PAGE)
    yard.add(prompt)
    yard.run_all()
    again = yard.add(prompt)
    plan = yard.step()
    assert chunks_of(plan) == [(2 * PAGE, 3 * PAGE)]
    assert again.num_cached_tokens == 2 * PAGE


def test_a_prompt_cached_up_to_its_last_token_is_a_decode() -> None:
    """The whole pages come from the cache; one token is left."""
    yard = Yard()
    prompt = long(3 * PAGE + 1)
    yard.add(prompt)
    yard.run_all()
    again = yard.add(prompt)
    plan = yard.step()
    assert (plan.num_decodes, chunks_of(plan)) == (1, [])
    assert again.num_cached_tokens == 3 * PAGE


def test_sequences_admitted_in_one_step_share_the_pages_that_it_fills() -> None:
    """The choices of one request compute their common prompt once."""
    yard = Yard(budget=32)
    prompt = long(2 * PAGE + 2)
    sequences = [yard.add(prompt, 2) for _ in range(3)]
    plan = yard.plan()
    assert plan.starts.tolist() == [0, 2 * PAGE, 2 * PAGE]
    pages = [yard.table.pages[yard.slot_of(one), :3].tolist() for one in sequences]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]
    assert len({row[2] for row in pages}) == 3
    yard.run(plan)
    yard.run_all()
    yard.check_empty()


def test_sequences_that_diverge_within_a_page_copy_its_beginning() -> None:
    """They do so in the step that computes it, and later, also when its sequence has ended."""
    yard = Yard(budget=64, fewest_copied=2)
    common = long(2 * PAGE + 2)
    first = [yard.add([*common, token, *long(PAGE, token)]) for token in range(2)]
    plan = yard.step()
    assert plan is not None
    assert plan.starts.tolist() == [0, len(common)]
    later = yard.add([*common, 2, *long(PAGE, 2)])
    plan = yard.step()
    assert plan is not None
    assert plan.starts.tolist() == [len(common)]
    yard.run_all()
    assert [one.num_cached_tokens for one in (*first, later)] == [0, len(common), len(common)]
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)
    yard.check_empty()


def test_an_equal_prompt_of_whole_pages_computes_its_last_token() -> None:
    """The rest of its last page is copied."""
    yard = Yard(fewest_copied=1)
    sequences = [yard.add(long(3 * PAGE)) for _ in range(2)]
    yard.run_all()
    assert [one.num_cached_tokens for one in sequences] == [0, 3 * PAGE - 1]


@pytest.mark.parametrize(
    "change", [{"cache_salt": "a"}, {"adapter": 1}, {"prompt_logprobs": 0}], ids=str
)
def test_the_beginning_of_a_page_is_not_copied_if_it_differs(change: dict[str, Any]) -> None:
    """Another adapter has other keys, a salt separates tenants, and scores must be computed."""
    yard = Yard(budget=64, fewest_copied=1)
    common = long(PAGE - 1)
    yard.add([*common, 0, 1])
    other = yard.add([*common, 1, 1], **change)
    yard.run_all()
    assert other.num_cached_tokens == 0


def test_fewer_tokens_than_are_worth_a_copy_are_computed() -> None:
    """Two of three tokens in a page are equal."""
    yard = Yard(budget=64, fewest_copied=3)
    sequences = [yard.add([0, 1, token, 0]) for token in range(2)]
    yard.run_all()
    assert [one.num_cached_tokens for one in sequences] == [0, 0]


def test_a_copy_never_takes_the_last_page() -> None:
    """A page that is only copied from has room for the sequence itself, which has priority."""
    yard = Yard(num_pages=3, max_num_seqs=1, max_model_len=12, fewest_copied=1)
    common = long(2 * PAGE + 2)
    yard.add([*common, 0])
    yard.run_all()
    yard.add([*common[: PAGE + 1], 2, *long(2 * PAGE - 2, 1)], 1)
    yard.run_all()
    assert len(yard.finished) == 2
    yard.check_empty()


def test_generated_tokens_are_shared() -> None:
    """The next turn of a conversation begins with the previous answer."""
    yard = Yard()
    prompt = long(2 * PAGE - 1)
    first = yard.add(prompt, 2 * PAGE)
    yard.run_all()
    second = yard.add([*prompt, *first.generated, 0], 1)
    yard.run_all()
    # All but the last token, which was never computed, and the page that it would have filled.
    assert second.num_cached_tokens == 3 * PAGE


def test_pages_are_shared_only_after_the_same_prefix() -> None:
    """Equal tokens at equal positions do not match if the tokens before them differ."""
    yard = Yard()
    tail = long(3 * PAGE)
    yard.add([0] * PAGE + tail)
    yard.run_all()
    other = yard.add([1] * PAGE + tail)
    yard.run_all()
    assert other.num_cached_tokens == 0


def test_pages_are_shared_only_with_the_same_salt() -> None:
    """Requests with another salt or without one share nothing with these."""
    prompt = long(3 * PAGE)
    tokens = np.array(prompt[:PAGE], np.int32).tobytes().decode("latin-1")
    yard = Yard()
    for salt in ["", "a", "b", tokens]:
        first = yard.add(prompt, cache_salt=salt)
        second = yard.add(prompt, cache_salt=salt)
        yard.run_all()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 2 * PAGE)


def test_pages_are_shared_only_within_one_adapter() -> None:
    """Each adapter has its own keys and values; salts divide its pages further."""
    prompt = long(3 * PAGE)
    yard = Yard()
    for adapter, salt in [(0, ""), (1, ""), (2, ""), (1, "a"), (2, "a")]:
        first = yard.add(prompt, adapter=adapter, cache_salt=salt)
        second = yard.add(prompt, adapter=adapter, cache_salt=salt)
        yard.run_all()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 2 * PAGE)


def test_spans_of_one_adapter_are_neighbours_in_a_step() -> None:
    """Decodes and longer spans are each grouped by adapter, the oldest first in each group."""
    yard = Yard(max_num_seqs=8)
    for adapter in (1, 0, 2, 1):
        yard.add(long(3), 2, adapter=adapter)
    yard.step()
    for adapter in (2, 0, 1, 2):
        yard.add(long(3), adapter=adapter)
    plan = yard.plan()
    adapters = yard.scheduler.table.adapter[plan.slots].tolist()
    assert plan.num_decodes == 4
    assert adapters == [0, 1, 1, 2, 0, 1, 2, 2]
    start_order = yard.scheduler.table.start_order[plan.slots].tolist()
    assert start_order == [1, 0, 3, 2, 5, 6, 4, 7]


def test_a_scored_prompt_is_computed_whole_in_small_chunks() -> None:
    """Logits are needed at every token, a few at a time; other requests may still use its pages."""
    length = MAX_SCORED_ROWS + 9
    yard = Yard(num_pages=300, max_model_len=2 * length, budget=2 * length)
    prompt = long(length)
    yard.add(prompt)
    yard.run_all()
    scored = yard.add(prompt, prompt_logprobs=0)
    plan = yard.step()
    assert chunks_of(plan) == [(0, MAX_SCORED_ROWS)]
    yard.run_all()
    assert scored.num_cached_tokens == 0


def test_scored_prompts_of_one_step_share_its_rows() -> None:
    """Eight prompts give the head no more rows than one does, and each is computed in full."""
    yard = Yard(num_pages=400, max_num_seqs=8, max_model_len=100, budget=2048)
    for seed in range(8):
        yard.add(long(60, seed), prompt_logprobs=0)
    num_rows = 0
    while yard.is_busy:
        rows = int(yard.step().num_logits.sum())
        assert rows <= MAX_SCORED_ROWS
        num_rows += rows
    assert 8 * 59 <= num_rows <= 8 * 60


def test_the_newest_gives_its_pages_to_the_oldest_and_recovers() -> None:
    """It retains its generated tokens and reuses its pages that are still cached."""
    yard = Yard(num_pages=7, max_num_seqs=2)
    old, young = yard.add(long(PAGE, 0), 20), yard.add(long(PAGE, 1), 20)
    while not young.num_preemptions:
        yard.step()
    assert young in waiting(yard.scheduler)
    generated = list(young.generated)
    assert generated == expected_tokens(young.request)[: len(generated)]
    assert generated
    yard.run_all()
    assert old.num_preemptions == 0
    assert yard.finished[0] is old
    assert young.generated == expected_tokens(young.request)
    assert yard.scheduler.num_preemptions == young.num_preemptions
    yard.check_empty()


def test_preempted_sequences_wait_before_newer_ones_in_order() -> None:
    """Preemption does not cost a sequence its place."""
    yard = Yard(max_num_seqs=3)
    running = [yard.add(long(6, seed), 30) for seed in range(3)]
    newer = yard.add(long(6, 9), 30)
    yard.plan()
    for sequence in reversed(running):
        yard.scheduler.preempt(yard.slot_of(sequence))
    assert waiting(yard.scheduler) == [*running, newer]


def test_the_policy_decides_which_sequence_starts_next() -> None:
    """The longest request starts first and the last started is preempted, whatever the arrival."""
    yard = Yard(num_pages=6, max_num_seqs=2, admission=LongestFirst())
    second, third, first = (yard.add(long(PAGE, most), most) for most in (16, 2, 18))
    yard.step()
    assert None not in yard.table.sequences
    while not yard.scheduler.num_preemptions:
        yard.step()
    assert [one.num_preemptions for one in (first, second, third)] == [0, 1, 0]
    yard.run_all()
    assert yard.finished[0] is first
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)


@pytest.mark.parametrize("keeps_ids", [False, True])
def test_penalties_wait_for_ids_where_only_the_host_can_look_at_them(*, keeps_ids: bool) -> None:
    """A constraint does not wait: its step chooses tokens once they are available."""
    yard = Yard(steps_ahead=1, keeps_ids=keeps_ids)
    yard.add([1, 2, 3], 5, sampling=Sampling(presence_penalty=1))
    yard.run(yard.plan())
    assert (yard.scheduler.plan() is None) == (not keeps_ids)
    yard = Yard(steps_ahead=1, keeps_ids=keeps_ids)
    constrained = yard.add([1, 2, 3], 5)
    yard.run(yard.plan())
    yard.table.is_constrained[yard.slot_of(constrained)] = True
    assert yard.scheduler.plan() is not None


def test_pages_of_a_waiting_sequence_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are not computed again in each step, nor when the sequence starts."""
    named = []

    def name(
        parent: bytes, tokens: NDArray[np.int32], page_size: int, shown: list[bytes]
    ) -> list[bytes]:
        named.extend(tokens.reshape(-1, page_size).tolist())
        return page_digests(parent, tokens, page_size, shown)

    monkeypatch.setattr(state_cache, "page_digests", name)
    yard = Yard(num_pages=6, max_num_seqs=2)
    yard.add(long(PAGE), 16)
    yard.step()
    blocked = long(5 * PAGE, 1)
    yard.add(blocked, 1)
    yard.run_all()
    pages = [blocked[start : start + PAGE] for start in range(0, len(blocked), PAGE)]
    assert [tokens for tokens in named if tokens in pages] == pages


def test_a_waiting_sequence_is_looked_up_only_when_that_may_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt costs nothing in steps in which others only take pages."""
    yard = Yard(num_pages=8, max_num_seqs=2)
    lengths = []

    def lookup(digests: list[bytes]) -> list[int]:
        lengths.append(len(digests))
        return PagePool.lookup(yard.pool, digests)

    yard.add(long(PAGE), 16)
    yard.step()
    blocked = yard.add(long(6 * PAGE, 1), 1)
    monkeypatch.setattr(yard.pool, "lookup", lookup)
    for _ in range(10):
        yard.step()
    assert [length for length in lengths if length > 1] == [5]
    yard.run_all()
    assert blocked.generated == expected_tokens(blocked.request)


def test_a_waiting_sequence_starts_once_enough_of_it_is_cached() -> None:
    """It starts even if no page has become free."""
    yard = Yard(num_pages=6, max_num_seqs=2)
    running = yard.add(long(2 * PAGE), 3)
    yard.step()
    blocked = yard.add(long(3 * PAGE, 1))
    yard.step()
    yard.scheduler.plan()
    assert waiting(yard.scheduler) == [blocked]
    page = int(yard.table.pages[yard.slot_of(running), 2])
    yard.pool.register([page], blocked.digests[:1])
    yard.scheduler.plan()
    assert waiting(yard.scheduler) == []


def test_a_page_completed_by_a_decode_is_cached() -> None:
    """The last token of a prompt may be computed among the decodes."""
    yard = Yard(budget=2 * PAGE - 1)
    prompt = long(2 * PAGE)
    yard.add(prompt, 1)
    yard.run_all()
    longer = yard.add([*prompt, 0])
    yard.run_all()
    assert longer.num_cached_tokens == 2 * PAGE


def test_a_suspect_of_a_failed_step_runs_alone() -> None:
    """It waits for the running sequences, and no other sequence joins it."""
    yard = Yard()
    running = yard.add([0, 0], 5)
    yard.step()
    suspect, other = yard.add([0, 1], 3), yard.add([1, 1], 3)
    suspect.is_suspect = True
    together = []
    while yard.is_busy:
        plan = yard.plan()
        together.append({yard.table.sequence(slot) for slot in plan.slots.tolist()})
        yard.run(plan)
    assert {running, suspect, other} == set().union(*together)
    assert all(group == {suspect} for group in together if suspect in group)


@pytest.mark.parametrize("length", [PAGE, 16, 17])
def test_a_prompt_as_long_as_the_context_gets_no_token(length: int) -> None:
    """The context has no room for an output token, but the prompt can still be scored."""
    yard = Yard(max_model_len=length, num_pages=-(-length // PAGE))
    sequence = yard.add(long(length), 5)
    yard.run_all()
    assert sequence.generated == []
    yard.check_empty()


def test_a_request_that_fits_the_pool_alone_is_accepted() -> None:
    """It holds up to the last slot of the last page."""
    scheduler = Yard(num_pages=3).scheduler
    assert scheduler.can_ever_fit(3 * PAGE)
    assert not scheduler.can_ever_fit(3 * PAGE + 1)


def test_a_sequence_that_fills_every_page_alone_finishes() -> None:
    """The largest request that is accepted never needs more pages than exist."""
    prompt = long(PAGE)
    yard = Yard(num_pages=3, max_num_seqs=2)
    first, second = yard.add(prompt, 2 * PAGE), yard.add(prompt, 2 * PAGE)
    yard.run_all()
    assert len(first.generated) == len(second.generated) == 2 * PAGE
    yard.check_empty()
