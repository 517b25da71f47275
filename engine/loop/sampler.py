"""From a step's logits to its tokens: what sequences ask for, gathered for the device's functions.

Randomness is keyed by (seed, number of tokens generated so far), so a row does not depend on its
neighbours. What is chosen stays on the device.
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
from ..scheduling.table import SequenceTable

logger = logging.getLogger(__name__)

_MOST_THREADS = 8


@dataclass(slots=True)
class Masks:
    """Token masks of `N` rows: `of_rows` is the row of `words` that each has, -1 for any token.

    `failed` has what went wrong, by row. All of it is there after `wait`.
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
        """Say whether a row may have any other token than these."""
        place = int(self.of_rows[row])
        if place < 0:
            return True
        left = self.words[place].copy()
        for token_id in token_ids:
            left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return bool(left.any())


class MaskThreads:
    """Threads that ask the constraints of one table's sequences what may come next."""

    def __init__(self, table: SequenceTable, vocab_size: int) -> None:
        self._table = table
        self._num_words = -(-vocab_size // 32)
        self._num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, "tidemill-masks")

    def start(self, slots: NDArray[np.int64]) -> Masks:
        """Begin to ask for the sequences in these slots; whoever begins must wait for all."""
        rows = np.flatnonzero(self._table.is_constrained[slots])
        of_rows = np.full(len(slots), -1, np.int64)
        of_rows[rows] = np.arange(len(rows))
        masks = Masks(of_rows, np.empty((len(rows), self._num_words), np.uint32))
        todo = iter(rows.tolist())  # shared: each of its rows comes to one thread
        masks.helpers = tuple(
            self._threads.submit(self._fill, masks, slots, todo)
            for _ in range(min(self._num_threads, len(rows)))
        )
        return masks

    def _fill(self, masks: Masks, slots: NDArray[np.int64], rows: Iterator[int]) -> None:
        for row in rows:
            watch = self._table.sequence(int(slots[row])).constraint_state
            assert watch is not None
            try:
                if not watch.fill(masks.words[masks.of_rows[row]]):
                    masks.of_rows[row] = -1
            except RequestError as error:
                masks.failed[row] = error
            except Exception as exc:
                logger.exception("a constraint failed")
                masks.failed[row] = InternalError(f"The constraint failed: {exc!r}")
            if row in masks.failed:
                masks.of_rows[row] = -1


NO_MASKS = np.zeros((0, 0), np.uint32)


class Sampler:
    """Chooses tokens for slots of one table, whose ids the device has `kept`, or the table has."""

    def __init__(self, table: SequenceTable, kept: PagedTokenIds | None = None) -> None:
        self._table = table
        self._kept = kept
        self._ops: dict[torch.dtype, SamplingOps] = {}  # by the logits' dtype

    @torch.inference_mode()
    def choose(
        self,
        slots: NDArray[np.int64],
        logits: Tensor,
        masks: Masks | None = None,
        places: NDArray[np.int64] | int = 0,
    ) -> Sampled:
        """Choose one token for each slot from `logits [N, V]`, whose row i is slot `slots[i]`'s.

        It follows as many drafts as `places` says, which stand in the table behind what is known.
        """
        metadata = self.metadata(slots, logits.shape[1], masks, places)
        if logits.dtype not in self._ops:
            self._ops[logits.dtype] = choose_sampling(logits.dtype, logits.device)
        return self._ops[logits.dtype].sample(logits, metadata)

    def metadata(
        self,
        slots: NDArray[np.int64],
        vocabulary: int,
        masks: Masks | None = None,
        places: NDArray[np.int64] | int = 0,
    ) -> SamplingMetadata:
        """Return what these slots' next tokens are chosen by.

        A stop token may come early where a mask allows no other.
        """
        table = self._table
        num_prompt, num_tokens = table.num_prompt_tokens[slots], table.num_tokens[slots] + places
        num_new = num_tokens - num_prompt
        is_early, has_bias = num_new < table.min_tokens[slots], table.has_bias[slots]
        biases: dict[int, Mapping[int, float]] = {}
        bans: dict[int, list[int]] = {}
        for row in np.flatnonzero(has_bias).tolist():
            asked = table.sequence(int(slots[row])).request.sampling.logit_bias
            biases[row] = {token: bias for token, bias in asked.items() if 0 <= token < vocabulary}
        for row in np.flatnonzero(is_early).tolist():
            stops = table.sequence(int(slots[row])).request.stop_token_ids
            banned = [token for token in stops if 0 <= token < vocabulary]
            bans[row] = banned if masks is None or masks.may_be_none_of(row, banned) else []
        mask_rows = np.full(len(slots), -1, np.int64) if masks is None else masks.of_rows
        temperature, none = table.temperature[slots], np.zeros(len(slots))
        with np.errstate(divide="ignore"):
            log_min_p = np.log(table.min_p[slots])
        return SamplingMetadata(
            temperature=temperature,
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            log_min_p=log_min_p,
            draws=uniform_draws(table.seed[slots], num_new) if temperature.any() else none,
            has_processors=table.reads_ids[slots] | has_bias | is_early | (mask_rows >= 0),
            repetition_penalty=table.repetition_penalty[slots],
            presence_penalty=table.presence_penalty[slots],
            frequency_penalty=table.frequency_penalty[slots],
            tokens=table.tokens,
            slots=slots,
            num_prompt=num_prompt,
            num_known=table.num_known_ids[slots] + places if self._kept is None else num_tokens,
            bias_starts=_starts(biases, len(slots)),
            bias_ids=np.fromiter(chain.from_iterable(biases.values()), np.int64),
            bias=np.fromiter((b for one in biases.values() for b in one.values()), np.float32),
            ban_starts=_starts(bans, len(slots)),
            ban_ids=np.fromiter(chain.from_iterable(bans.values()), np.int64),
            mask_rows=mask_rows,
            masks=NO_MASKS if masks is None else masks.words,
            paged_ids=self._kept,
        )


def _starts(of_rows: Mapping[int, Sized], num_rows: int) -> NDArray[np.int64]:
    """Return where each row's entries start among those of all, and where all end."""
    starts = np.zeros(num_rows + 1, np.int64)
    for row, entries in of_rows.items():
        starts[row + 1] = len(entries)
    return starts.cumsum()
