"""A plan becomes flat arrays of token ids, slots and the pages that are read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.paged_model import spans_of
from tests.engine.scheduling.yard import PAGE, Yard, long
from tidemill.engine.errors import RankFailed
from tidemill.engine.kernels.step import Step
from tidemill.engine.loop.runner import Readout, copy_to_host, step_arrays
from tidemill.engine.parallel.messages import Forward
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.groups import Pages

GREEDY = Sampling(temperature=0)


def test_invalid_results_are_not_returned() -> None:
    """Waiting for the step raises the cause."""

    def check() -> None:
        raise RankFailed("rank 1: it ended")

    assert Readout([torch.tensor([3])]).wait()[0].tolist() == [3]
    with pytest.raises(RankFailed):
        Readout([torch.tensor([3])], check).wait()


def random_plan(rng: random.Random, page_size: int) -> tuple[StepPlan, SequenceTable]:
    """Return decodes and longer spans of sequences in a full table with random pages."""
    table = SequenceTable(8, 50, page_size)
    for index in range(8):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 50))]
        pages = rng.sample(range(1000), -(-len(prompt) // page_size))
        slot = table.place(Sequence(SequenceRequest(prompt, 5, GREEDY), index), 0)
        table.pages[slot, : len(pages)] = pages
    slots = rng.sample(range(8), rng.randint(1, 8))
    num_decodes = rng.randint(0, len(slots))
    spans = []
    for index, slot in enumerate(slots):
        total = int(table.num_tokens[slot])
        start = total - 1 if index < num_decodes else rng.randrange(total)
        stop = rng.randint(start + 1, total)
        spans.append((slot, start, stop, rng.randint(0, stop - start)))
    columns = np.array(spans, np.int64).T
    no = np.zeros(len(slots), np.bool_)
    return StepPlan(
        num_decodes, *columns, samples=no, is_scored=no, starts_fresh=no, num_drafts=0 * columns[0]
    ), table


def test_a_token_whose_id_only_the_device_knows_is_given_by_its_slot() -> None:
    """It is a negative number, which the device replaces with the slot's last sampled id."""
    table = SequenceTable(4, 50, 16)
    for index in range(3):
        slot = table.place(Sequence(SequenceRequest([7, 8, 9], 5, GREEDY), index), 2)
        table.pages[slot, 0] = index
    slots = np.array([3, 1, 2])
    table.num_tokens[slots[:2]] += 1
    one, no = np.ones(3, np.int64), np.zeros(3, np.bool_)
    stops = table.num_tokens[slots]
    plan = StepPlan(3, slots, stops - 1, stops, one, ~no, no, no, 0 * one)
    step = Step.pack(plan.num_decodes, torch.device("cpu"), **step_arrays(plan, table))
    assert step.token_ids.tolist() == [-4, -2, 9]


@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 3, 16]))
def test_a_step_matches_its_plan(seed: int, page_size: int) -> None:
    """Each span has its tokens, positions, slots, context, pages and last rows."""
    plan, table = random_plan(random.Random(seed), page_size)
    step = Step.pack(plan.num_decodes, torch.device("cpu"), **step_arrays(plan, table))
    spans = spans_of(plan)
    assert step.num_decodes == plan.num_decodes
    assert step.num_tokens == plan.num_tokens
    assert len(step.context_lengths) == len(spans)
    starts, page_starts = step.query_starts.tolist(), step.page_starts.tolist()
    assert (starts[0], starts[-1]) == (0, step.num_tokens)
    assert (page_starts[0], page_starts[-1]) == (0, len(step.pages))
    for index, (slot, start, stop) in enumerate(spans):
        tokens = slice(starts[index], starts[index + 1])
        pages = step.pages[page_starts[index] : page_starts[index + 1]].tolist()
        assert step.context_lengths[index] == start
        assert step.token_ids[tokens].tolist() == table.tokens[slot, start:stop].tolist()
        assert step.positions[tokens].tolist() == list(range(start, stop))
        assert pages == table.pages[slot, : -(-stop // page_size)].tolist()
        assert step.slots[tokens].tolist() == [
            pages[at // page_size] * page_size + at % page_size for at in range(start, stop)
        ]
    rows = [
        row
        for end, count in zip(starts[1:], plan.num_logits.tolist(), strict=True)
        for row in range(end - count, end)
    ]
    assert step.logit_rows.tolist() == rows


def test_a_step_names_the_copies_of_each_group_of_layers() -> None:
    """A span copies the tokens before it in its page, in its first step only."""
    yard = Yard(budget=64, kinds={"window": 6}, fewest_copied=1)
    common = long(2 * PAGE + 3)
    sequences = [yard.add([*common, token, 0], 3) for token in range(2)]
    plan = yard.plan()
    arrays = step_arrays(plan, yard.table, yard.groups)
    step = Step.pack(plan.num_decodes, torch.device("cpu"), **arrays)
    first, second = (yard.slot_of(one) for one in sequences)
    (windowed,) = yard.groups
    assert isinstance(windowed, Pages)
    for number, pages in enumerate((yard.table.pages, windowed.pages)):
        assert step.of_group(number).page_copies == [[pages[first, 2], pages[second, 2], 3]]
    sent = Forward.from_step(step, 0, 0).arrays()
    assert sent["copies"].tolist() == arrays["copies"].tolist()
    yard.run(plan)
    assert "copies" not in step_arrays(yard.plan(), yard.table, yard.groups)


def test_the_results_of_a_step_are_copied_together() -> None:
    """Arrays of any item size, including empty ones, are restored unchanged."""
    tensors = [
        torch.tensor([True, False, True]),
        torch.arange(5),
        torch.rand(2, 3),
        torch.zeros(0, 4),
        torch.rand(3).to(torch.bfloat16),
    ]
    arrived = copy_to_host(tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1
    for tensor, got in zip(tensors, arrived, strict=True):
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)
