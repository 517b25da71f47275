"""One step of whole sequences: packed along one axis, run, and reduced to one row each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention import AttentionBackend
from ...kernels.backends import torch_on_all_threads
from ...kernels.pooling import Segments
from ...kernels.step import Step, pack_arrays
from ...scheduling.encoding import EncodingRequest
from .image_encoder import ImageTower
from .loaded_encoder import LoadedEncoder
from .pooler import TokenSelection

_ID_BYTES = 4


@cache
def _packer(length: int) -> Callable[..., bytes]:
    return struct.Struct(f"{length}i").pack


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as int32."""
    return _packer(len(token_ids))(*token_ids)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A sequence of a step: its request, and its token ids as int32.

    Joining the bytes of a step's sequences is faster than concatenating arrays or lists.
    """

    request: EncodingRequest
    packed_ids: bytes

    @property
    def num_tokens(self) -> int:
        """Return the number of its tokens."""
        return len(self.packed_ids) // _ID_BYTES


class PackedBatch(NamedTuple):
    """A step, the segments of its tokens (None if all are the first), and the pooled tokens."""

    step: Step
    type_ids: Tensor | None
    segments: Segments

    @classmethod
    def over(cls, views: dict[str, Any], known: dict[str, Any]) -> PackedBatch:
        """Return the batch of views of `batch_arrays`, on the device and on the host."""

        def step(arrays: dict[str, Any], host: Step | None = None) -> Step:
            own = {name: array for name, array in arrays.items() if name not in _BESIDES}
            return Step(0, **own, copy_on_host=host)

        host = step(known)
        return cls(
            host if views is known else step(views, host),
            views.get("type_ids"),
            Segments(views["row_starts"], views["skipped"]),
        )


# The arrays of a batch that are not of its step.
_BESIDES = frozenset({"type_ids", "row_starts", "skipped"})


def num_pages(model: LoadedEncoder | ImageTower, num_tokens: int, num_sequences: int) -> int:
    """Return the most pages that a step of that many tokens and sequences can need."""
    return num_tokens // model.backend.page_size + num_sequences


@torch.inference_mode()
def run(
    model: LoadedEncoder, attention: AttentionBackend, sequences: Sequence[TokenSequence]
) -> Tensor:
    """Return the model's output for some sequences: `encoded`."""
    batch = pack(sequences, wanted_by(model), model)
    attention.prepare(batch.step)
    return encoded(model, attention, batch)


def encoded(model: LoadedEncoder, attention: AttentionBackend, batch: PackedBatch) -> Tensor:
    """Return the output for each sequence, `[S, D]` fp32, or for each token, `[T, D]`.

    A decision network reads the last hidden state of each token, `[T, H]`. `attention` was prepared
    for the batch.
    """
    hidden = model.network.encode(batch.step, batch.type_ids, attention)
    return model.pooler(hidden, batch.segments) if model.decision_network is None else hidden


@torch.inference_mode()
def run_images(
    tower: ImageTower, attention: AttentionBackend, sequences: Sequence[TokenSequence]
) -> Tensor:
    """Return the vector of each image, `[B, D]` fp32."""
    batch = pack(sequences, tower.pooler.wanted, tower)
    attention.prepare(batch.step)
    images = [sequence.request.image for sequence in sequences]
    pixels = np.stack([image.pixels for image in images if image is not None])
    levels = torch.from_numpy(pixels).to(tower.device)
    hidden = tower.network.encode(levels, batch.step, attention)
    return tower.pooler(hidden, batch.segments)


def wanted_by(model: LoadedEncoder) -> TokenSelection:
    """Return the tokens whose hidden states the pooler or the decision network reads."""
    return model.pooler.wanted if model.decision_network is None else "all"


