"""Token choices that sequences request: computed at launch, stored once they have arrived."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.sampling import ROWS_AT_ONCE, mask_bias
from ..kernels.step import to_device
from ..scheduling.step_plan import StepPlan
from ..scheduling.table import SequenceTable
from ..scheduling.token_choices import FORCED, MAX_ALTERNATIVES, TokenChoice, choice_among
from .sampler import Masks

_ALL = np.uint32(0xFFFFFFFF)
_BITS = 32


class StepConfidence:
    """Token choices of one step's sampled tokens; its masks are filled, and stay unchanged."""

    def __init__(self, plan: StepPlan, table: SequenceTable, masks: Masks, vocabulary: int) -> None:
        slots = plan.sampled
        # Sequences that have ended since their step was launched are skipped.
        self._rows = np.flatnonzero(table.reads_confidence[slots] & table.is_running[slots])
        self._records = [table.sequence(slot).token_choices for slot in slots[self._rows].tolist()]
        mask_rows = masks.of_rows[self._rows]
        self._words = np.full((len(self._rows), masks.words.shape[1]), _ALL, np.uint32)
        self._words[mask_rows >= 0] = masks.words[mask_rows[mask_rows >= 0]]
        counts = np.bitwise_count(self._words).sum(axis=1, dtype=np.int64)
        self._is_forced = counts <= 1
        self._few = np.flatnonzero((counts > 1) & (counts <= MAX_ALTERNATIVES))  # of self._rows
        self._many = np.flatnonzero(counts > MAX_ALTERNATIVES)
        self._owners, self._ids = _allowed_tokens(self._words[self._few], vocabulary)

    @torch.inference_mode()
    def compute(self, logits: Tensor, sampled_ids: Tensor) -> list[Tensor]:
        """Return what `keep` needs: logits of few allowed tokens, logprobs among many of them.

        `logits [N, V]` and `sampled_ids [N]` are those of the step's sampled tokens.
        """
        rows = to_device(self._rows[self._few][self._owners], logits.device)
        few = logits[rows, to_device(self._ids, logits.device)].float()
        blocks = [few[:0]]
        for start in range(0, len(self._many), ROWS_AT_ONCE):
            block = self._many[start : start + ROWS_AT_ONCE]
            index = to_device(self._rows[block], logits.device)
            words = to_device(self._words[block].view(np.int32), logits.device)
            wide = logits[index].float()
            wide += mask_bias(words, wide.shape[1])
            chosen = wide.gather(1, sampled_ids[index, None]).squeeze(1)
            blocks.append(chosen - wide.logsumexp(dim=-1))
        return [few, torch.cat(blocks)]

    def keep(
        self,
        token_ids: NDArray[np.int64],
        few: NDArray[Any],
        many: NDArray[Any],
        taken: NDArray[np.bool_],
    ) -> None:
        """Store the results of `compute` in sequences; `taken` marks sampled tokens."""
        choices = [FORCED] * len(self._rows)
        starts = np.searchsorted(self._owners, np.arange(len(self._few) + 1)).tolist()
        for place, row in enumerate(self._few.tolist()):
            if taken[self._rows[row]]:
                own = slice(starts[place], starts[place + 1])
                token_id = int(token_ids[self._rows[row]])
                choices[row] = choice_among(token_id, self._ids[own], few[own])
        for row, logprob in zip(self._many.tolist(), many.tolist(), strict=True):
            choices[row] = TokenChoice(logprob)
        for record, choice, row in zip(self._records, choices, self._rows.tolist(), strict=True):
            if taken[row]:
                record.append(choice)


def _allowed_tokens(
    words: NDArray[np.uint32], vocabulary: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens that masks `[M, words]` allow, and their rows, in ascending order."""
    rows, columns = np.nonzero(words)
    bits = np.unpackbits(words[rows, columns].view(np.uint8), bitorder="little")
    places, bit = np.nonzero(bits.reshape(-1, _BITS))
    ids = columns[places] * _BITS + bit
    is_token = ids < vocabulary
    return rows[places][is_token], ids[is_token]
