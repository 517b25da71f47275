"""Encoding step by step, over a model that is a sum."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.scheduling.counted_priority import CountedPriority
from tidemill.engine.errors import DeviceFailed
from tidemill.engine.kernels.attention import AttentionBackend, AttentionShape
from tidemill.engine.kernels.reference import ReferenceAttention
from tidemill.engine.kernels.step import Step
from tidemill.engine.loop.encoder_runner import LaunchedEncoding
from tidemill.engine.loop.encoding import EncodingCore, RunningEncoding
from tidemill.engine.model.encoders.loaded_encoder import LoadedEncoder
from tidemill.engine.model.encoders.pooler import Pooler
from tidemill.engine.scheduling.encoding import EncodingRequest
from tidemill.protocol.errors import InternalError, RequestError

LONGEST = 40
Check = Callable[[list[list[int]]], None]


class Sums:
    """A network whose hidden states are a token's id and its segment; `check` sees each step."""

    needs_torch = False

    def __init__(self, check: Check) -> None:
        self.num_layers_started = 0
        self.steps: list[list[list[int]]] = []
        self.bias = 0.0
        self._check = check

    def can_replay(self, token_ids: object) -> bool:
        """Return True: all tokens are alike."""
        del token_ids
        return True

    def encode(self, step: Step, type_ids: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Note the step's sequences and return `[N, 2]`."""
        del attention
        self.num_layers_started += 1
        starts = step.query_starts.tolist()
        ids = step.token_ids.tolist()
        self.steps.append([ids[start:stop] for start, stop in pairwise(starts)])
        self._check(self.steps[-1])
        types = torch.zeros_like(step.token_ids) if type_ids is None else type_ids
        hidden = torch.stack([step.token_ids, types], dim=1).float()[step.logit_rows]
        return hidden + self.bias


@pytest.fixture(name="_pace", params=[0, 1], ids=["at once", "ahead"], autouse=True)
def fixture_pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test without and with a step in flight."""
    monkeypatch.setattr(sys.modules[__name__], "STEPS_AHEAD", request.param)


STEPS_AHEAD = 0


def core(
    check: Check = lambda _: None, max_tokens: int = 20, **others: Any
) -> tuple[EncodingCore, Sums]:
    """Return a core over such a network with mean pooling."""
    network = Sums(check)
    model = LoadedEncoder(
        network=network,
        pooler=Pooler(("mean",)),
        shapes=(AttentionShape(1, 1, 2, 2, 1.0, is_causal=False),),
        backend=ReferenceAttention,
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab_size=100,
        num_types=2,
        max_model_len=LONGEST,
        hidden_size=2,
        **others,
    )
    return EncodingCore(model, max_tokens, max_sequences=8, steps_ahead=STEPS_AHEAD), network


def added(work: EncodingCore, *ids: Sequence[int]) -> list[RunningEncoding]:
    """Add a request for each sequence of ids."""
    return [work.add(EncodingRequest(list(own))) for own in ids]


def finished(work: EncodingCore) -> list[Any]:
    """Run everything and return the items in the order in which they ended, each once."""
    ended = []
    while (events := work.step()) is not None:
        assert all(event.is_finished and not event.new_token_ids for event in events)
        ended += [event.request for event in events]
    assert len(set(ended)) == len(ended)
    return ended


def test_each_request_gets_the_result_for_its_tokens() -> None:
    """The other requests of its step do not matter."""
    work, network = core()
    ids = [[5] * 3, [1, 2], [9], [4] * 18, [7] * 2]
    items = added(work, *ids)
    assert set(finished(work)) == set(items)
    for item, own in zip(items, ids, strict=True):
        assert item.result().values.tolist() == [np.mean(own), 0]
        assert item.result().num_tokens == len(own)
    assert [list(map(len, step)) for step in network.steps] == [[18], [3, 2, 2, 1]]


def test_segments_and_skipped_tokens_apply() -> None:
    """One request has segments, another skips its first tokens, a third does neither."""
    work, _ = core()
    items = [
        work.add(EncodingRequest([2, 4], type_ids=[0, 1])),
        work.add(EncodingRequest([2, 4], num_skipped=1)),
        work.add(EncodingRequest([2, 4])),
    ]
    finished(work)
    assert [item.result().values.tolist() for item in items] == [[3, 0.5], [4, 0], [3, 0]]


@pytest.mark.parametrize("is_short_of_memory", [False, True])
def test_outputs_of_tokens_and_of_texts_are_separate(*, is_short_of_memory: bool) -> None:
    """Pairs of the same tokens, with and without an output per token, in either queue."""
    most = 6 if is_short_of_memory else 100

    def check(step: list[list[int]]) -> None:
        if len(step) > 1 and sum(map(len, step)) > most:
            raise torch.OutOfMemoryError

    work, network = core(check)
    ids = [[number, *range(number % 4)] for number in range(1, 13)]
    items = [
        work.add(
            EncodingRequest(
                own, output="token_vectors" if wants_tokens else "pooled", priority=priority
            )
        )
        for number, own in enumerate(ids)
        for priority in (None, number % 3)
        for wants_tokens in (number % 2 == 0, number % 2 == 1)
    ]
    assert set(finished(work)) == set(items)
    for item in items:
        own = item.request.token_ids
        values = item.result().values
        if item.request.output != "pooled":
            assert values.tolist() == [[one, 0] for one in own]
        else:
            assert values.shape == (2,)
            assert np.allclose(values, [np.mean(own), 0])
    assert max(sum(map(len, step)) for step in network.steps) > 6
    assert work.stats().running == 0


@pytest.mark.parametrize("failure", [RuntimeError("late"), torch.OutOfMemoryError()])
def test_a_failure_that_arrives_late_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """The next step, already launched, runs again after it; cancelled requests have no result."""
    work, network = core(max_tokens=4)
    wait, number = LaunchedEncoding.wait, count()

    def fail_second(self: LaunchedEncoding) -> Any:
        if next(number) == 1:
            raise failure
        return wait(self)

    monkeypatch.setattr(LaunchedEncoding, "wait", fail_second)
    items = added(work, *([n, n] for n in range(8)))
    ended = [event.request for _ in range(STEPS_AHEAD + 2) for event in work.step() or ()]
    assert ended == items[:2]
    assert len(network.steps) == 2 + STEPS_AHEAD
    work.abort({items[5]})
    rest = [item for item in items if item is not items[5]]
    assert [*ended, *finished(work)] == rest
    assert [item.result().values[0] for item in rest] == [0, 1, 2, 3, 4, 6, 7]
    assert (work.stats().running, work.stats().prompt_tokens) == (0, 14)


def test_a_step_is_launched_before_the_previous_one_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the device never waits for the host, unless it must run one step at a time."""
    work, network = core(max_tokens=2)
    seen, wait = [], LaunchedEncoding.wait

    def noted(self: LaunchedEncoding) -> Any:
        seen.append(len(network.steps))
        return wait(self)

    monkeypatch.setattr(LaunchedEncoding, "wait", noted)
    added(work, *([n, n] for n in range(4)))
    finished(work)
    assert seen == ([2, 3, 4, 4] if STEPS_AHEAD else [1, 2, 3, 4])


@pytest.mark.parametrize("ids", [[], [1] * (LONGEST + 1)])
def test_a_sequence_above_the_context_is_rejected(ids: list[int]) -> None:
    """The error contains its number of tokens and the limit."""
    work, _ = core()
    with pytest.raises(
        RequestError, match=f"{len(ids)} tokens; the number must be between 1 and {LONGEST}"
    ):
        added(work, ids)


def test_a_prompt_that_leaves_nothing_to_pool_is_refused() -> None:
    """It would have no value."""
    work, _ = core()
    with pytest.raises(RequestError, match="no token is left for the vector"):
        work.add(EncodingRequest([1, 2], num_skipped=2))


def test_a_sequence_longer_than_a_step_runs_alone() -> None:
    """The token limit applies to several sequences."""
    work, network = core(max_tokens=4)
    added(work, [1] * LONGEST, [2], [3])
    assert len(finished(work)) == 3
    assert [len(step) for step in network.steps] == [1, 2]


def test_repeats_are_computed_once() -> None:
    """Each of them gets its result, and all but one count as cached."""
    work, network = core()
    items = added(work, [1, 2], [3], [1, 2], [1, 2])
    assert len(finished(work)) == 4
    assert network.steps == [[[1, 2], [3]]]
    assert [item.result().values[0] for item in items] == [1.5, 3, 1.5, 1.5]
    stats = work.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.steps) == (7, 4, 1)


