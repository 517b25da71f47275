"""Sampling metadata on its way to the device: packed into one buffer, copied once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..sampling import SamplingMetadata
from ..step import ALIGNMENT, host_buffer

# Sampling parameters of one row. Indices are rows of the named array; NONE means none.
RECORD = np.dtype(
    [
        ("draw", np.float64),
        ("row", np.int32),  # of the logits
        ("factor", np.float32),  # 1 / temperature; 0: greedy
        ("log_min_p", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),  # 0: all
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("history", np.int32),
        ("adds", np.int32),  # of its run
        ("mask", np.int32),
        ("pages", np.int32),  # where its own begin
        ("num_prompt", np.int32),
        ("num_known", np.int32),  # 0 if it is not used
    ]
)
NONE = -1
# Ids that come from the host are in pages of this size, that of the KV cache.
PAGE = 16
# Most numbers of the dense bias of one chunk of rows: 256 MB.
MOST_ADDS = 2**26


class RowChunk(NamedTuple):
    """Chunk of rows `first : stop`, of which `num_adds` have a dense bias, made of `entries`."""

    first: int
    stop: int
    num_adds: int
    entries: slice


class SamplingInputs(NamedTuple):
    """Sampling metadata of `N` rows on the device; all int32 but `added`."""

    records: Tensor  # [N, words of a record]
    masks: Tensor  # [M, words]
    ids: Tensor  # [pages · page size]
    pages: Tensor  # of each row with a history, one after the other
    places: Tensor  # [E], indices into a chunk's dense bias
    added: Tensor  # [E] fp32
    chunks: tuple[RowChunk, ...]
    page_size: int
    num_histories: int
    longest: int  # history


def word_offset(field: str) -> tl.constexpr:
    """Return the word offset of a record's field, for kernels."""
    assert RECORD.fields is not None
    return tl.constexpr(RECORD.fields[field][1] // 4)


NUM_WORDS = tl.constexpr(RECORD.itemsize // 4)


def default_records(count: int) -> NDArray[np.void]:
    """Return greedy records without logits processors; record i is for row i of the logits."""
    records = np.zeros(count, RECORD)
    records["row"] = np.arange(count)
    records["log_min_p"] = -np.inf
    records["top_p"] = records["repetition"] = 1
    records["history"] = records["adds"] = records["mask"] = NONE
    return records


def send_metadata(
    metadata: SamplingMetadata, vocabulary: int, device: torch.device
) -> SamplingInputs:
    """Send sampling metadata to a device, asynchronously."""
    records = default_records(len(metadata.temperature))
    is_random = metadata.temperature > 0
    np.divide(np.float32(1), metadata.temperature, out=records["factor"], where=is_random)
    records["draw"], records["top_p"], records["log_min_p"] = (
        metadata.draws,
        metadata.top_p,
        metadata.log_min_p,
    )
    records["top_k"] = np.minimum(metadata.top_k, vocabulary)
    records["mask"] = metadata.mask_rows
    records["repetition"] = metadata.repetition_penalty
    records["presence"] = metadata.presence_penalty
    records["frequency"] = metadata.frequency_penalty
    ids, pages, page_size = _histories(records, metadata)
    chunks, places, added = _chunks(records, metadata, vocabulary)
    sent = send_arrays([records, metadata.masks, pages, places, added, ids], device)
    return SamplingInputs(
        records=sent[0].view(-1, NUM_WORDS.value),
        masks=sent[1].view(metadata.masks.shape),
        ids=sent[5] if metadata.paged_ids is None else metadata.paged_ids.ids,
        pages=sent[2],
        places=sent[3],
        added=sent[4].view(torch.float32),
        chunks=chunks,
        page_size=page_size,
        num_histories=int((records["history"] != NONE).sum()),
        longest=int(records["num_known"].max(initial=0)),
    )


def send_arrays(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays of four-byte numbers, or of records of them, to a device → int32, flat."""
    words = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    room = [-(-len(part) // ALIGNMENT) * ALIGNMENT for part in words]
    buffer = host_buffer(sum(room), device)
    for section, part in zip(buffer.split(room), words, strict=True):
        section.numpy()[: len(part)] = part
    there = buffer.to(device, non_blocking=True).split(room)
    return [section[: len(part)] for section, part in zip(there, words, strict=True)]


def _histories(
    records: NDArray[np.void], metadata: SamplingMetadata
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Locate the tokens of rows with penalties → ids on the host, pages, page size."""
    penalties = (records["repetition"] != 1, records["presence"] != 0, records["frequency"] != 0)
    rows = np.flatnonzero(np.logical_or.reduce(penalties))
    known, slots = metadata.num_known[rows], metadata.slots[rows]
    size = PAGE if metadata.paged_ids is None else metadata.paged_ids.page_size
    counts = -(-known // size)
    starts = np.cumsum(counts) - counts
    records["history"][rows] = np.arange(len(rows))
    records["num_prompt"][rows], records["num_known"][rows] = metadata.num_prompt[rows], known
    records["pages"][rows] = starts
    if metadata.paged_ids is not None:
        of_rows = metadata.paged_ids.pages
        inside = np.arange(counts.sum()) - np.repeat(starts, counts)
        pages = of_rows.ravel().take(np.repeat(slots * of_rows.shape[1], counts) + inside)
        return np.zeros(0, np.int32), pages, size
    ids = np.zeros((counts.sum(), size), np.int32)
    for slot, start, count in zip(
        slots.tolist(), (starts * size).tolist(), known.tolist(), strict=True
    ):
        ids.reshape(-1)[start : start + count] = metadata.tokens[slot, :count]
    return ids, np.arange(len(ids), dtype=np.int32), size


def _chunks(
    records: NDArray[np.void], metadata: SamplingMetadata, vocabulary: int
) -> tuple[tuple[RowChunk, ...], NDArray[np.int32], NDArray[np.float32]]:
    """Cut rows into chunks that fit the dense bias → chunks, and its entries: places, numbers."""
    num_biases, num_bans = np.diff(metadata.bias_starts), np.diff(metadata.ban_starts)
    rows = np.flatnonzero((num_biases > 0) | (num_bans > 0) | (records["frequency"] != 0))
    at_once = max(1, MOST_ADDS // vocabulary)
    records["adds"][rows] = np.arange(len(rows)) % at_once
    cuts = [0, *rows[at_once::at_once].tolist(), len(records)]
    owners = np.concatenate(
        [np.repeat(np.arange(len(records)), num) for num in (num_biases, num_bans)]
    )
    token_ids = np.concatenate([metadata.bias_ids, metadata.ban_ids])
    added = np.concatenate([metadata.bias, np.full(len(metadata.ban_ids), -np.inf, np.float32)])
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    places = (records["adds"][owners] * vocabulary + token_ids[order]).astype(np.int32)
    chunks = []
    for first, stop in pairwise(cuts):
        start, end = np.searchsorted(owners, [first, stop]).tolist()
        num_adds = int((records["adds"][first:stop] != NONE).sum())
        chunks.append(RowChunk(first, stop, num_adds, slice(start, end)))
    return tuple(chunks), places, added[order].astype(np.float32)
