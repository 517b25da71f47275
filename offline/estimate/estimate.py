"""Estimate of a run: lines, tokens, shared work, time and cost, before anything runs."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from tidemill.batch.file.unknown_parameters import UnknownParameter
from tidemill.engine.model.config.device import (
    StepLimits,
    choose_device,
    device_name,
    step_limits,
)
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.speculation.cost_model import CostModel, Work
from tidemill.engine.storage.hub import find_folder
from tidemill.engine.tasks import find_task
from tidemill.engine.tasks.generation import GenerationTask, endpoints_without_weights
from tidemill.protocol.contract import EngineError
from tidemill.protocol.requests import check_request
from tidemill.protocol.routes import ENDPOINTS

from ..console.errors import Refused
from ..engine.engine import chat_template, engine_config, served_names
from ..files.input_check import InputReport
from ..plan.line_index import UNKNOWN, LineIndex
from ..plan.plan import Plan
from ..run.inputs import check_input, check_names, open_input
from ..run.reuse import open_reuse
from ..run.run_options import RunOptions
from .prompts import MAX_TOKENIZED, PromptTokens, count_prompt_tokens
from .sample import run_sample, spread_lines

_PROCESS_SECONDS: Final = 1.2
"""What it takes to start a command that runs an engine, and to end it."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Tokens of prompts over the lines of a file."""

    least: int
    median: int
    p99: int
    most: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Number of lines of one url and model."""

    url: str
    model: str
    num_lines: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a run; None for what is not known.

    `num_failing` lines get an error row, for `reasons`; `num_unlimited` name no `max_tokens`. Of
    `prompt_tokens` some are `shared` with other prompts, which the prefix cache finds.
    `num_tokenized` lines stand for all, `num_sampled` were run; none of these is among the
    `num_reused`, which have their rows, nor is a token of theirs counted.
    """

    num_lines: int
    num_failing: int
    reasons: tuple[str, ...]
    num_repeats: int
    num_unlimited: int
    kinds: tuple[Kind, ...]
    unknown_parameters: tuple[UnknownParameter, ...] = ()
    num_reused: int = 0
    num_sampled: int = 0
    num_tokenized: int | None = None
    prompt_tokens: int | None = None
    quantiles: Quantiles | None = None
    shared_tokens: int | None = None
    most_output_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None
    cost: float | None = None
    unit: str = "line"

    @property
    def num_left(self) -> int:
        """Lines that are run."""
        return self.num_lines - self.num_reused

    def fields(self) -> dict[str, Any]:
        """Return the estimate as a JSON object."""
        return asdict(self)


def estimate(options: RunOptions, num_sampled: int = 0) -> Estimate:
    """Return the estimate of a file; raises CliError for what a run would refuse.

    So many lines are run first, to learn what tokens cost and how long answers are.
    """
    check_names(options)
    config, template = engine_config(options), chat_template(options)
    with ExitStack() as stack:
        requests = open_input(options, stack)
        index = stack.enter_context(closing(LineIndex(options.output_tmp_dir)))
        names = served_names(options)
        created = requests.source.created
        reuse = open_reuse(options, config, template, names=names, created=created, stack=stack)
        report = check_input(options, requests, names, config, index, reuse=reuse)
        reused = set() if reuse is None else {*reuse.rows.places}
        routes = endpoints_of(config) or ENDPOINTS
        tokens = PromptTokens()
        try:
            device = device_name(config)
            if isinstance(find_task(find_folder(config.model), config), GenerationTask):
                tokens = count_prompt_tokens(
                    spread_lines(requests, index, MAX_TOKENIZED, reused),
                    endpoints_without_weights(config, template),
                    lambda url, body: check_request(url, body, report.served_names, routes),
                    options.defaults,
                )
        except EngineError as exc:
            raise Refused(str(exc)) from exc
        left_out = tokens.refused | reused
        plan = Plan(index, left_out.__contains__)
        sample = []
        if num_sampled and tokens.counts:
            sample = run_sample(options, requests, index, num_sampled, left_out)
        for place, output_tokens in sample:
            plan.lengths.add(place, output_tokens)
        found = _estimate_lines(report, plan, tokens, index, len(reused))
        if not tokens.counts:
            return found
        found, work = _estimate_tokens(replace(found, num_sampled=len(sample)), plan, tokens)
        model = CostModel.recall(config.model, device)
        if model is None:
            return found
        limits = step_limits(config, choose_device(config.device))
        work = work._replace(steps=_expected_steps(found, plan, work, limits))
        return _estimate_time(found, work, model, options.price_per_hour)


def _estimate_lines(
    report: InputReport, plan: Plan, tokens: PromptTokens, index: LineIndex, num_reused: int
) -> Estimate:
    """Return what is known of the lines alone."""
    num_left = report.num_rows - num_reused
    num_failing = report.num_bad + report.failing.count
    num_failing += round(tokens.failing.count * num_left / max(1, tokens.num_lines))
    failing = (report.malformed, report.failing, tokens.failing)
    reasons = [each for some in failing for each in some.sentences(report.unit)]
    return Estimate(
        unit=report.unit,
        num_lines=report.num_rows,
        num_reused=num_reused,
        num_failing=min(num_failing, report.num_rows),
        reasons=tuple(reasons),
        num_repeats=int(plan.is_repeat.sum()),
        num_unlimited=int((index.records["max_tokens"] == UNKNOWN).sum()),
        kinds=tuple(Kind(*kind, count) for kind, count in report.kinds.most_common()),
        unknown_parameters=report.unknown.most_frequent(),
    )


def _estimate_tokens(found: Estimate, plan: Plan, tokens: PromptTokens) -> tuple[Estimate, Work]:
    """Return an estimate with its tokens, and the work of the plan, but for its steps."""
    counts, scale = np.array(tokens.counts), found.num_left / tokens.num_lines
    prompt = float(counts.sum() * scale)
    work = plan.work_left(prompt / max(1, plan.total_prompt_bytes))
    output = min(work.decoded, tokens.most_output_tokens * scale)
    quantiles = np.quantile(counts, (0, 0.5, 0.99, 1), method="inverted_cdf").tolist()
    with_tokens = replace(
        found,
        num_tokenized=tokens.num_lines,
        prompt_tokens=round(prompt),
        quantiles=Quantiles(*quantiles),
        shared_tokens=round(prompt - work.prefilled),
        most_output_tokens=round(tokens.most_output_tokens * scale),
        output_tokens=round(output),
    )
    return with_tokens, work


def _expected_steps(found: Estimate, plan: Plan, work: Work, limits: StepLimits) -> float:
    """Return the steps of a plan: prompts of those that begin are computed before they decode."""
    max_num_seqs, max_num_batched_tokens = limits
    first = work.prefilled * min(1.0, max_num_seqs / max(1, found.num_left))
    filled = (work.prefilled + work.decoded) / max_num_batched_tokens
    return max(filled, plan.expected_steps(max_num_seqs) + first / max_num_batched_tokens)


def _estimate_time(
    found: Estimate, work: Work, model: CostModel, price_per_hour: float | None
) -> Estimate:
    """Return an estimate with its time and its cost, by what work has cost before."""
    share = (found.output_tokens or 0) / max(1.0, work.decoded)
    work = work._replace(decoded=share * work.decoded, attended=share * work.attended)
    seconds = _PROCESS_SECONDS + model.fixed_seconds + (model.seconds(work) or 0.0)
    cost = None if price_per_hour is None else seconds / 3600 * price_per_hour
    return replace(found, seconds=seconds, cost=cost)
