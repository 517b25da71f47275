"""From a step's logits to its tokens: penalties, bias, greedy or random choice, log-probabilities.

Rows that are greedy and unshaped, the common case offline, take one pass over the logits in the
model's dtype. Only the others are widened to fp32, a few rows at a time. Randomness is keyed by
(seed, number of tokens generated so far), so a row does not depend on its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import sampling
from engine.scheduling.scheduler import StepPlan
from engine.scheduling.sequence import SequenceRequest, TokenLogprob
from engine.scheduling.table import SequenceTable

ROWS_AT_ONCE = 32


class Sampled(NamedTuple):
    """`token_ids [N]`; `is_broken [N]` marks rows whose logits were not finite."""

    token_ids: NDArray[np.int64]
    is_broken: NDArray[np.bool_]


class Sampler:
    """Chooses tokens for slots of one table."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    @torch.inference_mode()
    def choose(self, slots: NDArray[np.int64], logits: Tensor) -> Sampled:
        """Choose one token for each slot from `logits [N, V]`, whose row i is slot `slots[i]`'s."""
        table = self._table
        plain = (table.temperature[slots] == 0) & ~table.is_shaped[slots]
        token_ids = np.zeros(len(slots), np.int64)
        best = np.zeros(len(slots), np.float64)
        self._choose_plain(np.flatnonzero(plain), logits, token_ids, best)
        others = np.flatnonzero(~plain)
        for start in range(0, len(others), ROWS_AT_ONCE):
            rows = others[start : start + ROWS_AT_ONCE]
            self._choose_block(rows, slots[rows], logits, token_ids, best)
        return Sampled(token_ids, ~np.isfinite(best))

    @torch.inference_mode()
    def score(
        self, logits: Tensor, token_ids: NDArray[np.int64], tops: NDArray[np.int64]
    ) -> list[TokenLogprob]:
        """Score `token_ids [N]` under raw `logits [N, V]`, row i with its `tops[i]` likeliest."""
        results: list[TokenLogprob] = []
        for start in range(0, len(token_ids), ROWS_AT_ONCE):
            block = slice(start, start + ROWS_AT_ONCE)
            chosen = torch.from_numpy(token_ids[block]).to(logits.device)
            top = int(tops[block].max())
            score, values, ids = sampling.log_probabilities(logits[block], chosen, top)
            likeliest = (
                [[]] * len(chosen)
                if values is None or ids is None
                else [
                    list(zip(row, row_values, strict=True))
                    for row, row_values in zip(ids.tolist(), values.tolist(), strict=True)
                ]
            )
            results.extend(
                TokenLogprob(token, logprob, tuple(best[:wanted]))
                for token, logprob, best, wanted in zip(
                    chosen.tolist(), score.tolist(), likeliest, tops[block].tolist(), strict=True
                )
            )
        return results

    def keep_scores(self, plan: StepPlan, sampled: Sampled, logits: Tensor) -> None:
        """Give each sequence of a step the log-probabilities that it asked for.

        Those of the tokens that were just chosen, and those of the prompt's own; `logits [N, V]`
        are all of the step.
        """
        table = self._table
        wanted = np.flatnonzero(table.logprobs[plan.sampled] >= 0)
        if len(wanted):
            slots = plan.sampled[wanted]
            rows = logits[torch.from_numpy(plan.sampled_rows[wanted])]
            scores = self.score(rows, sampled.token_ids[wanted], table.logprobs[slots])
            for slot, score in zip(slots.tolist(), scores, strict=True):
                table.sequence(slot).logprobs.append(score)
        ends = np.cumsum(plan.num_logits)
        for span in np.flatnonzero(table.prompt_logprobs[plan.slots] >= 0).tolist():
            slot, start, stop = (int(a[span]) for a in (plan.slots, plan.starts, plan.stops))
            sequence = table.sequence(slot)
            prompt = table.num_prompt_tokens[slot]
            # Row i scores token start+i+1; the last row of the prompt scores the first new token.
            following = table.tokens[slot, start + 1 : min(stop + 1, prompt)]
            known = len(sequence.prompt_logprobs) - 1  # nonzero after a preemption
            fresh = following[max(0, known - start) :].astype(np.int64)
            if not len(fresh):
                continue
            end = ends[span] - plan.num_logits[span] + len(following)
            tops = np.full(len(fresh), sequence.request.prompt_logprobs or 0)
            scores = self.score(logits[end - len(fresh) : end], fresh, tops)
            sequence.prompt_logprobs.extend(scores)

    def _choose_plain(
        self,
        rows: NDArray[np.int64],
        logits: Tensor,
        token_ids: NDArray[np.int64],
        best: NDArray[np.float64],
    ) -> None:
        if not len(rows):
            return
        picked = logits if len(rows) == len(token_ids) else logits[torch.from_numpy(rows)]
        ids, values = sampling.choose_greedy(picked)
        token_ids[rows] = ids.cpu().numpy()
        best[rows] = values.double().cpu().numpy()

    def _choose_block(
        self,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        logits: Tensor,
        token_ids: NDArray[np.int64],
        best: NDArray[np.float64],
    ) -> None:
        table = self._table
        device = logits.device
        wide = logits[torch.from_numpy(rows).to(device)].float()
        best[rows] = wide.amax(dim=-1).double().cpu().numpy()
        for row, slot in enumerate(slots.tolist()):
            if table.is_shaped[slot]:
                self._shape(wide[row], slot)
        greedy = table.temperature[slots] == 0
        chosen = np.zeros(len(rows), np.int64)
        if greedy.any():
            chosen = sampling.choose_greedy(wide)[0].cpu().numpy()
        if not greedy.all():
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
            chosen = np.where(greedy, chosen, drawn.cpu().numpy())
        token_ids[rows] = chosen

    def _shape(self, row: Tensor, slot: int) -> None:
        """Apply the sequence's penalties, bias and bans to its `row [V]` in place."""
        request = self._table.sequence(slot).request
        generated = self._table.generated(slot)
        _penalise(row, request, self._table.tokens[slot, : self._table.num_tokens[slot]], generated)
        bias = request.sampling.logit_bias
        if bias:
            ids = torch.tensor(list(bias), device=row.device)
            row[ids] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
        if len(generated) < request.min_tokens:
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
