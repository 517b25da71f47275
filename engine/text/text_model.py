"""What the endpoints know of the served model: everything about it but how to run it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.errors import EngineError
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing is sampled with; OpenAI's defaults unless a model has own.

    As in vLLM, a model's `generation_config.json` replaces them one by one; its `do_sample` is not
    read.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the defaults of a generation config; what it leaves out or nulls stays ours."""
        names = cls.__dataclass_fields__
        return cls(**{name: config[name] for name in names if config.get(name) is not None})


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of a model; `chat_template` is None for a base model.

    `max_model_len` counts the tokens of prompt and completion together; token ids of a request lie
    below `vocab_size`; `eos_token_ids` end a sequence.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    defaults: SamplingDefaults = SamplingDefaults()


def read_generation_config(model: str) -> dict[str, Any]:
    """Return the `generation_config.json` of a local folder or hub id; empty if it has none."""
    from transformers.utils import cached_file

    path = cached_file(
        model,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return {}
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as exc:
        raise EngineError(f"{path} is no JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise EngineError(f"{path} holds no JSON object")
    return config


def eos_ids(
    generation_config: Mapping[str, Any], model_eos: object, tokenizer: Tokenizer
) -> frozenset[int]:
    """Return the tokens that end a sequence: the tokenizer's, and those of the model's configs.

    `model_eos` is `config.eos_token_id`, read when the generation config names none. Each may be
    an id, a list of ids or None.
    """
    configured = generation_config.get("eos_token_id")
    if configured is None:
        configured = model_eos
    return frozenset(
        [*_ids(configured), *_ids(getattr(tokenizer.pretrained, "eos_token_id", None))]
    )


def _ids(value: object) -> Iterable[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else [int(str(value))]
