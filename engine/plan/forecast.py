"""Forecast of a run's end: from the tokens that are left, by kind, and what tokens have cost."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from .plan import Plan
from .token_costs import TokenCosts

_PREFILL_SHARE: Final = 1 / 8
"""Cost of a prefilled token in decoded ones, while too little has been measured."""

_PRIOR_WEIGHT: Final = 0.05
_HALF_LIFE_SECONDS: Final = 60.0
_TELLING_SECONDS: Final = 5.0
_TOKENS_A_BYTE: Final = 0.25
"""Of prompts, while no row has finished."""


class TokensDone(NamedTuple):
    """Totals of a run: tokens prefilled and decoded, and those of finished rows.

    `row_prompt_tokens` are of all rows, `row_output_tokens` of those that are no repeats;
    `num_waiting` lines have not begun.
    """

    prefilled: int = 0
    decoded: int = 0
    row_prompt_tokens: int = 0
    row_output_tokens: int = 0
    num_waiting: int = 0


class Forecast:
    """Forecasts the seconds left of a plan. `update` is called every few seconds.

    Seconds are fitted to prefilled and decoded tokens, recent ones first, so that a file whose
    prompts come before its long answers is not taken for one of either alone.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.num_seconds = 0.0
        self._done = TokensDone()
        self._products = np.zeros((2, 2))
        self._times = np.zeros(2)

    def update(self, seconds: float, done: TokensDone) -> None:
        """Note how far the run is after so many seconds."""
        elapsed, before = seconds - self.num_seconds, self._done
        if elapsed <= 0:
            return
        prefilled = done.prefilled - before.prefilled
        tokens = np.array([prefilled, done.decoded - before.decoded], np.float64)
        decay = 0.5 ** (elapsed / _HALF_LIFE_SECONDS)
        # By the second: a long interval weighs as much as many short ones.
        self._products = decay * self._products + np.outer(tokens, tokens) / elapsed
        self._times = decay * self._times + tokens
        self.num_seconds, self._done = seconds, done

    def seconds_left(self) -> float | None:
        """Return the seconds until the last row; None while too little is done to know."""
        if self.num_seconds < _TELLING_SECONDS:
            return None
        costs, done = self.costs(), self._done
        # Of the lines that run, some tokens are there.
        begun = done.decoded - done.row_output_tokens
        decodes = max(0.0, self.plan.output_tokens_left() - begun)
        return None if costs is None else costs.seconds(self._prefills_left(), decodes)

    def costs(self) -> TokenCosts | None:
        """Return what tokens take by least squares, none below 0; None while none were computed."""
        scale = float(np.trace(self._products))
        if scale <= 0:
            return None
        # Where both kinds grew alike nothing tells them apart: their costs are then as usual.
        prior = np.array([1.0, -_PREFILL_SHARE])
        products = self._products + _PRIOR_WEIGHT * scale * np.outer(prior, prior)
        costs, *_ = np.linalg.lstsq(products, self._times, rcond=None)
        if costs.min() < 0:
            kind = int(costs.argmax())
            costs[1 - kind] = 0.0
            costs[kind] = self._times[kind] / max(1e-9, self._products[kind, kind])
        return TokenCosts(*costs.tolist())

    def _prefills_left(self) -> float:
        plan, done, tokens_a_byte = self.plan, self._done, _TOKENS_A_BYTE
        if done.row_prompt_tokens:
            tokens_a_byte = done.row_prompt_tokens / plan.finished_prompt_bytes
        left = plan.num_own_bytes * tokens_a_byte - done.prefilled
        if left < 0:  # what lines share is evicted, and will be
            num_begun = max(1, plan.num_lines - done.num_waiting)
            left = done.prefilled * done.num_waiting / num_begun
        return float(left)
