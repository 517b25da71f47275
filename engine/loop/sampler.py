"""Sampling: a step's logits to tokens, with the parameters that sequences request.

Randomness is keyed by (seed, number of generated tokens), so a row does not depend on its
neighbors. The chosen tokens stay on the device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.protocol.errors import InternalError, RequestError

from ..kernels.backends import choose_sampling
from ..kernels.sampling import PagedTokenIds, Sampled, SamplingMetadata, SamplingOps, uniform_draws
from ..scheduling.sequence import ConstraintState
from ..scheduling.step_plan import StepPlan
from ..scheduling.table import SequenceTable

logger = logging.getLogger(__name__)

_MOST_THREADS = 8


@dataclass(slots=True)
class Masks:
    """Token masks of `N` rows: `of_rows` is each row's index in `words`, -1 for any token.

    `failed` contains the errors by row. All fields are complete after `wait`.
    """

    of_rows: NDArray[np.int64]  # [N]
    words: NDArray[np.uint32]  # [M, vocabulary in words of 32 bits]
    failed: dict[int, RequestError] = field(default_factory=dict)
    helpers: tuple[Future[None], ...] = ()

    def wait(self) -> None:
        """Return once all rows are filled."""
        for helper in self.helpers:
            helper.result()

    def may_be_none_of(self, row: int, token_ids: list[int]) -> bool:
        """Return whether a row may have any token other than these."""
        place = int(self.of_rows[row])
        if place < 0:
            return True
        left = self.words[place].copy()
        for token_id in token_ids:
            left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return bool(left.any())


class MaskThreads:
    """Threads that compute the allowed tokens of one table's constrained sequences."""

    def __init__(self, table: SequenceTable, vocab_size: int) -> None:
        self._table = table
        self._num_words = -(-vocab_size // 32)
        self._num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, "tidemill-masks")

    def start(self, plan: StepPlan) -> Masks:
        """Start computing the masks for a step's sampled sequences; the caller must wait for all.

        Sequences that have ended since their step was launched are skipped.
        """
        table, owners = self._table, plan.slots[plan.samples]
        counts = plan.num_sampled[plan.samples]
        is_masked = table.is_constrained[owners] & table.is_running[owners]
        rows = np.flatnonzero(np.repeat(is_masked, counts))
        of_rows = np.full(counts.sum(), -1, np.int64)
        of_rows[rows] = np.arange(len(rows))
        masks = Masks(of_rows, np.empty((len(rows), self._num_words), np.uint32))
        first_rows = np.cumsum(counts) - counts
        spans = (column[is_masked].tolist() for column in (owners, first_rows, counts - 1))
        todo = zip(*spans, strict=True)  # shared: each sequence comes to one thread
        masks.helpers = tuple(
            self._threads.submit(self._fill, masks, todo)
            for _ in range(min(self._num_threads, int(is_masked.sum())))
        )
        return masks

    def _fill(self, masks: Masks, todo: Iterator[tuple[int, int, int]]) -> None:
        for slot, row, num_drafts in todo:
            state = self._table.sequence(slot).constraint_state
            assert state is not None
            end = int(self._table.num_known_ids[slot])
            _fill_rows(masks, row, state, self._table.tokens[slot, end : end + num_drafts].tolist())


def _fill_rows(masks: Masks, row: int, state: ConstraintState, drafts: list[int]) -> None:
    """Fill the masks of a row and of its drafts, up to the first draft that is not allowed."""
    first = int(masks.of_rows[row])
    masks.of_rows[row : row + len(drafts) + 1] = -1
    place = 0
    try:
        while True:
            words = masks.words[first + place]
            is_masked = state.fill(words)
            masks.of_rows[row + place] = first + place if is_masked else -1
            if place == len(drafts) or (is_masked and not _is_allowed(words, drafts[place])):
                return
            if not place:
                state = state.fork()
            place += 1
            if state.push(drafts[place - 1]):
                return
    except RequestError as error:
        masks.failed[row + place] = error
    except Exception as exc:
        logger.exception("a constraint failed")
        masks.failed[row + place] = InternalError(f"The constraint failed: {exc!r}")


