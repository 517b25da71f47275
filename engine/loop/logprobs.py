"""Log-probabilities that sequences ask for: computed at launch, kept once they have arrived.

They are of the model's raw logits, before penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.backends import choose_sampling
from ..kernels.step import to_device
from ..scheduling.sequence import TokenLogprob
from ..scheduling.step_plan import StepPlan
from ..scheduling.table import SequenceTable


class _Prompt(NamedTuple):
    """Tokens `start : stop` of a prompt, scored by as many rows of logits from `first_row` on."""

    slot: int
    start: int
    stop: int
    first_row: int


class StepLogprobs:
    """Log-probabilities of one step: of the tokens that it samples, then of prompts it computes."""

    def __init__(self, plan: StepPlan, table: SequenceTable) -> None:
        self._table = table
        self._sampled = np.flatnonzero(table.logprobs[plan.sampled] >= 0)  # of plan.sampled
        self._slots = plan.sampled[self._sampled].tolist()
        self._rows = plan.sampled_rows[self._sampled]
        self._named = [
            table.sequence(slot).request.sampling.logprob_token_ids for slot in self._slots
        ]
        first_rows = np.cumsum(plan.num_logits) - plan.num_logits
        columns = (plan.slots, plan.starts, plan.stops, first_rows)
        # Row i of a span scores its token i+1; the last row of a prompt scores the first new token.
        self._prompts = [
            _Prompt(slot, start + 1, min(stop + 1, int(table.num_prompt_tokens[slot])), row)
            for slot, start, stop, row in zip(
                *(column[plan.is_scored].tolist() for column in columns), strict=True
            )
        ]

    @torch.inference_mode()
    def compute(self, logits: Tensor, sampled_ids: Tensor) -> tuple[Tensor, ...]:
        """Score by the step's `logits [N, V]` what it owes → what `keep` must have on the host.

        `sampled_ids` are those of `plan.sampled`.
        """
        table, prompts = self._table, self._prompts
        if not self._slots and not prompts:
            return ()
        rows = [self._rows, *(one.first_row + np.arange(one.stop - one.start) for one in prompts)]
        known = [table.tokens[one.slot, one.start : one.stop].astype(np.int64) for one in prompts]
        token_ids = torch.cat(
            [
                sampled_ids[to_device(self._sampled, logits.device)],
                *(to_device(ids, logits.device) for ids in known),
            ]
        )
        num_top = max(
            *table.logprobs[self._slots].tolist(),
            *(int(table.prompt_logprobs[one.slot]) for one in prompts),
            0,
        )
        sampling = choose_sampling(logits.dtype, logits.device)
        scores = sampling.compute_logprobs(logits, np.concatenate(rows), token_ids, num_top)
        return token_ids, *scores, self._score_named(logits, token_ids, scores.logprobs)

    def _score_named(self, logits: Tensor, token_ids: Tensor, logprobs: Tensor) -> Tensor:
        """Return the log-probabilities of tokens that requests name, after what was sampled.

        They are as far from those as their logits are.
        """
        owners = np.repeat(np.arange(len(self._slots)), list(map(len, self._named)))
        ids = np.fromiter(chain.from_iterable(self._named), np.int64)
        index, rows, named = (
            to_device(array, logits.device) for array in (owners, self._rows[owners], ids)
        )
        chosen = logits[rows, token_ids[index]].float()
        return logprobs[index] + logits[rows, named].float() - chosen

    def keep(self, arrived: Sequence[NDArray[Any]], taken: NDArray[np.bool_]) -> None:
        """Give sequences that still run what `compute` came to; `taken` marks sampled tokens."""
        table = self._table
        if not arrived:
            return
        *columns, of_named = (column.tolist() for column in arrived)
        rows, values = zip(*columns, strict=True), iter(of_named)
        are_taken = taken[self._sampled].tolist()
        for slot, named, is_taken in zip(self._slots, self._named, are_taken, strict=True):
            entry = _entry(next(rows), int(table.logprobs[slot]))
            if named:
                entry = _of_named(entry, named, islice(values, len(named)))
            if is_taken:
                table.sequence(slot).logprobs.append(entry)
        for slot, start, stop, _ in self._prompts:
            num_top = int(table.prompt_logprobs[slot])
            entries = [_entry(row, num_top) for row in islice(rows, stop - start)]
            if table.is_running[slot]:
                # After a preemption some are there already, and come again.
                table.sequence(slot).prompt_logprobs[start:] = entries


def _of_named(entry: TokenLogprob, named: Sequence[int], values: Iterable[float]) -> TokenLogprob:
    pairs = sorted(zip(named, values, strict=True), key=lambda pair: -pair[1])
    return TokenLogprob(entry.token_id, entry.logprob, tuple(pairs))


def _entry(row: tuple[Any, ...], num_top: int) -> TokenLogprob:
    token_id, logprob, top_logprobs, top_ids = row
    return TokenLogprob(
        token_id, logprob, tuple(zip(top_ids[:num_top], top_logprobs[:num_top], strict=True))
    )
