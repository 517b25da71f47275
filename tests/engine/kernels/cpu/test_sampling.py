"""The CPU's sampling compared with the reference: rows of every shape under every rule."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.kernels.rules import Rule, joined
from tidemill.engine.kernels import sampling as reference
from tidemill.engine.kernels.cpu import sampling as of_cpu
from tidemill.engine.kernels.cpu.scalars import DTYPES
from tidemill.engine.kernels.cpu.top_p import TILE

VOCABULARIES = [3, 16, TILE - 1, TILE + 1, 3 * TILE + 7]
IDS = st.lists(st.integers(0, 2), max_size=9)
RULES = st.builds(
    Rule,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 50, 10**9]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.1, 0.6, 1.0]),
    repetition=st.sampled_from([1.0, 1.05, 0.6, 2.0]),
    presence=st.sampled_from([0.0, 0.7, -1.3]),
    frequency=st.sampled_from([0.0, 0.7, -1.3]),
    prompt=IDS,
    generated=IDS,
    bias=st.dictionaries(st.integers(0, 2), st.sampled_from([-100.0, -1.1, 2.3, 100.0])),
    bans=st.lists(st.integers(0, 2), max_size=2),
)


def row_of(kind: str, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return a row of logits `[V]` of one kind."""
    row = torch.randn(vocabulary, generator=generator) * 2
    if kind == "flat":
        row *= 0.01
    elif kind == "peaked":
        row[int(torch.randint(vocabulary, (1,), generator=generator))] = 30
    elif kind == "tied":
        row = row.round()
    elif kind == "equal":
        row[:] = 2.5
    elif kind == "banned":
        row[torch.rand(vocabulary, generator=generator) < 0.5] = -torch.inf
        row[0] = 1.0
    return row


KINDS = ["spread", "flat", "peaked", "tied", "equal", "banned"]


def check_same(logits: Tensor, metadata: list[Rule], draws: np.ndarray) -> None:
    """Assert the same choices, except for a draw that rounding puts on either side of a token."""
    rows = joined(metadata, draws)
    got, expected = of_cpu.sample(logits, rows), reference.sample(logits, rows)
    assert got.is_broken.tolist() == expected.is_broken.tolist()
    differing = (got.token_ids != expected.token_ids) & ~got.is_broken
    for row in differing.nonzero().flatten().tolist():
        near = [joined([metadata[row]], draws[[row]] + shift) for shift in (-1e-5, 1e-5)]
        around = [int(reference.sample(logits[[row]], one).token_ids) for one in near]
        assert min(around) <= int(got.token_ids[row]) <= max(around)


@given(
    vocabulary=st.sampled_from(VOCABULARIES),
    metadata=st.lists(RULES, min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_are_chosen_for_as_by_the_reference(
    vocabulary: int, metadata: list[Rule], seed: int, kind: str, dtype: torch.dtype
) -> None:
    """Every parameter is combined with every other, for every kind of row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([row_of(kind, vocabulary, generator) for _ in metadata]).to(dtype)
    before = logits.clone()
    check_same(logits, metadata, np.random.default_rng(seed).random(len(metadata)))
    assert torch.equal(logits, before)
