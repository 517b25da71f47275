"""Estimate of a run: lines, tokens, shared work, time and cost, before anything runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import BaseModel
from pydantic_core import from_json

from tidemill.batch.file.expected_tokens import max_output_tokens
from tidemill.batch.file.lines import LineError, parse_line
from tidemill.batch.file.unknown_parameters import UnknownParameter
from tidemill.engine.endpoints.decisions.next_token import num_distinct_tokens
from tidemill.engine.endpoints.dispatcher import EndpointTable
from tidemill.engine.endpoints.endpoint import Endpoint, RequestMetadata
from tidemill.engine.model.config.device import (
    StepLimits,
    choose_device,
    device_name,
    step_limits,
)
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.speculation.cost_model import CostModel, Work
from tidemill.engine.storage.hub import find_folder
from tidemill.engine.structured_output.constraint_check import ConstraintCheck
from tidemill.engine.tasks import find_task
from tidemill.engine.tasks.generation import GenerationTask, endpoints_without_weights
from tidemill.protocol.contract import EngineError
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import has_decision_images
from tidemill.protocol.messages import has_media
from tidemill.protocol.requests import check_request
from tidemill.protocol.routes import DECISIONS, ENDPOINTS, SYSTEM_ONE

from ..arguments.defaults import Defaults
from ..console.error_summary import ErrorSummary
from ..console.errors import Refused, Stopped
from ..engine.engine import chat_template, engine_config, load_engine, served_names
from ..files.input_check import InputReport
from ..files.input_file import InputFile, PlacedLine
from ..plan.line_index import UNKNOWN, LineIndex
from ..plan.plan import Plan
from ..run.inputs import check_input, check_names, open_input
from ..run.job import run_job
from ..run.reuse import open_reuse
from ..run.run_options import RunOptions
from .sampled_accuracy import SampledRow, sampled_accuracy

_SIGNALS = 128  # a run stopped by a signal exits with this plus the signal's number


def spread_lines(
    requests: InputFile, index: LineIndex, most: int, refused: Collection[int] = ()
) -> Iterator[PlacedLine]:
    """Yield up to `most` lines, spread evenly over the file, except `refused` places."""
    places = np.setdiff1d(np.arange(len(index)), [*refused])
    chosen = np.linspace(0, len(places) - 1, min(len(places), most)).astype(int)
    return requests.read(index, places[chosen].tolist())


def run_sample(
    options: RunOptions,
    requests: InputFile,
    index: LineIndex,
    num_lines: int,
    refused: Collection[int],
) -> list[SampledRow]:
    """Run a sample of a file's lines, and return the successful rows; their file is removed.

    `refused` places are skipped. The measured costs are recorded as for any run. Raises CliError.
    """
    with tempfile.TemporaryDirectory(dir=options.output_tmp_dir) as folder:
        source, output = Path(folder) / "sample.jsonl", Path(folder) / "rows.jsonl"
        lines = [*spread_lines(requests, index, num_lines, refused)]
        source.write_bytes(b"".join(line.raw.data + b"\n" for line in lines))
        # The lines are rendered requests of the chosen shard.
        sampled = replace(
            options,
            input_file=str(source),
            output_file=str(output),
            on_invalid_line="skip",
            table=None,
            shard=None,
            no_card=True,
            row_calibration={},
        )
        status = run_job(sampled, load=partial(load_engine, weights_cache=options.weights_cache))
        if status > _SIGNALS:
            raise Stopped(status - _SIGNALS)
        rows = [from_json(row) for row in output.read_bytes().splitlines()]
    return [
        SampledRow(line.place, int((body.get("usage") or {}).get("completion_tokens") or 0), row)
        for line, row in zip(lines, rows, strict=True)
        if row["response"] and (body := row["response"]["body"])
        if row["response"]["status_code"] == 200
    ]


MAX_TOKENIZED: Final = 20_000
"""Number of lines of a longer file that are tokenised, evenly spread."""


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens of `num_lines` lines, one count each, and the requests that endpoints reject.

    `most_output_tokens` is the sum of the output limits. `refused` are the places of lines without
    a count; `failing` are those that passed the earlier check.
    """

    num_lines: int = 0
    counts: list[int] = field(default_factory=list)
    most_output_tokens: int = 0
    refused: set[int] = field(default_factory=set)
    failing: ErrorSummary = field(default_factory=ErrorSummary)


