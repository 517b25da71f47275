"""Inspection of a model before it is loaded: how it would run, in which memory, what is missing.

It takes the steps of a load that read no weights, in their order, and goes on where one refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from tidemill.protocol.contract import EngineError

from .config import EngineConfig
from .errors import ModelRefused, first_line_of
from .model.config.architecture import Architecture
from .model.config.device import choose_dtype, choose_planned_device, context_length
from .model.config.hf_config import (
    CONFIG,
    QUANTISED,
    STORED_DTYPES,
    UnsupportedConfig,
    parse_hf_config,
    read_hf_config,
)
from .model.config.transformers_fields import notes_on_ignored
from .model.encoders import causal, eager, families
from .model.encoders.architecture import EncoderArchitecture
from .model.encoders.pooling_config import Classifier
from .model.encoders.transformers_model import positions_of_encoder
from .model.model_plan import MemoryPlan, ModelPlan, Runs, find_weights
from .model.planning import plan_model
from .model.speech.loading import TITLE
from .model.speech.whisper_config import read_speech
from .model.weights.checkpoint import find_checkpoint, missing_files
from .model.weights.quantised.quantization_config import supported_methods
from .model.weights.weights import count_stored
from .parsers.registry import NONE, check_parser_names, parser_names
from .storage.hub import find_folder, find_gguf
from .tasks import find_task
from .tasks.generation import load_chat_template
from .tasks.pooling import PoolingTask, read_encoder
from .tasks.speech import SpeechTask
from .text.chat_template import read_chat_template
from .text.vocabulary import Vocabulary, load_vocabulary, recall_vocabulary

Gives = Literal["text", "vectors or scores", "what recordings say"]
ENGLISH_ONLY = "this is an English-only model: it does not support other languages or translations"
NO_TEMPLATE = (
    "a chat template: only text completions work; --chat-template names one for conversations"
)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Report on a model: its `plan`, None where there is none, and the `faults` that refuse it.

    Where only files of weights are missing it has both: the plan tells what they would take.
    `missing` names files and what lacks without them. `quantization_methods` are those that it may
    be published in. The parsers are None where its template shows none.
    """

    model: str
    model_type: str | None
    gives: Gives
    plan: ModelPlan | None
    faults: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    quantization_methods: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Say whether a load would refuse it."""
        return self.plan is None or bool(self.faults)

    @property
    def runs(self) -> Runs | Literal["refused"]:
        """Return what runs it."""
        return "refused" if self.plan is None or self.faults else self.plan.runs

    @property
    def why(self) -> str | None:
        """Return why it is refused, or why transformers runs it."""
        if self.faults:
            return "; ".join(self.faults)
        return None if self.plan is None else self.plan.why


def inspect_model(config: EngineConfig, *, chat_template: str | None = None) -> ModelReport:
    """Return what a load of `config.model` would come to; raises `EngineError` for bad settings.

    `chat_template` is a template's text or the path of a file that holds it.
    """
    check_parser_names(tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser)
    source = None if chat_template is None else read_chat_template(chat_template)
    report = ModelReport(config.model, None, "text", None)
    try:
        hf_config = read_hf_config(config.model)
    except EngineError as exc:
        lacking = (CONFIG,) if _lacks_config(config.model) else ()
        return replace(report, faults=(str(exc),), missing=lacking)
    task = find_task(find_folder(config.model), config)
    make: Callable[[EngineConfig], ModelPlan] = plan_model
    if isinstance(task, PoolingTask):
        report, make = replace(report, gives="vectors or scores"), _plan_encoder
    elif isinstance(task, SpeechTask):
        report, make = replace(report, gives="what recordings say"), _plan_speech
    is_folder = Path(config.model).is_dir() and find_gguf(config.model) is None
    missing = missing_files(Path(config.model)) if is_folder else ()
    report = replace(report, model_type=hf_config.model_type, missing=missing)
    report = _with_plan(report, config, make)
    return _with_vocabulary(report, config, source)


def _lacks_config(model: str) -> bool:
    """Say whether a model has no config.json; a GGUF file that is refused has other faults."""
    try:
        return find_folder(model) is None
    except ModelRefused:
        return False


def _with_plan(
    report: ModelReport, config: EngineConfig, make: Callable[[EngineConfig], ModelPlan]
) -> ModelReport:
    try:
        plan = make(config)
    except EngineError as exc:
        return replace(report, faults=(str(exc),))
    except Exception as exc:  # noqa: BLE001 - a broken folder may fail anywhere in transformers
        return replace(report, faults=(f"{config.model}: cannot be loaded: {first_line_of(exc)}",))
    is_native_text = plan.runs == "native" and report.gives == "text"
    methods = supported_methods() if is_native_text else ()
    report = replace(report, plan=plan, quantization_methods=methods)
    return _with_weights(report) if report.missing else report


def _with_weights(report: ModelReport) -> ModelReport:
    """Return a report that says what a load would of weights of which files are missing."""
    try:
        find_checkpoint(report.model)
    except EngineError as exc:
        return replace(report, faults=(str(exc),))
    return report


def _plan_encoder(config: EngineConfig) -> ModelPlan:
    """Return the plan of a model of vectors or scores."""
    pooling_config = read_encoder(config)
    hf_config = parse_hf_config(config.model, pooling_config.config)
    if hf_config.quantization_config:
        raise ModelRefused(f"{config.model}: {QUANTISED}")
    head = pooling_config.head
    why = None
    notes: tuple[str, ...] = ()
    try:
        own: EncoderArchitecture | Architecture
        if hf_config.model_type in families.FAMILIES:
            num_labels = head.num_labels if isinstance(head, Classifier) else None
            own = families.architecture_of(config.model, pooling_config.config, num_labels)
            positions = own.max_positions
        else:
            own = causal.decoder_of(hf_config)
            positions = own.original_positions or own.max_positions
        class_name = own.class_name
        notes = notes_on_ignored(hf_config.where, class_name, own.ignored_fields)
    except UnsupportedConfig as exc:
        if head is not None and not isinstance(head, Classifier):
            message = f"{config.model}: the engine's decoder cannot run it: {exc}"
            raise ModelRefused(message) from exc
        why = str(exc)
        whole = eager.read_config(config.model, pooling_config.config)  # which may refuse it
        class_name = str((hf_config.raw.get("architectures") or ["a class"])[0])
        positions = positions_of_encoder(whole)
    plan = _plan_of(config, hf_config.dtype, class_name, positions, why)
    max_model_len = pooling_config.context_length(config, plan.max_model_len)
    return replace(plan, max_model_len=max_model_len, notes=(*plan.notes, *notes))


def _plan_speech(config: EngineConfig) -> ModelPlan:
    """Return the plan of a model of the Whisper family."""
    said = read_speech(config.model)
    stored = STORED_DTYPES.get(str(said.stored_dtype))
    plan = _plan_of(config, stored, TITLE, said.architecture.max_target_positions, None)
    if said.hearing.languages:
        return plan
    return replace(plan, notes=(*plan.notes, ENGLISH_ONLY))


def _plan_of(
    config: EngineConfig,
    stored: torch.dtype | None,
    class_name: str,
    positions: int,
    why: str | None,
) -> ModelPlan:
    """Return the plan of a model whose weights alone take memory that a plan can tell."""
    device = choose_planned_device(config.device)
    dtype = choose_dtype(config.dtype, stored, device)
    checkpoint, notes = find_weights(config.model)
    memory = None
    if checkpoint is not None:
        memory = MemoryPlan(count_stored(checkpoint) * dtype.itemsize, 0, 0, 0, 0)
    return ModelPlan(
        runs="native" if why is None else "transformers",
        why=why,
        class_name=class_name,
        device=device,
        dtype=dtype,
        quantization=None,
        max_model_len=context_length(config, positions),
        memory=memory,
        notes=notes,
    )


def _with_vocabulary(report: ModelReport, config: EngineConfig, source: str | None) -> ModelReport:
    folder = find_folder(config.model)
    try:
        vocabulary = recall_vocabulary(config.model, folder)
        vocabulary = vocabulary or load_vocabulary(config.model, folder)
        if report.gives != "text":
            return report
        return _with_template(report, config, vocabulary, source)
    except EngineError as exc:
        what = str(exc)
        return replace(
            report,
            faults=(*report.faults, what),
            missing=(*report.missing, *(["a tokenizer"] if "no tokenizer" in what else [])),
        )


def _with_template(
    report: ModelReport, config: EngineConfig, vocabulary: Vocabulary, source: str | None
) -> ModelReport:
    if source is None and not vocabulary.chat_template:
        return replace(report, missing=(*report.missing, NO_TEMPLATE))
    template = load_chat_template(config.model, vocabulary, source).source_text
    calls, reasoning = parser_names(
        template, tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser
    )
    return replace(
        report,
        tool_call_parser=None if calls == NONE else calls,
        reasoning_parser=None if reasoning == NONE else reasoning,
    )