def _is_allowed(words: NDArray[np.uint32], token_id: int) -> bool:
    return bool(int(words[token_id // 32]) >> token_id % 32 & 1)


NO_MASKS = np.zeros((0, 0), np.uint32)


class Sampler:
    """Chooses tokens for slots of one table; the token ids are `paged`, or in the table."""

    def __init__(self, table: SequenceTable, paged: PagedTokenIds | None = None) -> None:
        self._table = table
        self._paged = paged
        self._ops: dict[torch.dtype, SamplingOps] = {}  # by the logits' dtype

    @torch.inference_mode()
    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Sampled:
        """Choose one token for each row of `logits [N, V]` by its metadata."""
        if logits.dtype not in self._ops:
            self._ops[logits.dtype] = choose_sampling(logits.dtype, logits.device)
        return self._ops[logits.dtype].sample(logits, metadata)

    def metadata(
        self, slots: NDArray[np.int64], vocabulary: int, places: NDArray[np.int64] | int = 0
    ) -> SamplingMetadata:
        """Return the sampling parameters of these slots' next tokens, except masks.

        Each follows `places` drafts, which are in the table after the known tokens.
        """
        table = self._table
        num_prompt, num_tokens = table.num_prompt_tokens[slots], table.num_tokens[slots] + places
        num_new = num_tokens - num_prompt
        is_early, has_bias = num_new < table.min_tokens[slots], table.has_bias[slots]
        biases: dict[int, Mapping[int, float]] = {}
        bans: dict[int, list[int]] = {}
        for row in np.flatnonzero(has_bias).tolist():
            requested = table.sequence(int(slots[row])).request.sampling.logit_bias
            biases[row] = {
                token: bias for token, bias in requested.items() if 0 <= token < vocabulary
            }
        for row in np.flatnonzero(is_early).tolist():
            stops = table.sequence(int(slots[row])).request.stop_token_ids
            bans[row] = [token for token in stops if 0 <= token < vocabulary]
        temperature, none = table.temperature[slots], np.zeros(len(slots))
        with np.errstate(divide="ignore"):
            log_min_p = np.log(table.min_p[slots])
        return SamplingMetadata(
            temperature=temperature,
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            log_min_p=log_min_p,
            draws=uniform_draws(table.seed[slots], num_new) if temperature.any() else none,
            has_processors=table.reads_ids[slots] | has_bias | is_early,
            repetition_penalty=table.repetition_penalty[slots],
            presence_penalty=table.presence_penalty[slots],
            frequency_penalty=table.frequency_penalty[slots],
            tokens=table.tokens,
            slots=slots,
            num_prompt=num_prompt,
            num_known=table.num_known_ids[slots] + places if self._paged is None else num_tokens,
            bias_starts=_starts(biases, len(slots)),
            bias_ids=np.fromiter(chain.from_iterable(biases.values()), np.int64),
            bias=np.fromiter((b for one in biases.values() for b in one.values()), np.float32),
            ban_starts=_starts(bans, len(slots)),
            ban_ids=np.fromiter(chain.from_iterable(bans.values()), np.int64),
            mask_rows=np.full(len(slots), -1, np.int64),
            masks=NO_MASKS,
            paged_ids=self._paged,
        )


def with_masks(metadata: SamplingMetadata, masks: Masks) -> SamplingMetadata:
    """Return the metadata with the filled masks of its rows.

    A stop token is allowed early if a mask allows no other token.
    """
    is_masked = masks.of_rows >= 0
    if not is_masked.any():
        return metadata
    starts, ids = metadata.ban_starts, metadata.ban_ids
    lifted = [
        row
        for row in np.flatnonzero(is_masked & (np.diff(starts) > 0)).tolist()
        if not masks.may_be_none_of(row, ids[starts[row] : starts[row + 1]].tolist())
    ]
    if lifted:
        counts = np.diff(starts)
        ids = ids[~np.isin(np.repeat(np.arange(len(counts)), counts), lifted)]
        counts[lifted] = 0
        starts = np.concatenate([[0], np.cumsum(counts)])
    return metadata._replace(
        has_processors=metadata.has_processors | is_masked,
        ban_starts=starts,
        ban_ids=ids,
        mask_rows=masks.of_rows,
        masks=masks.words,
    )


def _starts(of_rows: Mapping[int, Sized], num_rows: int) -> NDArray[np.int64]:
    """Return the start of each row's entries, laid end to end, and the end of all."""
    starts = np.zeros(num_rows + 1, np.int64)
    for row, entries in of_rows.items():
        starts[row + 1] = len(entries)
    return starts.cumsum()
