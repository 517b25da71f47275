"""What the host knows of how tokens are chosen, on its way to the device: one buffer, one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.sampling import Rules
from engine.kernels.step import ALIGNED, host_buffer

# How one token is chosen. Places are among the rows of what they name; NONE is none.
ASKED = np.dtype(
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
        ("num_known", np.int32),  # 0 where nobody asks
    ]
)
NONE = -1
# Ids that come from the host lie in pages of so many; as many as keys and values do.
PAGE = 16
# Numbers that rows of one run have added to their logits, at most: 256 MB.
MOST_ADDS = 2**26


class Run(NamedTuple):
    """Rows `first : stop`, of which `num_adds` have numbers added, those of `entries`."""

    first: int
    stop: int
    num_adds: int
    entries: slice


class Asked(NamedTuple):
    """What `N` rows ask, on the device; all int32 but what is added."""

    records: Tensor  # [N, words of ASKED]
    masks: Tensor  # [M, words]
    ids: Tensor  # [pages · page size]
    pages: Tensor  # of each row with a history, one after the other
    places: Tensor  # [E], in what a run adds
    added: Tensor  # [E] fp32
    runs: tuple[Run, ...]
    page_size: int
    num_histories: int
    longest: int  # history


def word_of(field: str) -> tl.constexpr:
    """Return at which word of a record a field begins, for kernels."""
    assert ASKED.fields is not None
    return tl.constexpr(ASKED.fields[field][1] // 4)


NUM_WORDS = tl.constexpr(ASKED.itemsize // 4)


def records_of(count: int) -> NDArray[np.void]:
    """Return records of rows that ask for nothing: the likeliest token of row i is that of i."""
    made = np.zeros(count, ASKED)
    made["row"] = np.arange(count)
    made["log_min_p"] = -np.inf
    made["top_p"] = made["repetition"] = 1
    made["history"] = made["adds"] = made["mask"] = NONE
    return made


def ask(rules: Rules, vocabulary: int, device: torch.device) -> Asked:
    """Bring rules to a device; the host waits for nothing."""
    made = records_of(len(rules.temperature))
    is_random = rules.temperature > 0
    np.divide(np.float32(1), rules.temperature, out=made["factor"], where=is_random)
    made["draw"], made["top_p"], made["log_min_p"] = rules.draws, rules.top_p, rules.log_min_p
    made["top_k"] = np.minimum(rules.top_k, vocabulary)
    made["mask"] = rules.mask_of
    made["repetition"] = rules.repetition_penalty
    made["presence"] = rules.presence_penalty
    made["frequency"] = rules.frequency_penalty
    ids, pages, page_size = _histories(made, rules)
    runs, places, added = _runs(made, rules, vocabulary)
    sent = send([made, rules.masks, pages, places, added, ids], device)
    return Asked(
        records=sent[0].view(-1, NUM_WORDS.value),
        masks=sent[1].view(rules.masks.shape),
        ids=sent[5] if rules.kept is None else rules.kept.ids,
        pages=sent[2],
        places=sent[3],
        added=sent[4].view(torch.float32),
        runs=runs,
        page_size=page_size,
        num_histories=int((made["history"] != NONE).sum()),
        longest=int(made["num_known"].max(initial=0)),
    )


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays of four-byte numbers, or of records of them, to a device → int32, flat."""
    words = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    room = [-(-len(part) // ALIGNED) * ALIGNED for part in words]
    buffer = host_buffer(sum(room), device)
    for section, part in zip(buffer.split(room), words, strict=True):
        section.numpy()[: len(part)] = part
    there = buffer.to(device, non_blocking=True).split(room)
    return [section[: len(part)] for section, part in zip(there, words, strict=True)]


def _histories(
    made: NDArray[np.void], rules: Rules
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Say where the tokens of rows lie that have penalties → ids of the host, pages, their size."""
    penalties = (made["repetition"] != 1, made["presence"] != 0, made["frequency"] != 0)
    rows = np.flatnonzero(np.logical_or.reduce(penalties))
    known, slots = rules.num_known[rows], rules.slots[rows]
    size = PAGE if rules.kept is None else rules.kept.page_size
    counts = -(-known // size)
    starts = np.cumsum(counts) - counts
    made["history"][rows] = np.arange(len(rows))
    made["num_prompt"][rows], made["num_known"][rows] = rules.num_prompt[rows], known
    made["pages"][rows] = starts
    if rules.kept is not None:
        of_rows = rules.kept.pages
        inside = np.arange(counts.sum()) - np.repeat(starts, counts)
        pages = of_rows.ravel().take(np.repeat(slots * of_rows.shape[1], counts) + inside)
        return np.zeros(0, np.int32), pages, size
    ids = np.zeros((counts.sum(), size), np.int32)
    for slot, start, count in zip(
        slots.tolist(), (starts * size).tolist(), known.tolist(), strict=True
    ):
        ids.reshape(-1)[start : start + count] = rules.tokens[slot, :count]
    return ids, np.arange(len(ids), dtype=np.int32), size


def _runs(
    made: NDArray[np.void], rules: Rules, vocabulary: int
) -> tuple[tuple[Run, ...], NDArray[np.int32], NDArray[np.float32]]:
    """Cut rows into runs for whose numbers there is room → runs, entries: places, what is added."""
    num_biases, num_bans = np.diff(rules.bias_starts), np.diff(rules.ban_starts)
    rows = np.flatnonzero((num_biases > 0) | (num_bans > 0) | (made["frequency"] != 0))
    at_once = max(1, MOST_ADDS // vocabulary)
    made["adds"][rows] = np.arange(len(rows)) % at_once
    cuts = [0, *rows[at_once::at_once].tolist(), len(made)]
    owners = np.concatenate(
        [np.repeat(np.arange(len(made)), num) for num in (num_biases, num_bans)]
    )
    token_ids = np.concatenate([rules.bias_ids, rules.ban_ids])
    added = np.concatenate([rules.bias, np.full(len(rules.ban_ids), -np.inf, np.float32)])
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    places = (made["adds"][owners] * vocabulary + token_ids[order]).astype(np.int32)
    runs = []
    for first, stop in pairwise(cuts):
        start, end = np.searchsorted(owners, [first, stop]).tolist()
        num_adds = int((made["adds"][first:stop] != NONE).sum())
        runs.append(Run(first, stop, num_adds, slice(start, end)))
    return tuple(runs), places, added[order].astype(np.float32)
