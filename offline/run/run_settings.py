"""Settings of a run that affect its rows, by their flags.

Settings that only change its speed are not included, nor are limits that reject a request without
changing other rows. The machine is not included, because a run may be resumed on another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final

from tidemill.batch.table.recipe_keys import CALIBRATION, QUESTIONS
from tidemill.engine.config import EngineConfig
from tidemill.engine.storage.hub import local_source, snapshot_commit
from tidemill.engine.storage.model_digest import sampled_digest
from tidemill.protocol.contract import EngineInfo

from ..arguments.defaults import MAX_TOKENS, SYSTEM_PROMPT, TEMPERATURE
from ..engine.engine import served_names
from ..files.row_settings import Settings
from ..files.table_options import TableOptions
from .run_options import RunOptions

MODEL: Final = "--model"
_LABELS_SPANS: Final = "labels_spans"
_FLAGS: Final = {
    "served_model_names": "--served-model-name",
    "line_url": "--url",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("any_model", "proof_rows", "enable_prompt_tokens_details", "runner", "convert"),
            *("tool_call_parser", "reasoning_parser", "reasoning_field", "dtype"),
            *("max_model_len", "kv_cache_dtype"),
            *("quantization", "seed", "dialect", "truncate_prompt_tokens", "batch_invariant"),
            "echo_fields",
        )
    },
}
_JSON_FLAGS: Final = ("hf_overrides", "pooler_config", "mm_processor_kwargs")
_RECIPE_FLAGS: Final = {name: f"--{name}" for name in ("prompt", "system", "id", "permutations")}
_QUESTIONS: Final = "--ask"
_LAYOUT: Final = "--question-layout"
_NOT_OF_ROWS: Final = frozenset(
    (
        *("keep", "output", "vectors", "url", "params", "confidence", "question_layout"),
        *(*QUESTIONS, *CALIBRATION),
    )
)
"""Recipe keys that only change the table written from the rows, or that are named separately."""
_DIGEST_BYTES: Final = 20


def settings_of(options: RunOptions, config: EngineConfig, template: str | None) -> Settings:
    """Return the settings of a run, with digests of the model's local files."""
    defaults = RunOptions("", "")
    found = {MODEL: _files_of(options.model or served_names(options)[0], config.model)}
    for module in config.lora_modules:
        found[f"--lora-modules {module.name}"] = _files_of(module.path, module.path)
    if template is not None:
        found["--chat-template"] = {
            "name": "inline" if options.chat_template == template else options.chat_template,
            "digest": blake2b(template.encode(), digest_size=_DIGEST_BYTES).hexdigest(),
        }
    given: dict[str, Any] = {
        flag: getattr(options, name)
        for name, flag in _FLAGS.items()
        if getattr(options, name) != getattr(defaults, name)
    }
    given |= {
        TEMPERATURE: options.defaults.temperature,
        MAX_TOKENS: options.defaults.max_tokens,
        SYSTEM_PROMPT: options.defaults.system_prompt,
    }
    for name in _JSON_FLAGS:
        if (text := getattr(options, name)) is not None:
            given[f"--{name.replace('_', '-')}"] = json.loads(
                json.dumps(json.loads(text), sort_keys=True)
            )
    if options.table is not None:
        given |= _recipe_settings(options.table)
    return found | {name: value for name, value in given.items() if value is not None}


def _recipe_settings(table: TableOptions) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a recipe adds to requests, by flag if there is one."""
    keys, recipe = table.recipe_keys, table.recipe
    yield "--url", recipe.url
    if recipe.questions:
        yield _QUESTIONS, [question.body for question in recipe.questions]
        yield _LAYOUT, recipe.question_layout
    for name, value in keys.items():
        if name not in _NOT_OF_ROWS:
            yield _RECIPE_FLAGS.get(name, f"`{name}` of the recipe"), value
    for name, value in recipe.params.items():
        yield f"`params.{name}` of the recipe", value


def is_of_recipe(name: str) -> bool:
    """Return whether a setting belongs to the recipe, which renders the requests."""
    return name in {"--url", _QUESTIONS, _LAYOUT, *_RECIPE_FLAGS.values()} or name.endswith(
        " of the recipe"
    )


def with_loaded_model(settings: Settings, info: EngineInfo) -> Settings:
    """Return the settings with the loaded model, whose files may not have been local before.

    The hub may then have another revision, or files that were missing in the local cache.
    """
    loaded = {**settings[MODEL]}
    if loaded["digest"] is None or info.revision is not None:
        loaded |= {"revision": info.revision, "digest": info.model_digest}
    if info.labels_spans:
        loaded[_LABELS_SPANS] = True
    return {**settings, MODEL: loaded}


def has_span_labels(settings: Settings | None) -> bool:
    """Return whether the model of these settings is known to label spans of texts."""
    return settings is not None and bool(settings[MODEL].get(_LABELS_SPANS))


def _files_of(name: str, path: str) -> dict[str, str | None]:
    """Return the identity of the files of a model or an adapter."""
    source = local_source(path)
    return {
        "name": name,
        "revision": None if source is None else snapshot_commit(source),
        "digest": None if source is None else sampled_digest(source),
    }
