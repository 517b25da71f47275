"""`tidemill models`: reports how a model would run and its memory, before loading it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import interruptible
from tidemill.offline.console.spinner import spinner
from tidemill.offline.console.tables import columns
from tidemill.offline.console.terminal import log, print_output, size_words
from tidemill.offline.engine.engine import chat_template, engine_config, require_engine
from tidemill.offline.engine.options import (
    EngineOptions,
    add_engine_flags,
    engine_fields,
)
from tidemill.offline.engine.weights import s3_addresses

if TYPE_CHECKING:
    from tidemill.engine.inspection import ModelReport
    from tidemill.engine.model.model_plan import ModelPlan

_EPILOG = """\
examples:
  tidemill models Qwen/Qwen3-8B
  tidemill models ./model --device cpu --json
  tidemill models ./model --tensor-parallel-size 4 --max-model-len 8192

exit status:
  0  the model would run
  1  the model would be rejected; the reason is printed
  2  invalid arguments or paths
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `models` to the command line."""
    parser = commands.add_parser(
        "models",
        usage="tidemill models MODEL [--json] [flags]",
        help="show how a model would run, before it is loaded",
        description="Show how a model would run here, how much memory it takes and what is\n"
        "missing, from its config.json, its tokenizer and the headers of its weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Show the report and return the exit status: 1 for a model that would be refused."""
    options = EngineOptions(**engine_fields(arguments))
    if options.model is None:
        raise Refused(
            "no model: pass a folder or a hub ID, such as `tidemill models Qwen/Qwen3-8B`"
        )
    if s3_addresses(options.model, ()):
        raise Refused(
            f"{options.model} is in S3: copy its small files to a folder and pass that, with "
            f"`aws s3 sync --exclude '*.safetensors' {options.model} FOLDER` (the weights then "
            "count as missing)"
        )
    require_engine("tidemill models", options.model)
    report = _inspected(options)
    if arguments.json:
        print_output(json.dumps(fields_of(report), ensure_ascii=False, indent=2))
    else:
        print_output("\n".join(columns(list(rows_of(report)))))
    return 1 if report.is_refused else 0


def _inspected(options: EngineOptions) -> ModelReport:
    config, template = engine_config(options), chat_template(options)
    from tidemill.engine.storage.hub import check_hub
    from tidemill.protocol.contract import EngineError

    def inspect() -> ModelReport:
        from tidemill.engine.inspection import inspect_model

        return inspect_model(config, chat_template=template)

    try:
        if (note := check_hub([config.model])) is not None:
            log(f"note: {note}")
        with spinner(f"reading {config.model}"):
            return interruptible(inspect)
    except EngineError as exc:
        raise Refused(str(exc)) from exc


def fields_of(report: ModelReport) -> dict[str, Any]:
    """Return a report as a JSON object, with null for unknown values."""
    plan = report.plan
    memory = None if plan is None else plan.memory
    return {
        "model": report.model,
        "model_type": report.model_type,
        "gives": report.gives,
        "runs": report.runs,
        "why": report.why,
        "plan_runs": plan and plan.runs,
        "plan_why": plan and plan.why,
        "class_name": plan and plan.class_name,
        "device": plan and plan.device.type,
        "dtype": plan and str(plan.dtype).removeprefix("torch."),
        "quantization": plan and plan.quantization,
        "max_model_len": plan and plan.max_model_len,
        "weight_bytes": memory and memory.weight_bytes,
        "kv_bytes_per_token": memory and memory.kv_bytes_per_token,
        "kv_cache_tokens": memory and memory.kv_cache_tokens,
        "state_bytes_per_sequence": memory and memory.state_bytes_per_sequence,
        "state_rows": memory and memory.state_rows,
        "tensor_parallel_sizes": list(plan.tensor_parallel_sizes) if plan else [],
        "takes_adapters": plan is not None and plan.takes_adapters,
        "takes_images": plan is not None and plan.takes_images,
        "takes_audio": plan is not None and plan.takes_audio,
        "takes_drafts": plan is not None and report.gives == "text" and not report.why_no_drafts,
        "endpoints": list(report.endpoints),
        "quantization_methods": list(report.quantization_methods),
        "tool_call_parser": report.tool_call_parser,
        "reasoning_parser": report.reasoning_parser,
        "missing": list(report.missing),
        "notes": list(plan.notes) if plan else [],
    }


def rows_of(report: ModelReport) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table."""
    kind = "" if report.model_type is None else f" ({report.model_type})"
    yield "model", f"{report.model}{kind}"
    plan = report.plan
    if report.is_refused:
        for fault in report.faults:
            yield "refused", fault
    if plan is not None:
        by = f"by the engine's own network ({plan.class_name})"
        if plan.why is not None:
            by = f"by transformers' {plan.class_name}: {plan.why}"
        yield "would run" if report.is_refused else "runs", by
    yield "gives", report.gives
    if report.endpoints:
        yield "endpoints", ", ".join(report.endpoints)
    if plan is not None:
        yield from _rows_of_plan(plan, report)
    for what in report.missing:
        yield "missing", what
    for note in plan.notes if plan else ():
        yield "note", note


def _rows_of_plan(plan: ModelPlan, report: ModelReport) -> Iterator[tuple[str, str]]:
    dtype = str(plan.dtype).removeprefix("torch.")
    how = dtype if plan.quantization is None else f"{plan.quantization} and {dtype}"
    yield "context", f"{plan.max_model_len:,} tokens"
    if plan.memory is None:
        yield (
            "weights",
            f"{how} on {plan.device.type}; their size is unknown until they are downloaded",
        )
    else:
        yield "weights", f"{size_words(plan.memory.weight_bytes)} as {how} on {plan.device.type}"
        if plan.memory.kv_bytes_per_token:
            room = _room(plan.memory.kv_cache_tokens, "tokens")
            yield "KV cache", f"{plan.memory.kv_bytes_per_token:,} bytes per token; {room}"
        if plan.memory.state_bytes_per_sequence:
            room = _room(plan.memory.state_rows, "sequences and snapshots")
            size = size_words(plan.memory.state_bytes_per_sequence)
            yield "recurrent state", f"{size} per sequence; {room}"
    if report.gives != "text":
        return
    sizes = ", ".join(map(str, plan.tensor_parallel_sizes))
    yield "tensor parallel", sizes or "no"
    yield "adapters", "LoRA" if plan.takes_adapters else "no"
    yield "quantised as", ", ".join(report.quantization_methods) or "no"
    yield "drafts", f"no: {report.why_no_drafts}" if report.why_no_drafts else "n-grams"
    yield "images", "yes" if plan.takes_images else "no"
    yield "recordings", "yes" if plan.takes_audio else "no"
    yield "tool calls", report.tool_call_parser or "unknown format"
    yield "reasoning", report.reasoning_parser or "none found in its template"


def _room(count: int | None, what: str) -> str:
    """Return how many fit in memory next to the weights."""
    if count is None:
        return f"the number of {what} that fit depends on the GPU, and this machine has none"
    return f"{count:,} {what} fit here now" if count else "not enough free memory here now"
