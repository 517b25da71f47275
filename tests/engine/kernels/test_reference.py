"""The reference attention over pages, against plain softmax attention in float64."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.attention import AttentionShape
from engine.kernels.packed import PackedStep
from engine.kernels.reference import (
    attend,
    decode,
    gather,
    prefill,
    store,
    visible,
)
from tests.engine.kernels.paged import Paged, Sequences

PAGE = 8
SHAPES = {
    "full": AttentionShape(4, 4, 16, 16, 0.25),
    "grouped": AttentionShape(6, 2, 16, 16, 0.25),
    "one key head": AttentionShape(3, 1, 8, 8, 0.5),
    "wide values": AttentionShape(4, 2, 8, 24, 0.3),
    "narrow values": AttentionShape(4, 2, 24, 8, 0.3),
    "window": AttentionShape(4, 2, 16, 16, 0.25, window=5),
    "window of one": AttentionShape(4, 2, 16, 16, 0.25, window=1),
    "softcap": AttentionShape(4, 2, 16, 16, 0.5, softcap=1.5),
    "sinks": AttentionShape(4, 2, 16, 16, 0.25, has_sinks=True),
    "everything": AttentionShape(6, 2, 8, 16, 0.7, window=9, softcap=2.0, has_sinks=True),
}
# Below, at and above the edges of pages and of the windows.
LENGTHS = [1, 2, 5, 7, 8, 9, 10, 16, 17, 31]


@pytest.fixture(params=SHAPES, name="sequences")
def fixture_sequences(request: pytest.FixtureRequest) -> Sequences:
    """Sequences of every length with one kind of attention."""
    return Sequences.random(SHAPES[request.param], LENGTHS)


def test_attention_of_whole_sequences_is_plain_softmax_attention(sequences: Sequences) -> None:
    """Each query sees itself and what came before, within its window."""
    for index in range(len(LENGTHS)):
        out = attend(
            sequences.queries[index],
            sequences.keys[index],
            sequences.values[index],
            sequences.shape,
            sequences.sinks,
        )
        torch.testing.assert_close(out.double(), sequences.expected(index), atol=1e-5, rtol=1e-5)


def test_a_chunk_attends_to_its_context_and_itself(sequences: Sequences) -> None:
    """With and without context, from the start, the middle and the end of pages."""
    paged = Paged.of(sequences, PAGE)
    paged.write(sequences)
    for index, length in enumerate(LENGTHS):
        expected = sequences.expected(index)
        for start in {0, 1, length // 2, PAGE, length - 1} & set(range(length)):
            for stop in {start + 1, (start + length + 1) // 2, length}:
                out = prefill(
                    sequences.queries[index][start:stop],
                    paged.keys,
                    paged.values,
                    paged.chunk(index, start, stop),
                    sequences.shape,
                    sequences.sinks,
                )
                wanted = expected[start:stop]
                torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_decoding_attends_to_each_sequences_own_pages(sequences: Sequences) -> None:
    """Sequences of all lengths side by side, their pages in no order, the rest of them NaN."""
    paged = Paged.of(sequences, PAGE)
    paged.write(sequences)
    out = decode(
        torch.stack([query[-1] for query in sequences.queries]),
        paged.keys,
        paged.values,
        paged.decode_step(LENGTHS),
        sequences.shape,
        sequences.sinks,
    )
    expected = torch.stack([sequences.expected(index)[-1] for index in range(len(LENGTHS))])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_is_stored_is_what_is_gathered() -> None:
    """Tokens of several sequences, packed in any order, each to its page and offset."""
    sequences = Sequences.random(SHAPES["narrow values"], LENGTHS)
    paged = Paged.of(sequences, PAGE)
    places = [(index, at) for index, length in enumerate(LENGTHS) for at in range(length)]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(2)).tolist()
    places = [places[i] for i in order]
    step = PackedStep(
        num_decodes=0,
        token_pages=torch.stack([paged.pages[index][at // PAGE] for index, at in places]),
        token_offsets=torch.tensor([at % PAGE for _, at in places]),
        decode_pages=torch.empty(0, 0, dtype=torch.int32),
        decode_lengths=torch.empty(0, dtype=torch.int32),
        chunks=(),
    )
    key = torch.stack([sequences.keys[index][:, at] for index, at in places])
    value = torch.stack([sequences.values[index][:, at] for index, at in places])
    store(paged.keys, paged.values, key, value, step)
    for index, length in enumerate(LENGTHS):
        key, value = gather(paged.keys, paged.values, paged.pages[index], length)
        assert torch.equal(key, sequences.keys[index])
        assert torch.equal(value, sequences.values[index])
    held = sum(LENGTHS) * sequences.shape.num_kv_heads * sequences.shape.key_dim
    assert int((~paged.keys.isnan()).sum()) == held


def test_half_precision_is_attended_in_single() -> None:
    """Scores and weights are fp32: the answer is as good as its inputs and its output."""
    sequences = Sequences.random(SHAPES["everything"], LENGTHS, torch.bfloat16)
    out = attend(
        sequences.queries[-1],
        sequences.keys[-1],
        sequences.values[-1],
        sequences.shape,
        sequences.sinks,
    )
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, sequences.expected(len(LENGTHS) - 1).bfloat16()) or torch.allclose(
        out.double(), sequences.expected(len(LENGTHS) - 1), rtol=2**-7, atol=1e-6
    )


def test_a_window_is_counted_with_the_query_itself() -> None:
    """Position p sees keys at positions above p - window."""
    seen = visible(3, 5, 2, torch.device("cpu"))
    assert seen.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert visible(2, 3, 0, torch.device("cpu")).int().tolist() == [[1, 1, 0], [1, 1, 1]]