def test_only_the_sequence_that_breaks_a_step_is_blamed() -> None:
    """The others get their normal results."""

    def check(step: list[list[int]]) -> None:
        if [13] in step:
            raise RuntimeError("unlucky")

    work, _ = core(check)
    items = added(work, *([n] for n in range(10, 18)))
    assert set(finished(work)) == set(items)
    with pytest.raises(InternalError, match="unlucky") as caught:
        items[3].result()
    assert caught.value.status_code == 500
    assert [item.result().values[0] for item in items if item is not items[3]] == [
        *(10, 11, 12, 14, 15, 16, 17)
    ]


def test_a_failure_that_passes_costs_one_step() -> None:
    """The step runs again unchanged."""
    failures = [RuntimeError("once")]

    def check(_: list[list[int]]) -> None:
        if failures:
            raise failures.pop()

    work, network = core(check)
    items = added(work, *([n] for n in range(10, 18)))
    assert set(finished(work)) == set(items)
    assert [len(step) for step in network.steps] == [8, 8]
    assert work.stats().failures == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), torch.OutOfMemoryError(), OSError(28, "No space left")]
)
def test_a_device_that_fails_every_step_ends_the_engine_and_fails_no_item(error: Exception) -> None:
    """No item has an error, since the canary fails as well."""

    def check(_: list[list[int]]) -> None:
        raise error

    work, _ = core(check)
    items = added(work, *([n] for n in range(10, 18)))
    with pytest.raises(DeviceFailed):
        finished(work)
    assert not any(item.error for item in items)