@torch.inference_mode()
def decide(
    model: LoadedEncoder, hidden: Tensor, token_ids: Tensor, sequences: Sequence[TokenSequence]
) -> list[Tensor]:
    """Return the logits of each sequence's options, fp32; without any its last hidden state.

    `hidden [T, H]` and `token_ids [T]` are those of all tokens.
    """
    assert model.decision_network is not None
    lengths = [sequence.num_tokens for sequence in sequences]
    parts = zip(torch.split(hidden, lengths), torch.split(token_ids, lengths), strict=True)
    with torch_on_all_threads(model.device):
        return [
            own[-1].float()
            if (schema := sequence.request.schema) is None
            else model.decision_network(own, ids, schema)
            for (own, ids), sequence in zip(parts, sequences, strict=True)
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
    sequences: Sequence[TokenSequence],
    wanted: TokenSelection,
    model: LoadedEncoder | ImageTower,
) -> PackedBatch:
    """Concatenate sequences, and copy them at once; the `wanted` tokens become rows."""
    return copied(batch_arrays(sequences, wanted, model), model.device)


def copied(arrays: dict[str, NDArray[Any]], device: torch.device) -> PackedBatch:
    """Return the batch of `batch_arrays` on a device."""
    return PackedBatch.over(*pack_arrays(device, arrays))


def batch_arrays(
    sequences: Sequence[TokenSequence],
    wanted: TokenSelection,
    model: LoadedEncoder | ImageTower,
) -> dict[str, NDArray[Any]]:
    """Return the arrays of some sequences, each on separate pages, by their names; pages last."""
    page_size = model.backend.page_size
    lengths = token_counts(sequences)
    requests = [sequence.request for sequence in sequences]
    skipped = np.array([request.num_skipped for request in requests])
    starts, page_starts = _starts(lengths), _starts(-(-lengths // page_size))
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    rows, row_starts = _rows(wanted, starts, skipped, positions)
    more: dict[str, NDArray[Any]] = {}
    if (unseen := np.array([request.num_unseen for request in requests])).any():
        more["unseen"] = unseen
    if model.num_types > 1 and (type_ids := _type_ids(requests)) is not None:
        more["type_ids"] = type_ids
    if model.recurrent_shapes:
        more["state_sources"] = np.full_like(lengths, -1)
        more["state_rows"] = np.arange(len(lengths))
    return {
        "token_ids": np.frombuffer(b"".join([one.packed_ids for one in sequences]), np.int32),
        "positions": positions,
        "slots": positions + np.repeat(page_starts[:-1] * page_size, lengths),
        "query_starts": starts,
        "context_lengths": np.zeros_like(lengths),
        "page_starts": page_starts,
        "logit_rows": rows,
        "row_starts": row_starts,
        "skipped": skipped,
        **more,
        "pages": np.arange(page_starts[-1]),
    }


def token_counts(sequences: Sequence[TokenSequence]) -> NDArray[np.int64]:
    """Return the number of tokens of each sequence."""
    return np.array(list(map(len, [one.packed_ids for one in sequences])), np.int64) // _ID_BYTES


def _rows(
    wanted: TokenSelection,
    starts: NDArray[np.int64],
    skipped: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the wanted tokens, and where each sequence's begin among them."""
    count = len(skipped)
    if wanted == "all" and not skipped.any():
        return np.arange(starts[-1]), starts
    if wanted == "all":
        is_row = positions >= np.repeat(skipped, np.diff(starts))
        return np.flatnonzero(is_row), _starts(np.diff(starts) - skipped)
    rows = starts[:-1] + skipped if wanted == "first" else starts[1:] - 1
    return rows, np.arange(count + 1)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)])


def _type_ids(requests: Sequence[EncodingRequest]) -> NDArray[np.int32] | None:
    """Return the segment of each token, None if all are the first."""
    if not any(request.has_types for request in requests):
        return None
    parts = [request.type_ids or [0] * len(request.token_ids) for request in requests]
    return np.concatenate([np.array(part, np.int32) for part in parts])
