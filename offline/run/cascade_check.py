"""Check of a cascade's options and of its second model, before anything is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..console.errors import Refused
from ..console.signals import interruptible
from ..console.terminal import log, size_words
from ..engine.engine import check_model, engine_config
from ..engine.weights import check_weights, s3_addresses
from ..files.paths import STANDARD_STREAM, is_path, is_regular_or_new
from .inputs import check_names
from .run_options import RunOptions

if TYPE_CHECKING:
    from tidemill.engine.config import EngineConfig
    from tidemill.engine.inspection import ModelReport


def check_cascade(options: RunOptions) -> None:
    """Raise Refused for options that a cascade does not support, and for an unsuitable model."""
    assert options.cascade is not None
    check_names(options)
    _check_options(options)
    _check_table(options)
    check_model(options.cascade.model, "--escalate")
    second = engine_config(second_model(options))
    is_chat = options.cascade.by == "chat"
    if not is_chat and _identity(second.model) == _identity(engine_config(options).model):
        raise Refused(
            f"--escalate {options.cascade.model} is the same model as --model: name another one, "
            "or pass --escalate-by chat"
        )
    if s3_addresses(second.model, ()):  # the rest is checked once it is downloaded
        check_weights(second.model)
    else:
        _check_second(second, is_chat=is_chat)


def second_model(options: RunOptions) -> RunOptions:
    """Return the options with the second model, and without those of the first model's files."""
    assert options.cascade is not None
    return replace(
        options,
        model=options.cascade.model,
        cascade=None,
        served_model_names=(),
        any_model=True,
        chat_template=None,
        lora_modules=(),
        hf_overrides=None,
        pooler_config=None,
        mm_processor_kwargs=None,
        tool_call_parser=None,
        reasoning_parser=None,
    )


def _check_options(options: RunOptions) -> None:
    given = {
        "--error-file": options.error_file,
        "--shard": options.shard,
        "--max-seconds": options.max_seconds,
        "--max-cost": options.max_cost,
    }
    if flag := next((flag for flag, value in given.items() if value is not None), None):
        raise Refused(f"--escalate cannot be combined with {flag}: omit one")
    output = str(options.target)
    if not (is_path(output) and is_regular_or_new(Path(output))):
        raise Refused(f"--escalate requires an output file, but the output is {output}: pass -o")
    if options.input_file == STANDARD_STREAM:
        raise Refused("--escalate reads its input twice: pass a file instead of -")


def _check_table(options: RunOptions) -> None:
    """Raise Refused for a table without questions or suitable gold answers."""
    cascade, table = options.cascade, options.table
    assert cascade is not None
    plan = None if table is None else table.recipe.calibration
    if cascade.target_accuracy is not None and (plan is None or not plan.columns):
        raise Refused(
            "--target-accuracy needs rows with known answers: name their column with --gold"
        )
    if table is None:
        return
    if not table.recipe.questions:
        raise Refused("--escalate needs questions to decide: pass --ask")
    if any(question.name == "model" for question in table.recipe.questions):
        raise Refused(
            "the question `model` has the name of the column with the model of each row: rename it"
        )
    odd = next((name for name in ("calibrate", "prior") if name in table.recipe_keys), None)
    if odd is not None or (plan is not None and plan.saved is not None):
        raise Refused(
            f"--escalate cannot be combined with --{odd or 'calibration'}, because each model "
            "would need its own calibration: omit one"
        )


def _check_second(config: EngineConfig, *, is_chat: bool) -> None:
    """Raise Refused for a model that is missing, cannot decide or chat, or does not fit."""
    from tidemill.engine.inspection import NO_TEMPLATE, inspect_model
    from tidemill.engine.model.endpoint_names import endpoints_of
    from tidemill.engine.storage.hub import check_hub
    from tidemill.protocol.contract import EngineError
    from tidemill.protocol.routes import DECISIONS

    def inspect() -> ModelReport:
        return inspect_model(config)

    name = f"--escalate {config.model}"
    try:
        if (note := check_hub([config.model])) is not None:
            log(f"note: {note}")
        report = interruptible(inspect)
    except EngineError as exc:
        raise Refused(f"{name}: {exc}") from exc
    if report.is_refused:
        raise Refused(f"{name} cannot be loaded: {report.why}")
    if DECISIONS.name not in (endpoints_of(config) or (DECISIONS.name,)):
        raise Refused(f"{name} gives {report.gives}, so it cannot decide: name a chat model")
    if is_chat and not (report.gives == "text" and NO_TEMPLATE not in report.missing):
        raise Refused(f"{name} does not chat: name a chat model, or omit --escalate-by")
    memory = None if report.plan is None else report.plan.memory
    if memory is not None and memory.kv_cache_tokens == 0:
        assert report.plan is not None
        device = "GPU" if report.plan.device.type == "cuda" else "machine"
        raise Refused(
            f"{name} does not fit into the free memory of this {device}: its weights take "
            f"{size_words(memory.weight_bytes)}. Name a smaller model, or free memory"
        )


def _identity(model: str) -> str:
    path = Path(model)
    return str(path.resolve()) if path.exists() else model
