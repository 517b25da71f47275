"""A plan becomes flat arrays: what each token is, where it lies, and whose pages are read."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.scheduler import PromptChunk, StepPlan
from engine.scheduling.sequence import Sampling, Sequence, SequenceRequest
from engine.scheduling.table import SequenceTable
from engine.stepping.runner import packed
from tests.engine.paged_model import spans_of, tokens_of

GREEDY = Sampling(temperature=0)


def random_plan(rng: random.Random, page_size: int) -> tuple[StepPlan, SequenceTable]:
    """Return some decodes and some chunks of sequences of a full table, whose pages are random."""
    table = SequenceTable(8, 50, page_size)
    for index in range(8):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 50))]
        pages = rng.sample(range(1000), -(-len(prompt) // page_size))
        table.place(Sequence(SequenceRequest(prompt, 5, GREEDY), index), pages, 0)
    slots = rng.sample(range(8), rng.randint(1, 8))
    cut = rng.randint(0, len(slots))
    chunks = []
    for slot in slots[cut:]:
        total = int(table.num_tokens[slot])
        start = rng.randrange(total)
        chunks.append(PromptChunk(slot, start, rng.randint(start + 1, total), is_last=False))
    return StepPlan(np.array(slots[:cut], np.int64), tuple(chunks), frozenset()), table


@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 3, 16]))
def test_a_step_says_of_each_span_what_the_plan_says(seed: int, page_size: int) -> None:
    """Its tokens, their positions and slots, its context, and the pages of both and no more."""
    plan, table = random_plan(random.Random(seed), page_size)
    step = packed(plan, np.array([0]), table, torch.device("cpu"))
    spans = spans_of(plan, table)
    assert step.num_decodes == len(plan.decodes)
    assert step.num_tokens == plan.num_tokens
    assert step.num_spans == len(spans)
    starts, page_starts = step.query_starts.tolist(), step.page_starts.tolist()
    assert (starts[0], starts[-1]) == (0, step.num_tokens)
    assert (page_starts[0], page_starts[-1]) == (0, len(step.pages))
    for index, (slot, start, stop) in enumerate(spans):
        tokens = slice(starts[index], starts[index + 1])
        pages = step.pages[page_starts[index] : page_starts[index + 1]].tolist()
        assert step.context_lengths[index] == start
        assert step.token_ids[tokens].tolist() == list(tokens_of(table, slot)[start:stop])
        assert step.positions[tokens].tolist() == list(range(start, stop))
        assert pages == table.pages[slot, : -(-stop // page_size)].tolist()
        assert step.slots[tokens].tolist() == [
            pages[at // page_size] * page_size + at % page_size for at in range(start, stop)
        ]
    assert step.logit_rows.tolist() == [0]
