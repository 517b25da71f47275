"""Inspection of a model before loading: its implementation, its memory, and its missing files.

It takes the steps of a load that read no weights, in the same order, and continues after a
refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from tidemill.protocol.contract import EngineError
from tidemill.protocol.routes import CLASSIFY, DECISIONS

from .config import EngineConfig
from .errors import ModelRefused, first_line_of
from .model.config.architecture import Architecture
from .model.config.device import (
    choose_dtype,
    choose_planned_device,
    choose_steps_ahead,
    context_length,
)
from .model.config.hf_config import (
    CONFIG,
    QUANTISED,
    STORED_DTYPES,
    UnsupportedConfig,
    parse_hf_config,
    read_hf_config,
)
from .model.config.transformers_fields import notes_on_ignored
from .model.encoders import eager, families
from .model.encoders.architecture import EncoderArchitecture
from .model.encoders.loading import own_decoder, own_encoder
from .model.encoders.pooling_config import Classifier, PoolingConfig
from .model.encoders.transformers_model import check_config, positions_of_encoder
from .model.encoders.two_towers_loading import read_tower_configs
from .model.endpoint_names import endpoints_of
from .model.model_plan import MemoryPlan, ModelPlan, Runs, find_weights
from .model.planning import plan_model
from .model.speech.loading import TITLE
from .model.speech.whisper_config import read_speech
from .model.weights.checkpoint import find_checkpoint, missing_files
from .model.weights.quantised.quantization_config import supported_methods
from .model.weights.weights import count_stored
from .parsers.registry import NONE, check_parser_names, parser_names, parser_notes
from .storage.hub import find_folder, find_gguf
from .tasks import find_task
from .tasks.generation import load_chat_template
from .tasks.pooling import PoolingTask, read_encoder
from .tasks.speech import SpeechTask
from .text.chat_template import read_chat_template
from .text.vocabulary import Vocabulary, load_vocabulary, recall_vocabulary

Gives = Literal["text", "vectors or scores", "labels", "decisions", "what recordings say"]
ENGLISH_ONLY = "this is an English-only model: it does not support other languages or translations"
NO_TEMPLATE = (
    "a chat template: only text completions work; --chat-template names one for conversations"
)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Report on a model: its `plan`, None if there is none, and the `faults` that prevent a load.

    If only weight files are missing it has both: the plan contains their memory requirements.
    `missing` names files, and what does not work without them. `quantization_methods` are the
    formats that the model's weights may have. The parsers are None if its template shows none.
    `endpoints` are those that it supports. `why_no_drafts` is None if tokens are drafted.
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
    endpoints: tuple[str, ...] = ()
    why_no_drafts: str | None = None

    @property
    def is_refused(self) -> bool:
        """Return whether a load would refuse the model."""
        return self.plan is None or bool(self.faults)

    @property
    def runs(self) -> Runs | Literal["refused"]:
        """Return the implementation that runs the model."""
        return "refused" if self.plan is None or self.faults else self.plan.runs

    @property
    def why(self) -> str | None:
        """Return the reason for a refusal, or for running with transformers."""
        if self.faults:
            return "; ".join(self.faults)
        return None if self.plan is None else self.plan.why


def inspect_model(config: EngineConfig, *, chat_template: str | None = None) -> ModelReport:
    """Return a report on loading `config.model`; raise `EngineError` for invalid settings.

    `chat_template` is a template's text or the path of a file that contains it.
    """
    check_parser_names(tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser)
    source = None if chat_template is None else read_chat_template(chat_template)
    report = ModelReport(config.model, None, "text", None)
    try:
        hf_config = read_hf_config(config.model)
    except EngineError as exc:
        absent = (CONFIG,) if _lacks_config(config.model) else ()
        return replace(report, faults=(str(exc),), missing=absent)
    task = find_task(find_folder(config.model), config)
    make: Callable[[EngineConfig], ModelPlan] = plan_model
    report = replace(report, endpoints=endpoints_of(config, source) or ())
    if isinstance(task, PoolingTask):
        given: dict[str, Gives] = {DECISIONS.name: "decisions", CLASSIFY.name: "labels"}
        first = next(iter(report.endpoints), "")
        gives = given.get(first, "vectors or scores")
        report, make = replace(report, gives=gives), _plan_encoder
    elif isinstance(task, SpeechTask):
        report, make = replace(report, gives="what recordings say"), _plan_speech
    is_folder = Path(config.model).is_dir() and find_gguf(config.model) is None
    missing = missing_files(Path(config.model)) if is_folder else ()
    report = replace(report, model_type=hf_config.model_type, missing=missing)
    report = _with_plan(report, config, make)
    return _with_vocabulary(report, config, source)


def _lacks_config(model: str) -> bool:
    """Return whether a model has no config.json; a refused GGUF file has other faults."""
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
    report = replace(
        report,
        plan=plan,
        quantization_methods=methods,
        why_no_drafts=_why_no_drafts(config, plan) if report.gives == "text" else None,
    )
    return _with_weights(report) if report.missing else report


def _why_no_drafts(config: EngineConfig, plan: ModelPlan) -> str | None:
    """Return why no tokens would be drafted; None if they are."""
    if not config.speculative_decoding:
        return "--no-speculative-decoding"
    if plan.memory is not None and plan.memory.state_bytes_per_sequence:
        return "recurrent layers cannot forget a draft"
    if choose_steps_ahead(config, plan.device):
        return "a GPU prepares the next step before a draft could be looked up"
    return None


def _with_weights(report: ModelReport) -> ModelReport:
    """Return the report, with the faults that a load would find in incomplete weights."""
    try:
        find_checkpoint(report.model)
    except EngineError as exc:
        return replace(report, faults=(str(exc),))
    return report


def _plan_encoder(config: EngineConfig) -> ModelPlan:
    """Return the plan of an embedding model or reranker."""
    pooling_config = read_encoder(config)
    if pooling_config.has_two_towers:
        return _plan_towers(config, pooling_config)
    hf_config = parse_hf_config(config.model, pooling_config.config)
    if hf_config.quantization_config:
        raise ModelRefused(f"{config.model}: {QUANTISED}")
    head = pooling_config.head
    why = None
    notes: tuple[str, ...] = ()
    try:
        own: EncoderArchitecture | Architecture
        if hf_config.model_type in families.FAMILIES:
            own = own_encoder(config.model, pooling_config)
            positions = own.max_positions
        else:
            own = own_decoder(hf_config, head)
            positions = own.original_positions or own.max_positions
        class_name = own.class_name
        notes = notes_on_ignored(hf_config.where, class_name, own.ignored_fields)
    except UnsupportedConfig as exc:
        if head is not None and not isinstance(head, Classifier):
            message = f"{config.model}: the engine's decoder does not support it: {exc}"
            raise ModelRefused(message) from exc
        why = str(exc)
        whole = eager.read_config(config.model, pooling_config.config)  # this may refuse the model
        class_name = str((hf_config.raw.get("architectures") or ["a class"])[0])
        check_config(config.model, whole, head)
        positions = positions_of_encoder(whole)
    plan = _plan_of(config, hf_config.dtype, class_name, positions, why)
    max_model_len = pooling_config.context_length(config, plan.max_model_len)
    return replace(plan, max_model_len=max_model_len, notes=(*plan.notes, *notes))


def _plan_towers(config: EngineConfig, pooling_config: PoolingConfig) -> ModelPlan:
    """Return the plan of a model with a tower of texts and one of images."""
    towers, _, stored_dtype = read_tower_configs(config.model, pooling_config.config)
    positions = towers.texts.max_positions
    plan = _plan_of(config, stored_dtype, towers.class_name, positions, None)
    max_model_len = pooling_config.context_length(config, plan.max_model_len)
    return replace(plan, max_model_len=max_model_len)


def _plan_speech(config: EngineConfig) -> ModelPlan:
    """Return the plan of a model of the Whisper family."""
    speech = read_speech(config.model)
    stored = STORED_DTYPES.get(str(speech.stored_dtype))
    plan = _plan_of(config, stored, TITLE, speech.architecture.max_target_positions, None)
    if speech.hearing.languages:
        return plan
    return replace(plan, notes=(*plan.notes, ENGLISH_ONLY))


def _plan_of(
    config: EngineConfig,
    stored: torch.dtype | None,
    class_name: str,
    positions: int,
    why: str | None,
) -> ModelPlan:
    """Return the plan of a model whose only known memory requirement is its weights."""
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
        fault = str(exc)
        return replace(
            report,
            faults=(*report.faults, fault),
            missing=(*report.missing, *(["a tokenizer"] if "no tokenizer" in fault else [])),
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
    notes = parser_notes(
        template, tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser
    )
    plan = report.plan
    return replace(
        report,
        plan=plan if plan is None else replace(plan, notes=(*plan.notes, *notes)),
        tool_call_parser=None if calls == NONE else calls,
        reasoning_parser=None if reasoning == NONE else reasoning,
    )
