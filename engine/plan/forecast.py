"""Forecast of a run's end: from the tokens that are left, by kind, and what tokens have cost."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from .plan import Plan

_PREFILL_SHARE: Final = 1 / 8
"""Cost of a prefilled token in decoded ones, while too little has been measured."""

_PRIOR_WEIGHT: Final = 0.05
_HALF_LIFE_SECONDS: Final = 60.0
_TELLING_SECONDS: Final = 5.0


class TokensDone(NamedTuple):
    """Totals of a run: tokens prefilled (cached ones are not) and decoded, and those of rows.

    `row_prompt_tokens` are of all finished rows, `row_output_tokens` of those that are no repeats.
    """

    prefilled: int = 0
    decoded: int = 0
    row_prompt_tokens: int = 0
    row_output_tokens: int = 0


class Forecast:
    """Forecasts the seconds left of a plan. `update` is called every few seconds.

    Seconds are fitted to prefilled and decoded tokens, recent ones first, so that a file whose
    prompts come before its long answers is not taken for one of either alone.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seconds = 0.0
        self._done = TokensDone()
        self._products = np.zeros((2, 2))
        self._times = np.zeros(2)

    def update(self, seconds: float, done: TokensDone) -> None:
        """Note how far the run is after so many seconds."""
        elapsed = seconds - self._seconds
        if elapsed <= 0:
            return
        tokens = np.array(
            [done.prefilled - self._done.prefilled, done.decoded - self._done.decoded], np.float64
        )
        decay = 0.5 ** (elapsed / _HALF_LIFE_SECONDS)
        # By the second: a long interval weighs as many short ones do.
        self._products = decay * self._products + np.outer(tokens, tokens) / elapsed
        self._times = decay * self._times + tokens
        self._seconds, self._done = seconds, done

    def seconds_left(self) -> float | None:
        """Return the seconds until the last row; None while too little is done to know."""
        plan, done = self._plan, self._done
        if self._seconds < _TELLING_SECONDS or not plan.finished_prompt_bytes:
            return None
        tokens_a_byte = done.row_prompt_tokens / plan.finished_prompt_bytes
        prefills = max(0.0, plan.own_bytes.sum() * tokens_a_byte - done.prefilled)
        # Of the lines that run, some tokens are there.
        begun = done.decoded - done.row_output_tokens
        decodes = max(0.0, plan.output_tokens_left() - begun)
        prefill_cost, decode_cost = self._costs()
        return float(prefill_cost * prefills + decode_cost * decodes)

    def _costs(self) -> tuple[float, float]:
        """Return the seconds a prefilled and a decoded token take: least squares, none negative."""
        scale = float(np.trace(self._products))
        if scale <= 0:
            return 0.0, 0.0
        # Where both kinds grew alike nothing tells them apart: their costs are then as usual.
        prior = np.array([1.0, -_PREFILL_SHARE])
        products = self._products + _PRIOR_WEIGHT * scale * np.outer(prior, prior)
        costs, *_ = np.linalg.lstsq(products, self._times, rcond=None)
        if costs.min() >= 0:
            return float(costs[0]), float(costs[1])
        kind = int(costs.argmax())
        alone = float(self._times[kind] / max(1e-9, self._products[kind, kind]))
        return (alone, 0.0) if kind == 0 else (0.0, alone)
