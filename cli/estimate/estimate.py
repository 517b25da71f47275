"""Estimate of a run: lines, tokens, shared work, time and cost, before anything runs."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tidemill.engine.model.device import device_name
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.plan.line_index import UNKNOWN, LineIndex
from tidemill.engine.plan.plan import Plan
from tidemill.engine.plan.token_costs import TokenCosts
from tidemill.engine.storage.hub import find_folder
from tidemill.engine.tasks import find_task
from tidemill.engine.tasks.generation import GenerationTask, endpoints_without_weights
from tidemill.protocol.contract import EngineError
from tidemill.protocol.requests import check_request
from tidemill.protocol.routes import ENDPOINTS

from ..console.errors import Refused
from ..console.terminal import amount
from ..engine.engine import chat_template, engine_config, served_names
from ..files.input_check import InputReport
from ..run.inputs import check_input, check_names, open_input
from ..run.run_options import RunOptions
from .prompts import MAX_TOKENIZED, PromptTokens, count_prompt_tokens
from .sample import run_sample, spread_lines


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
    `num_tokenized` lines stand for all, `num_sampled` were run.
    """

    num_lines: int
    num_failing: int
    reasons: tuple[str, ...]
    num_repeats: int
    num_unlimited: int
    kinds: tuple[Kind, ...]
    num_sampled: int = 0
    num_tokenized: int | None = None
    prompt_tokens: int | None = None
    quantiles: Quantiles | None = None
    shared_tokens: int | None = None
    most_output_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None
    cost: float | None = None

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
        report = check_input(options, requests, served_names(options), config, index)
        routes = endpoints_of(config) or ENDPOINTS
        tokens = PromptTokens()
        try:
            device = device_name(config)
            if isinstance(find_task(find_folder(config.model), config), GenerationTask):
                tokens = count_prompt_tokens(
                    spread_lines(requests, index, MAX_TOKENIZED),
                    endpoints_without_weights(config, template),
                    lambda url, body: check_request(url, body, report.served_names, routes),
                    options.defaults,
                )
        except EngineError as exc:
            raise Refused(str(exc)) from exc
        plan = Plan(index, tokens.refused.__contains__)
        sample = []
        if num_sampled and tokens.counts:
            sample = run_sample(options, requests, index, num_sampled, tokens.refused)
        for place, output_tokens in sample:
            plan.lengths.add(place, output_tokens)
        found = _estimate_lines(report, plan, tokens, index)
        if not tokens.counts:
            return found
        costs = TokenCosts.recall(config.model, device)
        found = replace(found, num_sampled=len(sample))
        return _estimate_tokens(found, plan, tokens, costs, options.price_per_hour)


def _estimate_lines(
    report: InputReport, plan: Plan, tokens: PromptTokens, index: LineIndex
) -> Estimate:
    """Return what is known of the lines alone."""
    num_failing = report.num_bad + report.failing.count
    num_failing += round(tokens.failing.count * report.num_rows / max(1, tokens.num_lines))
    reasons = [*report.failing.sentences(report.unit), *tokens.failing.sentences(report.unit)]
    if report.num_bad:
        reasons.insert(0, f"  {amount(report.num_bad, f'malformed {report.unit}')}")
    return Estimate(
        num_lines=report.num_rows,
        num_failing=min(num_failing, report.num_rows),
        reasons=tuple(reasons),
        num_repeats=int(plan.is_repeat.sum()),
        num_unlimited=int((index.records["max_tokens"] == UNKNOWN).sum()),
        kinds=tuple(Kind(*kind, count) for kind, count in report.kinds.most_common()),
    )


def _estimate_tokens(
    found: Estimate,
    plan: Plan,
    tokens: PromptTokens,
    costs: TokenCosts | None,
    price_per_hour: float | None,
) -> Estimate:
    """Return an estimate with its tokens, and what they cost."""
    counts, scale = np.array(tokens.counts), found.num_lines / tokens.num_lines
    own = plan.num_own_bytes / max(1, plan.total_prompt_bytes)
    output = min(plan.output_tokens_left(), tokens.most_output_tokens * scale)
    prompt = float(counts.sum() * scale)
    seconds = None if costs is None else costs.load + costs.seconds(own * prompt, output)
    quantiles = np.quantile(counts, (0, 0.5, 0.99, 1), method="inverted_cdf").tolist()
    return replace(
        found,
        num_tokenized=tokens.num_lines,
        prompt_tokens=round(prompt),
        quantiles=Quantiles(*quantiles),
        shared_tokens=round((1 - own) * prompt),
        most_output_tokens=round(tokens.most_output_tokens * scale),
        output_tokens=round(output),
        seconds=seconds,
        cost=None if seconds is None or price_per_hour is None else seconds / 3600 * price_per_hour,
    )
