"""From a step's logits to its tokens: what sequences ask for, gathered for the device's functions.

Randomness is keyed by (seed, number of tokens generated so far), so a row does not depend on its
neighbours. What is chosen stays on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.backends import choose_sampling
from engine.kernels.sampling import KeptIds, Rules, Sampled, uniform
from engine.scheduling.table import SequenceTable
from engine.stepping.masks import Masks

NO_MASKS = np.zeros((0, 0), np.uint32)


class Sampler:
    """Chooses tokens for slots of one table, whose ids the device has `kept`, or the table has."""

    def __init__(self, table: SequenceTable, kept: KeptIds | None = None) -> None:
        self._table = table
        self._kept = kept

    @torch.inference_mode()
    def choose(
        self, slots: NDArray[np.int64], logits: Tensor, masks: Masks | None = None
    ) -> Sampled:
        """Choose one token for each slot from `logits [N, V]`, whose row i is slot `slots[i]`'s."""
        rules = self.rules(slots, logits.shape[1], masks)
        return choose_sampling(logits.dtype, logits.device).choose(logits, rules)

    def rules(self, slots: NDArray[np.int64], vocabulary: int, masks: Masks | None = None) -> Rules:
        """Return what these slots' next tokens are chosen by.

        A stop token may come early where a mask allows no other.
        """
        table = self._table
        num_prompt, num_tokens = table.num_prompt_tokens[slots], table.num_tokens[slots]
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
        mask_of = np.full(len(slots), -1, np.int64) if masks is None else masks.of_rows
        with np.errstate(divide="ignore"):
            log_min_p = np.log(table.min_p[slots])
        return Rules(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            log_min_p=log_min_p,
            draws=uniform(table.seed[slots], num_new),
            is_shaped=table.reads_ids[slots] | has_bias | is_early | (mask_of >= 0),
            repetition_penalty=table.repetition_penalty[slots],
            presence_penalty=table.presence_penalty[slots],
            frequency_penalty=table.frequency_penalty[slots],
            tokens=table.tokens,
            slots=slots,
            num_prompt=num_prompt,
            num_known=table.num_known[slots] if self._kept is None else num_tokens,
            bias_starts=_starts(biases, len(slots)),
            bias_ids=np.fromiter(chain.from_iterable(biases.values()), np.int64),
            bias=np.fromiter((b for one in biases.values() for b in one.values()), np.float32),
            ban_starts=_starts(bans, len(slots)),
            ban_ids=np.fromiter(chain.from_iterable(bans.values()), np.int64),
            mask_of=mask_of,
            masks=NO_MASKS if masks is None else masks.words,
            kept=self._kept,
        )


def _starts(of_rows: Mapping[int, Sized], num_rows: int) -> NDArray[np.int64]:
    """Return where each row's entries start among those of all, and where all end."""
    starts = np.zeros(num_rows + 1, np.int64)
    for row, entries in of_rows.items():
        starts[row + 1] = len(entries)
    return starts.cumsum()
