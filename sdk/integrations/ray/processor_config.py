"""Processor config: Ray's fields for an engine, validated and translated to our options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from tidemill.offline.arguments.vllm_flags import is_ignored, replacement_for

from ...errors import TidemillError
from ..options import ENGINE_OPTIONS
from .engine_pool import EnginePool

_LOG = logging.getLogger(__name__)

TASKS: Final = ("generate", "embed", "classify", "score")
_CONFIG = "vLLMEngineProcessorConfig"
_CONCURRENT_BATCHES = 8
_NOT_HERE: Final = MappingProxyType(
    {
        "dynamic_lora_loading_path": (
            'list the adapters: engine_kwargs={"lora_modules": ["NAME=PATH"]}'
        ),
        "placement_group_config": (
            "an engine is one actor on one node: set its number of GPUs with tensor_parallel_size"
        ),
    }
)
# For generative models, Ray returns the text as generated.
_OPTIONS_OF_TASKS: Final = MappingProxyType(
    {
        "generate": {"tool_call_parser": "none", "reasoning_parser": "none"},
        "embed": {"runner": "pooling", "convert": "embed"},
        "classify": {"runner": "pooling", "convert": "classify"},
        "score": {"runner": "pooling", "convert": "classify"},
    }
)
_RENAMED: Final = MappingProxyType(
    {"served_model_name": "served_model_names", "kv_cache_memory_bytes": "kv_cache_memory"}
)
_OF_RAY = ("model", "task_type", "enable_lora", "distributed_executor_backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class vLLMEngineProcessorConfig:  # noqa: N801 - Ray's name
    """Config of a processor, with the fields and defaults of Ray's class of this name.

    `max_pending_requests`, `log_engine_metrics`, `tokenize_stage` and `detokenize_stage` have no
    effect: the engine does these things itself.
    """

    model_source: str
    batch_size: int = 32
    accelerator_type: str | None = None
    concurrency: int | tuple[int, int] = 1
    runtime_env: Mapping[str, Any] | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    task_type: str = "generate"
    max_pending_requests: int | None = None
    max_concurrent_batches: int = _CONCURRENT_BATCHES
    max_tasks_in_flight_per_actor: int | None = None
    should_continue_on_error: bool = False
    log_engine_metrics: bool = True
    dynamic_lora_loading_path: str | None = None
    placement_group_config: Mapping[str, Any] | None = None
    chat_template_stage: Any = True
    tokenize_stage: Any = True
    detokenize_stage: Any = True
    prepare_multimodal_stage: Any = False

    @classmethod
    def parse(cls, config: Any) -> vLLMEngineProcessorConfig:
        """Return this config or Ray's as an instance of this class; raises TidemillError."""
        kinds = [kind.__name__ for kind in type(config).__mro__]
        if _CONFIG not in kinds:
            raise TidemillError(
                f"build_processor requires a {_CONFIG}, not a {kinds[0]}: use "
                "ray.data.llm.build_processor, for example with `tidemill serve`"
            )
        found = cls(**{each.name: getattr(config, each.name) for each in fields(cls)})
        if found.task_type not in TASKS:
            raise TidemillError(
                f"`task_type` must be one of {', '.join(TASKS)}; got {found.task_type!r}"
            )
        for name, instead in _NOT_HERE.items():
            if getattr(found, name) is not None:
                raise TidemillError(f"`{name}` is not supported: {instead}")
        return found

    def pool(self) -> EnginePool:
        """Return the pool of its engines; raises TidemillError for invalid values."""
        shared = self.engine_kwargs.get("tensor_parallel_size") or 1
        has_default = self.max_concurrent_batches == _CONCURRENT_BATCHES
        engines: Any = self.concurrency
        return EnginePool(
            engines=engines if isinstance(engines, tuple) else (1, engines),
            gpus_per_engine=shared if shared > 1 or self.accelerator_type else None,
            batch_size=self.batch_size,
            max_concurrency=None if has_default else self.max_concurrent_batches,
            max_tasks_in_flight_per_actor=self.max_tasks_in_flight_per_actor,
            accelerator_type=self.accelerator_type,
            runtime_env=self.runtime_env,
        )

    def engine_options(self) -> dict[str, Any]:
        """Return the options of its engines; raises TidemillError for an unsupported one."""
        found, ignored = {"model": self.model_source, **_OPTIONS_OF_TASKS[self.task_type]}, []
        for given, value in self.engine_kwargs.items():
            name = _RENAMED.get(given, given)
            if name in _OF_RAY or value is None:
                continue
            if name in ENGINE_OPTIONS:
                found[name] = value
            elif is_ignored(f"--{name}", str(value)) or value is False:
                ignored.append(name)
            else:
                raise TidemillError(_refused_option(name))
        if ignored:
            _LOG.warning(
                "engine_kwargs: %s: vLLM options that have no effect here", ", ".join(ignored)
            )
        if template := self.chat_template.get("chat_template"):
            found["chat_template"] = template
        return found

    @property
    def chat_template(self) -> Mapping[str, Any]:
        """Return the fields of the chat template stage; empty if it is off."""
        stage = _stage_fields(self.chat_template_stage, "chat_template_stage")
        if stage.get("model_source", self.model_source) not in {None, self.model_source}:
            raise TidemillError(
                "`chat_template_stage.model_source` must be the config's `model_source`"
            )
        return stage

    def check_multimodal_stage(self) -> None:
        """Raise TidemillError for unsupported options of the multimodal stage."""
        stage = _stage_fields(self.prepare_multimodal_stage, "prepare_multimodal_stage")
        for name in ("model_config_kwargs", "apply_sys_msg_formatting"):
            if stage.get(name):
                raise TidemillError(f"`prepare_multimodal_stage.{name}` is not supported")


def _stage_fields(stage: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of a stage, including `enabled`; empty if it is off."""
    if isinstance(stage, bool):
        return {"enabled": True} if stage else {}
    found = stage if isinstance(stage, Mapping) else getattr(stage, "__dict__", None)
    if found is None:
        raise TidemillError(f"`{name}` must be a boolean or a stage config; got {stage!r}")
    return {"enabled": True, **found} if found.get("enabled", True) else {}


def _refused_option(name: str) -> str:
    if instead := replacement_for(f"--{name}"):
        return f"engine_kwargs: vLLM's `{name}` is not supported: {instead}"
    near = get_close_matches(name, ENGINE_OPTIONS, n=1)
    return f"engine_kwargs: unknown engine option `{name}`" + (
        f": did you mean `{near[0]}`?" if near else ""
    )
