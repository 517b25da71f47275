"""From a step's logits to its tokens: penalties, bias, greedy or random choice.

Rows that are greedy and unshaped, the common case offline, take one pass over the logits in the
model's dtype. Only the others are widened to fp32, a few rows at a time. Randomness is keyed by
(seed, number of tokens generated so far), so a row does not depend on its neighbours. What is
chosen stays on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import sampling
from engine.scheduling.sequence import SequenceRequest
from engine.scheduling.table import SequenceTable

ROWS_AT_ONCE = 32


class Sampled(NamedTuple):
    """`token_ids [N]` int64; `is_broken [N]` marks rows whose logits were not finite."""

    token_ids: Tensor
    is_broken: Tensor


class Sampler:
    """Chooses tokens for slots of one table."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    @torch.inference_mode()
    def choose(self, slots: NDArray[np.int64], logits: Tensor) -> Sampled:
        """Choose one token for each slot from `logits [N, V]`, whose row i is slot `slots[i]`'s."""
        table = self._table
        plain = (table.temperature[slots] == 0) & ~table.is_shaped[slots]
        if plain.all():
            token_ids, best = sampling.choose_greedy(logits)
            return Sampled(token_ids, ~best.isfinite())
        token_ids = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
        best = torch.zeros(len(slots), dtype=torch.float32, device=logits.device)
        if plain.any():
            rows = torch.from_numpy(np.flatnonzero(plain)).to(logits.device)
            token_ids[rows], values = sampling.choose_greedy(logits[rows])
            best[rows] = values.float()
        others = np.flatnonzero(~plain)
        for start in range(0, len(others), ROWS_AT_ONCE):
            block = others[start : start + ROWS_AT_ONCE]
            rows = torch.from_numpy(block).to(logits.device)
            wide = logits[rows].float()
            best[rows] = wide.amax(dim=-1)
            token_ids[rows] = self._choose_block(slots[block], wide)
        return Sampled(token_ids, ~best.isfinite())

    def _choose_block(self, slots: NDArray[np.int64], wide: Tensor) -> Tensor:
        """Choose for a few slots from their fp32 logits `[n, V]`, which are shaped in place."""
        table, device = self._table, wide.device
        for row in np.flatnonzero(table.is_shaped[slots]).tolist():
            self._shape(wide[row], int(slots[row]))
        greedy = table.temperature[slots] == 0
        if greedy.all():
            return sampling.choose_greedy(wide)[0]
        # Greedy rows ride through the random choice at temperature 1 and stay as they are.
        temperature = np.where(greedy, np.float32(1), table.temperature[slots])
        positions = table.num_tokens[slots] - table.num_prompt_tokens[slots]
        drawn = sampling.choose_random(
            wide,
            torch.from_numpy(temperature).to(device),
            torch.from_numpy(table.top_k[slots]).to(device),
            torch.from_numpy(table.top_p[slots]).to(device),
            torch.from_numpy(table.min_p[slots]).to(device),
            torch.from_numpy(sampling.uniform(table.seed[slots], positions)).to(device),
        )
        if not greedy.any():
            return drawn
        is_greedy = torch.from_numpy(greedy).to(device)
        return torch.where(is_greedy, sampling.choose_greedy(wide)[0], drawn)

    def _shape(self, row: Tensor, slot: int) -> None:
        """Apply the sequence's penalties, bias and bans to its `row [V]` in place."""
        table = self._table
        request = table.sequence(slot).request
        if table.reads_ids[slot]:
            tokens = table.tokens[slot, : table.num_known[slot]]
            _penalise(row, request, tokens, table.generated(slot))
        bias = request.sampling.logit_bias
        if bias:
            ids = torch.tensor(list(bias), device=row.device)
            row[ids] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
        if table.num_tokens[slot] - table.num_prompt_tokens[slot] < request.min_tokens:
            row[[i for i in request.stop_token_ids if 0 <= i < len(row)]] = float("-inf")


def _penalise(
    row: Tensor,
    request: SequenceRequest,
    tokens: NDArray[np.int32],
    generated: NDArray[np.int32],
) -> None:
    """Repetition over prompt and output (CTRL, Keskar et al. 2019); the others over the output."""
    sampling_ = request.sampling
    if sampling_.repetition_penalty != 1:
        ids = torch.from_numpy(np.unique(tokens).astype(np.int64)).to(row.device)
        seen = row[ids]
        penalty = sampling_.repetition_penalty
        row[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if (sampling_.presence_penalty or sampling_.frequency_penalty) and len(generated):
        unique, counts = np.unique(generated, return_counts=True)
        ids = torch.from_numpy(unique.astype(np.int64)).to(row.device)
        times = torch.from_numpy(counts).to(row.device, row.dtype)
        row[ids] -= sampling_.presence_penalty + sampling_.frequency_penalty * times
