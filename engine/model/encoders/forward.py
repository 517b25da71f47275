"""One step of whole sequences: packed along one axis, run, and reduced to one row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention import AttentionBackend
from ...kernels.backends import torch_on_all_threads
from ...kernels.pooling import Segments
from ...kernels.step import Step
from ...scheduling.encoding import SchemaSpans
from .loaded_encoder import LoadedEncoder
from .pooler import TokenSelection


class TokenSequence(NamedTuple):
    """A sequence's tokens, its segments, what pooling leaves out, and the questions in it."""

    token_ids: NDArray[np.int32]
    type_ids: NDArray[np.int32] | None = None
    num_skipped: int = 0
    schema: SchemaSpans | None = None


class PackedBatch(NamedTuple):
    """A step, the segments of its tokens (None if all are the first), and the pooled tokens."""

    step: Step
    type_ids: Tensor | None
    segments: Segments


def num_pages(model: LoadedEncoder, num_tokens: int, num_sequences: int) -> int:
    """Return the most pages that a step of that many tokens and sequences can need."""
    return num_tokens // model.backend.page_size + num_sequences


@torch.inference_mode()
def run(
    model: LoadedEncoder, attention: AttentionBackend, sequences: Sequence[TokenSequence]
) -> Tensor:
    """Return the model's output for some sequences, `[S, D]` fp32."""
    packed = pack(sequences, model.pooler.wanted, model)
    attention.prepare(packed.step)
    hidden = model.network.encode(packed.step, packed.type_ids, attention)
    return model.pooler(hidden, packed.segments)


@torch.inference_mode()
def run_decisions(
    model: LoadedEncoder, attention: AttentionBackend, sequences: Sequence[TokenSequence]
) -> list[Tensor]:
    """Return the logits of each sequence's options, fp32; without any its last hidden state."""
    assert model.decision_network is not None
    hidden = hidden_states(model, attention, sequences)
    lengths = [len(sequence.token_ids) for sequence in sequences]
    with torch_on_all_threads(model.device):
        return [
            own[-1].float()
            if sequence.schema is None
            else model.decision_network(
                own, torch.from_numpy(sequence.token_ids).to(model.device), sequence.schema
            )
            for own, sequence in zip(torch.split(hidden, lengths), sequences, strict=True)
        ]


@torch.inference_mode()
def hidden_states(
    model: LoadedEncoder, attention: AttentionBackend, sequences: Sequence[TokenSequence]
) -> Tensor:
    """Return the last hidden states of all tokens, `[T, H]`."""
    packed = pack(sequences, "all", model)
    attention.prepare(packed.step)
    return model.network.encode(packed.step, packed.type_ids, attention)


def pack(
    sequences: Sequence[TokenSequence], wanted: TokenSelection, model: LoadedEncoder
) -> PackedBatch:
    """Concatenate sequences, each on separate pages; the `wanted` tokens become rows."""
    page_size, device = model.backend.page_size, model.device
    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    skipped = np.array([sequence.num_skipped for sequence in sequences])
    starts, page_starts = _starts(lengths), _starts(-(-lengths // page_size))
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    rows, row_starts = _rows(wanted, starts, skipped, positions)
    states: dict[str, NDArray[np.int64]] = {}
    if model.recurrent_shapes:
        states = {"state_sources": np.full_like(lengths, -1), "state_rows": np.arange(len(lengths))}
    step = Step.pack(
        0,
        device,
        token_ids=np.concatenate([sequence.token_ids for sequence in sequences]),
        positions=positions,
        slots=positions + np.repeat(page_starts[:-1] * page_size, lengths),
        query_starts=starts,
        context_lengths=np.zeros_like(lengths),
        page_starts=page_starts,
        pages=np.arange(page_starts[-1]),
        logit_rows=rows,
        **states,
    )
    segments = Segments(*(torch.from_numpy(array).to(device) for array in (row_starts, skipped)))
    return PackedBatch(step, _type_ids(sequences, device), segments)


def _rows(
    wanted: TokenSelection,
    starts: NDArray[np.int64],
    skipped: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the wanted tokens, and where each sequence's begin among them."""
    count = len(skipped)
    if wanted == "all":
        is_row = positions >= np.repeat(skipped, np.diff(starts))
        return np.flatnonzero(is_row), _starts(np.diff(starts) - skipped)
    rows = starts[:-1] + skipped if wanted == "first" else starts[1:] - 1
    return rows, np.arange(count + 1)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)])


def _type_ids(sequences: Sequence[TokenSequence], device: torch.device) -> Tensor | None:
    if all(sequence.type_ids is None for sequence in sequences):
        return None
    parts = [
        np.zeros_like(sequence.token_ids) if sequence.type_ids is None else sequence.type_ids
        for sequence in sequences
    ]
    return torch.from_numpy(np.concatenate(parts)).to(device)
