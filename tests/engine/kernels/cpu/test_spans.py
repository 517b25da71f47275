"""Attention of longer spans on the CPU: as exact as its dtype, however it is cut into blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.cpu import spans
from engine.kernels.cpu.scalars import DTYPES
from tests.engine.kernels.paged import Sequences

GROUPED = AttentionShape(6, 2, 8, 16, 0.4)


def attended(sequences: Sequences, tokens: int) -> Tensor:
    """Attend the last tokens of the first sequence."""
    shape, query = sequences.shape, sequences.queries[0][-tokens:]
    out = query.new_empty(tokens, shape.num_query_heads, shape.value_dim)
    spans.attend_span(query, sequences.keys[0], sequences.values[0], shape, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("length", "tokens"), [(1, 1), (17, 17), (33, 2), (70, 70), (70, 41)])
def test_a_span_is_as_exact_as_its_dtype(
    dtype: torch.dtype, window: int, length: int, tokens: int
) -> None:
    """Of any length and window; bfloat16 rounds scores and weights, as transformers does."""
    sequences = Sequences.random(replace(GROUPED, window=window), [length], dtype)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    expected = sequences.expected(0)[-tokens:]
    out = attended(sequences, tokens)
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=2 * bound)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("most_scores", [1, 6 * 70 * 5])
def test_blocks_of_queries_change_nothing(
    monkeypatch: pytest.MonkeyPatch, window: int, most_scores: int
) -> None:
    """Long contexts take few queries at once, down to a single one."""
    sequences = Sequences.random(replace(GROUPED, window=window), [70])
    whole = attended(sequences, 50)
    monkeypatch.setattr(spans, "MOST_SCORES", most_scores)
    torch.testing.assert_close(attended(sequences, 50), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_from_its_token_on(dtype: torch.dtype, bad: float) -> None:
    """A token after a broken key is broken; fast maths must not lose a NaN."""
    sequences = Sequences.random(GROUPED, [40], dtype)
    sequences.keys[0][0, 20] = bad
    finite = attended(sequences, 40).isfinite().all(dim=-1)
    assert not finite[20:, :3].any()
    assert finite[:20].all()
    assert finite[:, 3:].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-3, 40.0])
def test_scores_of_any_size_neither_overflow_nor_vanish(dtype: torch.dtype, size: float) -> None:
    """Each row is still a mean of values, also where one token outweighs all others."""
    sequences = Sequences.random(GROUPED, [40], dtype)
    sequences.queries[0].mul_(size)
    sequences.values[0].fill_(1)
    out = attended(sequences, 40)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-2, rtol=0)
