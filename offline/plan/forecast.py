"""Forecast of a run's end, from the remaining work by kind and the measured cost of work."""

from __future__ import annotations

from typing import Final, NamedTuple

from tidemill.engine.speculation.cost_model import CostModel, Work

from .plan import Plan

_HALF_LIFE_SECONDS: Final = 60.0
_TELLING_SECONDS: Final = 5.0
_TOKENS_A_BYTE: Final = 0.25
"""Assumed for prompts while no row has finished."""


class Done(NamedTuple):
    """Totals of a run: the work of its engine, and the tokens of finished rows.

    `row_prompt_tokens` counts all rows, `row_output_tokens` excludes repeats; `num_waiting` lines
    have not started, `num_running` are decoded at a time.
    """

    work: Work = Work()
    row_prompt_tokens: int = 0
    row_output_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 1


class Forecast:
    """Forecasts the remaining seconds of a plan; `update` is called every few seconds.

    Recent seconds have the most weight, and at first the `remembered` costs of earlier runs.
    `cost_model` weights all seconds of this run equally.
    """

    def __init__(self, plan: Plan, max_num_seqs: int, remembered: CostModel | None = None) -> None:
        self.plan = plan
        self._max_num_seqs = max_num_seqs
        self.num_seconds = 0.0
        self.cost_model = CostModel()
        self._recent = CostModel() if remembered is None else remembered
        self._done, self._num_running = Done(), 1.0

    def update(self, seconds: float, done: Done) -> None:
        """Record the progress of the run after `seconds`."""
        elapsed, work = seconds - self.num_seconds, done.work.minus(self._done.work)
        if elapsed <= 0:
            return
        self._recent.scale(0.5 ** (elapsed / _HALF_LIFE_SECONDS))
        for model in (self._recent, self.cost_model):
            model.add(work, elapsed)
        # A snapshot may show few running lines, because many have just ended.
        self._num_running = max(1.0, done.num_running, work.decoded / max(1.0, work.steps))
        self.num_seconds, self._done = seconds, done

    def seconds_left(self) -> float | None:
        """Return the seconds until the last row; None while there is too little data."""
        if self.num_seconds < _TELLING_SECONDS:
            return None
        return self._recent.seconds(self._work_left())

    def _work_left(self) -> Work:
        done, prefills = self._done.work, self._prefills_left()
        if self._done.row_prompt_tokens and not done.decoded:  # as for embeddings
            return Work(prefills * done.steps / max(1.0, done.prefilled), prefills)
        begun = done.decoded - self._done.row_output_tokens
        num_running = self._done.num_running
        left = self.plan.work_left(self._tokens_a_byte(), begun, num_running)
        expected = self.plan.expected_steps(self._max_num_seqs, begun, num_running) - done.steps
        steps = max(left.decoded / self._num_running, expected)
        return left._replace(steps=steps, prefilled=prefills)

    @property
    def _num_begun(self) -> int:
        """Return the number of lines of the plan that have started."""
        return self.plan.num_lines - self._done.num_waiting

    def _tokens_a_byte(self) -> float:
        plan, done = self.plan, self._done
        if done.row_prompt_tokens:
            return done.row_prompt_tokens / plan.finished_prompt_bytes
        if not self._num_begun or not plan.num_own_bytes:
            return _TOKENS_A_BYTE
        own = done.work.prefilled * plan.num_lines / self._num_begun - plan.num_page_tokens
        return max(0.0, own) / plan.num_own_bytes

    def _prefills_left(self) -> float:
        plan, done = self.plan, self._done
        prefilled = done.work.prefilled
        left = plan.own_tokens(self._tokens_a_byte()) - prefilled
        if left < 0:  # shared prefixes were evicted, and will be again
            left = prefilled * done.num_waiting / max(1, self._num_begun)
        return left
