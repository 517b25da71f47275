"""Log-probabilities that sequences request: computed at launch, stored once they have arrived.

They are computed from the model's raw logits, before penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.backends import choose_sampling
from ..kernels.step import to_device
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_budget import MAX_SCORED_ROWS
from ..scheduling.step_plan import StepPlan
from ..scheduling.token_logprobs import HEAD_BYTES, pack_logprobs, pack_pairs
from .step_logits import StepLogits


class _Prompt(NamedTuple):
    """Tokens `start : stop` of a prompt, scored by the rows of logits from `first_row`."""

    slot: int
    start: int
    stop: int
    first_row: int


class StepLogprobs:
    """Log-probabilities of one step: for its sampled tokens, then for prompts it computes."""

    def __init__(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._scheduler, self._table = scheduler, scheduler.table
        table = self._table
        self._sampled = np.flatnonzero(table.logprobs[plan.sampled] >= 0)  # of plan.sampled
        self._rows = plan.sampled_rows[self._sampled]
        self._slots = plan.sampled[self._sampled].tolist()
        sequences = [table.sequence(slot) for slot in self._slots]
        self._records = [one.logprobs for one in sequences]
        self._named = [one.request.sampling.logprob_token_ids for one in sequences]
        first_rows = np.cumsum(plan.num_logits) - plan.num_logits
        columns = (plan.slots, plan.stops - plan.num_logits, plan.stops, first_rows)
        # The row of token i scores token i + 1; a prompt's last row scores the first new token.
        self._prompts = [
            _Prompt(slot, start + 1, min(stop + 1, int(table.num_prompt_tokens[slot])), row)
            for slot, start, stop, row in zip(
                *(column[plan.is_scored].tolist() for column in columns), strict=True
            )
        ]

    @torch.inference_mode()
    def compute(self, logits: StepLogits, wanted: Tensor, sampled_ids: Tensor) -> list[Tensor]:
        """Score the requested tokens with the step's `logits` → arrays that `keep` needs.

        `wanted [N, V]` are the logits of `plan.sampled`, `sampled_ids [N]` the sampled ids.
        """
        scored = []
        if self._slots:
            scored += self._score_sampled(logits, wanted, sampled_ids)
        if self._prompts:
            scored += self._score_prompts(logits)
        return scored

    def keep(self, arrived: Sequence[NDArray[Any]], taken: NDArray[np.bool_]) -> None:
        """Store the results of `compute` in running sequences; `taken` marks sampled tokens."""
        num_prompt_arrays = 4 if self._prompts else 0
        num_sampled_arrays = len(arrived) - num_prompt_arrays
        if self._slots:
            self._keep_sampled(*arrived[:num_sampled_arrays], taken=taken[self._sampled])
        if self._prompts:
            self._keep_prompts(*arrived[num_sampled_arrays:])

    def _score_sampled(
        self, all_logits: StepLogits, logits: Tensor, sampled_ids: Tensor
    ) -> list[Tensor]:
        """Return ids and scores of sampled tokens, and of the tokens that requests name."""
        token_ids = sampled_ids[to_device(self._sampled, logits.device)]
        num_top = int(self._table.logprobs[self._slots].max())
        sampling = choose_sampling(logits.dtype, logits.device)
        scores = sampling.compute_logprobs(logits, self._sampled, token_ids, num_top)
        if not any(self._named):
            return [token_ids, *scores, scores.logprobs[:0]]
        owners = np.repeat(np.arange(len(self._slots)), list(map(len, self._named)))
        ids = np.fromiter(chain.from_iterable(self._named), np.int64)
        index, rows, named = (
            to_device(array, logits.device) for array in (owners, self._sampled[owners], ids)
        )
        # Log-probabilities differ by as much as the logits do.
        chosen = logits[rows, token_ids[index]].float()
        own = all_logits.exact(self._rows[owners], ids)
        own = logits[rows, named].float() if own is None else own
        named_logprobs = scores.logprobs[index] + own - chosen
        return [token_ids, *scores, named_logprobs]

    def _score_prompts(self, logits: StepLogits) -> list[Tensor]:
        """Return scores and ranks of prompt tokens, from a tile of logits at a time."""
        table, prompts = self._table, self._prompts
        rows = np.concatenate([one.first_row + np.arange(one.stop - one.start) for one in prompts])
        known = np.concatenate([table.tokens[one.slot, one.start : one.stop] for one in prompts])
        token_ids = to_device(known.astype(np.int64), logits.device)
        num_top = int(table.prompt_logprobs[[one.slot for one in prompts]].max())
        tiles = []
        for start in range(0, len(rows), MAX_SCORED_ROWS):
            tile = slice(start, start + MAX_SCORED_ROWS)
            tile_logits = logits.rows(rows[tile])
            sampling = choose_sampling(tile_logits.dtype, tile_logits.device)
            places = np.arange(len(tile_logits))
            scores = sampling.compute_logprobs(tile_logits, places, token_ids[tile], num_top)
            tiles.append([*scores, sampling.compute_ranks(tile_logits, token_ids[tile])])
        return [torch.cat(parts) for parts in zip(*tiles, strict=True)]

    def _keep_sampled(
        self,
        token_ids: NDArray[Any],
        logprobs: NDArray[Any],
        top_logprobs: NDArray[Any],
        top_ids: NDArray[Any],
        named_logprobs: NDArray[Any],
        *,
        taken: NDArray[np.bool_],
    ) -> None:
        packed = pack_logprobs(token_ids, logprobs, top_ids, top_logprobs)
        records, size = packed.tobytes(), packed.shape[1]
        firsts, pairs = range(0, len(records), size), self._pack_named(named_logprobs)
        for record, named, first, is_taken in zip(
            self._records, pairs, firsts, taken.tolist(), strict=True
        ):
            if is_taken:
                own = HEAD_BYTES if named else record.record_bytes
                record.append(records[first : first + own] + named)

    def _pack_named(self, named_logprobs: NDArray[Any]) -> list[bytes]:
        """Return the pairs of each row's named tokens, the best first."""
        if not len(named_logprobs):
            return [b""] * len(self._named)
        counts = np.array(list(map(len, self._named)))
        ids, ends = np.fromiter(chain.from_iterable(self._named), np.int64), np.cumsum(counts)
        order = np.lexsort((-named_logprobs, np.repeat(np.arange(len(counts)), counts)))
        pairs = pack_pairs(ids[order], named_logprobs[order])
        return [pairs[end - count : end].tobytes() for count, end in zip(counts, ends, strict=True)]

    def _keep_prompts(
        self,
        logprobs: NDArray[Any],
        top_logprobs: NDArray[Any],
        top_ids: NDArray[Any],
        ranks: NDArray[Any],
    ) -> None:
        table, first = self._table, 0
        for slot, start, stop, _ in self._prompts:
            own = slice(first, first + stop - start)
            first = own.stop
            if not table.is_running[slot]:
                continue
            sequence = table.sequence(slot)
            record = sequence.prompt_logprobs
            packed = pack_logprobs(
                sequence.prompt[start:stop],
                logprobs[own],
                top_ids[own],
                top_logprobs[own],
                ranks[own],
            )
            record.truncate(start)  # after a preemption some are stored already, and scored again
            record.append(packed[:, : record.record_bytes].tobytes())
            self._scheduler.keep_logprobs(sequence, start)
