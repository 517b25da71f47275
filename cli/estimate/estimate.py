"""Estimate of a run: lines, tokens, shared work, time and cost, before anything runs."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tidemill.batch.file.lines import MAX_LINE_BYTES
from tidemill.engine.model.device import device_name
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.plan.line_index import LineIndex
from tidemill.engine.plan.plan import Plan
from tidemill.engine.plan.token_costs import TokenCosts
from tidemill.engine.storage.hub import find_folder
from tidemill.engine.tasks import find_task
from tidemill.engine.tasks.generation import GenerationTask, endpoints_without_weights
from tidemill.protocol.contract import EngineError
from tidemill.protocol.requests import check_request
from tidemill.protocol.routes import ENDPOINTS

from ..console.errors import Refused
from ..engine.engine import chat_template, engine_config, served_names
from ..files.input_check import InputReport, check_lines
from ..files.input_file import InputFile
from ..files.source import open_source
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

    `num_failing` lines get an error row, for `reasons`. Of `prompt_tokens` some are `shared` with
    other prompts, which the prefix cache finds. `num_tokenized` lines stand for all.
    """

    num_lines: int
    num_failing: int
    reasons: tuple[str, ...]
    num_repeats: int
    kinds: tuple[Kind, ...] = ()
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
    config, template = engine_config(options), chat_template(options)
    with ExitStack() as stack:
        source = stack.enter_context(
            open_source(options.input_file, tmp_dir=options.output_tmp_dir)
        )
        requests = InputFile.from_source(source, options.max_line_bytes or MAX_LINE_BYTES)
        requests = requests.unpack(options.output_tmp_dir, stack)
        index = stack.enter_context(closing(LineIndex(options.output_tmp_dir)))
        adapters = [module.name for module in config.lora_modules]
        names, routes = served_names(options), endpoints_of(config) or ENDPOINTS
        report = check_lines(
            requests,
            names,
            adapters=adapters,
            endpoints=routes,
            defaults=options.defaults,
            tmp_dir=options.output_tmp_dir,
            index=index,
        )
        tokens = PromptTokens()
        try:
            if isinstance(find_task(find_folder(config.model), config), GenerationTask):
                tokens = count_prompt_tokens(
                    spread_lines(requests, index, MAX_TOKENIZED),
                    endpoints_without_weights(config, template),
                    lambda url, body: check_request(url, body, (*names, *adapters), routes),
                    options.defaults,
                )
        except EngineError as exc:
            raise Refused(str(exc)) from exc
        plan = Plan(index, tokens.refused.__contains__)
        if num_sampled and tokens.counts:
            for place, output_tokens in run_sample(options, requests, index, num_sampled):
                plan.lengths.add(place, output_tokens)
        costs = TokenCosts.recall(config.model, device_name(config))
        return _made(report, plan, tokens, costs, options.price_per_hour)


def _made(
    report: InputReport,
    plan: Plan,
    tokens: PromptTokens,
    costs: TokenCosts | None,
    price_per_hour: float | None,
) -> Estimate:
    num_repeats = int(plan.is_repeat.sum())
    num_failing = report.num_bad + report.failing.count
    reasons = [*report.failing.sentences(report.unit)]
    if report.num_bad:
        reasons.insert(0, f"  {report.num_bad:,} × not a request")
    found = Estimate(report.num_rows, num_failing, tuple(reasons), num_repeats)
    if not tokens.counts:
        return found
    counts, num_tokenized = np.array(tokens.counts), len(tokens.counts) + len(tokens.refused)
    scale = report.num_rows / num_tokenized
    own = plan.num_own_bytes / max(1, plan.total_prompt_bytes)
    output = min(plan.output_tokens_left(), tokens.most_output_tokens * scale)
    prompt = float(counts.sum() * scale)
    seconds = None if costs is None else costs.load + costs.seconds(own * prompt, output)
    cost = None if seconds is None or price_per_hour is None else seconds / 3600 * price_per_hour
    quantiles = np.quantile(counts, (0, 0.5, 0.99, 1)).round().astype(int).tolist()
    return Estimate(
        report.num_rows,
        num_failing + round(tokens.failing.count * scale),
        (*reasons, *tokens.failing.sentences(report.unit)),
        num_repeats,
        tuple(
            Kind(url, model, round(count * scale))
            for (url, model), count in tokens.kinds.most_common()
        ),
        num_tokenized,
        round(prompt),
        Quantiles(*quantiles),
        round((1 - own) * prompt),
        round(tokens.most_output_tokens * scale),
        round(output),
        seconds,
        cost,
    )