def count_prompt_tokens(
    lines: Iterable[PlacedLine],
    endpoints: Sequence[Endpoint[Any, Any, Any]],
    check: Callable[[str, dict[str, Any]], BaseModel],
    defaults: Defaults,
) -> PromptTokens:
    """Prepare requests as a run would, and count the tokens of their prompts.

    Lines for whose URL and body `check` raises `RequestError` are omitted.
    """
    tokens, constraints, table = PromptTokens(), ConstraintCheck(), EndpointTable(endpoints)
    for place, raw in lines:
        tokens.num_lines += 1
        try:
            line = parse_line(raw)
            body = defaults.apply(line.url, line.body)
            request = check(line.url, body)
        except (LineError, RequestError):
            tokens.refused.add(place)
            continue
        try:
            # The number of tokens of images depends on unknown sizes.
            if has_media(body) or ("questions" in body and has_decision_images(body)):
                constraints.check(request)
                continue
            endpoint = table.find(line.url)
            prepared = endpoint.prepare(body, RequestMetadata("", line.request_id, 0))
        except RequestError as exc:
            tokens.failing.add(exc.message, line.number)
            tokens.refused.add(place)
            continue
        num_choices = body.get("n") or 1
        prompts = [request.prompt_ids for request in prepared.requests[::num_choices]]
        is_decision = endpoint.route in (DECISIONS, SYSTEM_ONE)
        tokens.counts.append(
            num_distinct_tokens(prompts) if is_decision else sum(map(len, prompts))
        )
        if max_output_tokens(line.url, body) != 0:
            tokens.most_output_tokens += sum(request.max_tokens for request in prepared.requests)
    return tokens


_PROCESS_SECONDS: Final = 1.2
"""Time to start and to end a command that runs an engine."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of prompt tokens over the lines of a file."""

    least: int
    median: int
    p99: int
    most: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Number of lines with one URL and model."""

    url: str
    model: str
    num_lines: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a run; unknown values are None.

    `num_failing` lines get an error row, for `reasons`; `num_unlimited` set no `max_tokens`.
    `shared_tokens` of the `prompt_tokens` are shared prefixes, found by the prefix cache.
    `num_tokenized` lines are the sample for counting tokens, `num_sampled` were run; neither
    includes the `num_reused` lines, which already have rows. `decisions` has the accuracy of each
    question on the sampled rows with gold answers.
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
    decisions: tuple[Mapping[str, Any], ...] = ()

    @property
    def num_left(self) -> int:
        """Return the number of lines to run."""
        return self.num_lines - self.num_reused

    def fields(self) -> dict[str, Any]:
        """Return the estimate as a JSON object."""
        return asdict(self)


def estimate(options: RunOptions, num_sampled: int = 0) -> Estimate:
    """Return the estimate of a file; raises CliError if a run would refuse it.

    First `num_sampled` lines are run, to measure costs per token and lengths of answers.
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
        routes = endpoints_of(config, template) or ENDPOINTS
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
        if sample:
            places = np.array([row.place for row in sample])
            plan.lengths.add(places, np.array([row.output_tokens for row in sample]))
        found = _estimate_lines(report, plan, tokens, index, len(reused))
        if sample:
            found = replace(found, decisions=sampled_accuracy(options, requests.table, sample))
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
    """Return the estimate from the lines alone, without tokens."""
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
    """Return an estimate with its tokens, and the work of the plan except its steps."""
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
    """Return the expected steps of a plan; prompts are computed before their decode steps."""
    max_num_seqs, max_num_batched_tokens = limits
    first = work.prefilled * min(1.0, max_num_seqs / max(1, found.num_left))
    filled = (work.prefilled + work.decoded) / max_num_batched_tokens
    return max(filled, plan.expected_steps(max_num_seqs) + first / max_num_batched_tokens)


def _estimate_time(
    found: Estimate, work: Work, model: CostModel, price_per_hour: float | None
) -> Estimate:
    """Return an estimate with time and cost, extrapolated from earlier runs."""
    share = (found.output_tokens or 0) / max(1.0, work.decoded)
    work = work._replace(decoded=share * work.decoded, attended=share * work.attended)
    seconds = _PROCESS_SECONDS + model.fixed_seconds + (model.seconds(work) or 0.0)
    cost = None if price_per_hour is None else seconds / 3600 * price_per_hour
    return replace(found, seconds=seconds, cost=cost)
