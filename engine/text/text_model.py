"""Text model: tokenizer, chat template, context and sampling defaults that the endpoints need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from tidemill.protocol.constraints.request import OutputConstraint
from tidemill.protocol.contract import EngineError
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fields import Count, RepetitionPenalty, Share, Temperature, TopK
from tidemill.protocol.validation import parse, short_repr

from ..config import MAX_LOGPROBS
from ..errors import first_line_of
from ..scheduling.sequence import Constraint
from ..storage.hub import find_file
from .chat_template import ChatTemplate
from .tokenizer import Tokenizer

_GENERATION = "generation_config.json"

Ids = Count | list[Count] | None
_Config = TypeVar("_Config", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling defaults of requests: OpenAI's, unless the model has its own.

    As in vLLM, a model's `generation_config.json` replaces them field by field; its `do_sample` is
    ignored.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ConstraintCompiler(Protocol):
    """Compiles constraints on one model's tokens; safe to use from threads."""

    def constraint(
        self,
        requested: OutputConstraint,
        *,
        begins_after: str | None = None,
        opened_by: str | None = None,
    ) -> Constraint:
        """Return the constraint of a request, which applies after the text `begins_after`.

        With `opened_by`, an output that does not begin with that token is constrained at once.
        Raises `RequestError` for an invalid constraint.
        """


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of a model; `chat_template` is None for a base model.

    `max_model_len` counts the tokens of prompt and completion together; a request's token ids are
    below `vocab_size`; `eos_token_ids` end a sequence. A request may have `max_logprobs`
    alternatives for each token, or all for -1; `truncate_prompt_tokens` is the default for requests
    without one.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    grammars: ConstraintCompiler
    defaults: SamplingDefaults = SamplingDefaults()
    max_logprobs: int = MAX_LOGPROBS
    truncate_prompt_tokens: int | None = None


class GenerationConfig(BaseModel):
    """A `generation_config.json`, validated like the parameters of a request."""

    model_config = ConfigDict(extra="ignore", strict=True)

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    eos_token_id: Ids = None

    @property
    def defaults(self) -> SamplingDefaults:
        """Return the sampling defaults; omitted and null fields keep the defaults."""
        fields = self.model_dump(exclude_none=True, exclude={"eos_token_id"})
        return SamplingDefaults(**fields)


class _ModelEnds(BaseModel):
    """The end tokens of a `config.json`."""

    model_config = ConfigDict(strict=True)

    eos_token_id: Ids = None


def read_generation_config(model: str) -> GenerationConfig:
    """Return the `generation_config.json` of a local folder or hub id, empty if it has none.

    Raises `EngineError` naming the file and the invalid key.
    """
    try:
        path = find_file(model, _GENERATION)
    except (OSError, ValueError) as exc:
        raise EngineError(f"{model}: cannot be read as a model: {first_line_of(exc)}") from exc
    # A folder of that name is not a file, and transformers would try to open it later.
    if path is None and not (Path(model) / _GENERATION).exists():
        return GenerationConfig()
    try:
        config = json.loads((path or Path(model) / _GENERATION).read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise EngineError(
            f"{model}: {_GENERATION} is not valid JSON: {first_line_of(exc)}"
        ) from exc
    if not isinstance(config, dict):
        raise EngineError(
            f"{model}: {_GENERATION} must contain a JSON object, not {short_repr(config)}"
        )
    return _checked(GenerationConfig, config, f"{model}: {_GENERATION}")


def eos_ids(
    model: str, generation_config: GenerationConfig, model_eos: object, tokenizer: Tokenizer
) -> frozenset[int]:
    """Return the tokens that end a sequence: the tokenizer's, and those of the model's configs.

    `model_eos` is `config.eos_token_id`, used if the generation config has none. Each may be an id,
    a list of ids or None.
    """
    configured = generation_config.eos_token_id
    if configured is None:
        configured = _checked(
            _ModelEnds, {"eos_token_id": model_eos}, f"{model}: config.json"
        ).eos_token_id
    if not isinstance(configured, list):
        configured = [] if configured is None else [configured]
    own = tokenizer.vocabulary.eos_id
    return frozenset([*configured, *([] if own is None else [own])])


def _checked(kind: type[_Config], fields: dict[str, Any], where: str) -> _Config:
    try:
        return parse(kind, fields)
    except RequestError as exc:
        raise EngineError(f"{where}: {exc.message}") from exc