def test_a_device_that_fails_every_second_step_is_given_up() -> None:
    """Each failure is temporary, so that no item is blamed, but the values are unreliable."""
    number = count()

    def check(_: list[list[int]]) -> None:
        if next(number) % 2 == 0:
            raise RuntimeError("flaky")

    work, _ = core(check)
    items = added(work, *([n] * LONGEST for n in range(40)))
    with pytest.raises(DeviceFailed, match="is unreliable"):
        finished(work)
    assert not any(item.error for item in items)


def test_a_model_that_gives_no_finite_number_ends_the_engine() -> None:
    """The canary is not finite either."""
    work, network = core()
    network.bias = math.nan
    added(work, [1], [2])
    with pytest.raises(DeviceFailed, match="not finite"):
        finished(work)


def test_a_step_that_does_not_fit_is_followed_by_smaller_ones() -> None:
    """The size shrinks until a step fits, as long as needed."""

    def check(step: list[list[int]]) -> None:
        if sum(map(len, step)) > 6:
            raise torch.OutOfMemoryError

    work, network = core(check)
    items = added(work, *([n, n] for n in range(12)))
    assert set(finished(work)) == set(items)
    assert [item.result().values[0] for item in items] == list(range(12))
    assert [sum(map(len, step)) for step in network.steps][:4] == [16, 8, 4, 4]


def test_a_sequence_that_does_not_fit_alone_fails_alone() -> None:
    """Its error has the code; the limit is then restored."""

    def check(step: list[list[int]]) -> None:
        if any(len(ids) > 8 for ids in step):
            raise torch.OutOfMemoryError

    work, network = core(check)
    long, *others = added(work, [1] * 9, *([n, n] for n in range(8)))
    finished(work)
    with pytest.raises(InternalError) as caught:
        long.result()
    assert caught.value.code == "out_of_memory"
    assert [item.result().values[0] for item in others] == list(range(8))
    added(work, *([n, 1, 1] for n in range(6)))
    finished(work)
    assert sum(map(len, network.steps[-1])) == 18


def test_values_that_are_not_finite_fail_only_their_request() -> None:
    """The other rows do not change."""
    work, _ = core()
    good, bad = added(work, [1], [2])

    class Broken(Sums):
        def encode(self, step: Step, type_ids: Tensor | None, attention: Any) -> Tensor:
            hidden = super().encode(step, type_ids, attention)
            hidden[hidden == 2] = torch.nan
            return hidden

    work._runner._model = replace(work._model, network=Broken(lambda _: None))
    finished(work)
    assert good.result().values[0] == 1
    with pytest.raises(InternalError, match="not finite"):
        bad.result()


def test_a_dropped_request_is_not_computed() -> None:
    """It may wait, be in a started window, or have a duplicate."""
    work, network = core(max_tokens=2)
    items = added(work, [1, 1], [2, 2], [3], [3], [4])
    work.step()
    assert work.stats().running == 4 + STEPS_AHEAD
    work.abort({items[1], items[2]})
    assert work.stats().running == 2 + STEPS_AHEAD
    waiting = added(work, [5])
    work.abort(set(waiting))
    assert set(finished(work)) == {items[3], items[4], *items[:STEPS_AHEAD]}
    assert network.steps == [[[1, 1]], [[3], [4]]]
    assert work.stats().waiting == work.stats().running == 0


def test_interactive_requests_are_encoded_before_earlier_rows() -> None:
    """They precede packed steps, but not a running step."""
    work, network = core(max_tokens=4)
    added(work, [1, 1, 1], [2, 2, 2], [3, 3, 3])
    work.step()
    work.add(EncodingRequest([7, 7], priority=1))
    work.add(EncodingRequest([8], priority=1))
    assert work.stats().waiting == 2
    finished(work)
    assert network.steps == [[[1, 1, 1]], [[7, 7], [8]], [[2, 2, 2]], [[3, 3, 3]]]


def test_a_request_is_queued_in_few_comparisons_however_many_wait() -> None:
    """Requests of a lower number pass a long queue at once, and run first."""
    work, network = core(max_tokens=1)
    with CountedPriority.counting() as count:
        for priority in (3, 1, 2):
            for _ in range(300):
                work.add(EncodingRequest([priority], priority=CountedPriority(priority)))
    assert count() < 900
    finished(work)
    assert network.steps[0] == [[1]]
    assert work.stats().waiting == 0


def test_an_interactive_request_may_leave_before_it_runs() -> None:
    """Nothing is left of it."""
    work, network = core()
    urgent = work.add(EncodingRequest([7], priority=1))
    work.abort({urgent})
    assert finished(work) == []
    assert network.steps == []
