"""Processor requests: rows of Ray's processors as engine requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pydantic_core import PydanticSerializationError, to_json

from tidemill.batch.file.lines import ROW_ERROR
from tidemill.protocol.routes import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, SCORE

LINES: Final = "__tidemill_line"
"""Column of requests."""

CONSUMED: Final = (
    *("sampling_params", "pooling_params", "tokenization_kwargs", "tokenized_prompt"),
    *("multimodal_data", "mm_processor_kwargs", "multimodal_uuids"),
)
"""Columns that are consumed by a request and removed from its row."""

# vLLM's defaults, regardless of the model's generation_config.json.
_DEFAULTS: Final = MappingProxyType(
    {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 16,
    }
)
_SAMPLING = frozenset(
    """
    temperature top_p top_k min_p seed max_tokens min_tokens stop stop_token_ids bad_words
    include_stop_str_in_output ignore_eos presence_penalty frequency_penalty repetition_penalty
    logit_bias allowed_token_ids skip_special_tokens truncate_prompt_tokens structured_outputs
    repetition_detection
    """.split()
)
_NEUTRAL: Final = MappingProxyType(
    {"n": (1,), "detokenize": (True, False), "spaces_between_special_tokens": (True, False)}
)
_POOLING = frozenset({"dimensions", "use_activation", "normalize", "truncate_prompt_tokens"})
_INSTEAD: Final = MappingProxyType(
    {
        "n": "a row has only one text",
        "logprobs": "use tidemill.ray.answer with params",
        "prompt_logprobs": "use tidemill.ray.answer with params",
        "guided_decoding": "send `structured_outputs`",
    }
)


class _RowRefused(Exception):
    """A row that cannot be converted to a request."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


@dataclass(frozen=True, slots=True)
class RowRequests:
    """Renders the line of a row for a task; with `has_chats`, rows have `messages`."""

    task_type: str
    model: str
    has_chats: bool
    chat_template_kwargs: Mapping[str, Any] | None

    def line(self, row: Mapping[str, Any]) -> bytes:
        """Return the line of a row; for a rejected row, the line contains the reason."""
        try:
            url, body = self._request(row)
            if row.get("model") not in {None, self.model}:
                body["model"] = row["model"]
            return to_json({"custom_id": "", "url": url, "body": body}, fallback=_plain)
        except _RowRefused as exc:
            error = {"message": exc.message, "column": exc.column}
        except (PydanticSerializationError, TypeError, ValueError) as exc:
            error = {"message": f"the request cannot be serialized to JSON: {exc}", "column": ""}
        return to_json({"custom_id": "", ROW_ERROR: error})

    def _request(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        for name in ("multimodal_data", "mm_processor_kwargs", "multimodal_uuids"):
            if row.get(name) is not None:
                raise _RowRefused(
                    f"`{name}` is not supported: send images as `image_url` in `messages`", name
                )
        if self.task_type == "generate":
            return self._generation(row)
        if self.task_type == "embed":
            return EMBEDDINGS.name, self._embedding(row)
        if row.get("text_1") is None or row.get("text_2") is None:
            raise _RowRefused(
                f"`task_type` {self.task_type!r} scores pairs of texts: preprocess must return "
                "`text_1` and `text_2`",
                "text_1",
            )
        return SCORE.name, {"text_1": row["text_1"], "text_2": row["text_2"], **_pooling(row)}

    def _generation(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        if row.get("sampling_params") is None:
            raise _RowRefused(
                "`sampling_params` is required: preprocess must return it, {} for vLLM's defaults",
                "sampling_params",
            )
        given = _checked(row["sampling_params"], "sampling_params", _SAMPLING)
        body = {**_DEFAULTS, **given, "return_token_ids": True}
        if self.has_chats:
            return CHAT_COMPLETIONS.name, body | self._chat(row)
        return COMPLETIONS.name, body | {"prompt": _prompt(row)}

    def _embedding(self, row: Mapping[str, Any]) -> dict[str, Any]:
        read = self._chat(row) if self.has_chats else {"input": _prompt(row)}
        return {**read, **_pooling(row), "encoding_format": "base64"}

    def _chat(self, row: Mapping[str, Any]) -> dict[str, Any]:
        messages = _plain(row.get("messages"))
        if not isinstance(messages, (list, tuple)) or not messages:
            raise _RowRefused(
                "`messages` is required: preprocess must return it; or set "
                "`chat_template_stage=False` if rows have a `prompt`",
                "messages",
            )
        messages = [_without_nulls(message) for message in messages]
        body: dict[str, Any] = {"messages": messages}
        ends_with_user = messages[-1].get("role") == "user"
        if not ends_with_user:  # as in Ray: the last message is the beginning of the answer
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return body


def _prompt(row: Mapping[str, Any]) -> Any:
    if row.get("tokenized_prompt") is not None:
        return _plain(row["tokenized_prompt"])
    if row.get("prompt") is None:
        raise _RowRefused("`prompt` is required: preprocess must return it", "prompt")
    return row["prompt"]


def _pooling(row: Mapping[str, Any]) -> dict[str, Any]:
    found = _checked(row.get("pooling_params") or {}, "pooling_params", _POOLING)
    cut = _plain(row.get("tokenization_kwargs")) or {}
    for name in cut:
        if name not in {"truncation", "max_length"}:
            raise _RowRefused(f"`tokenization_kwargs.{name}` is not supported", name)
    if cut.get("truncation") and cut.get("max_length") is not None:
        found["truncate_prompt_tokens"] = cut["max_length"]
    return found


def _checked(given: Any, where: str, known: frozenset[str]) -> dict[str, Any]:
    """Return parameters without nulls; raises _RowRefused for one that is not supported."""
    if not isinstance(given, Mapping):
        raise _RowRefused(f"`{where}` must be a dict, not {type(given).__name__}", where)
    found = {}
    for name, value in given.items():
        if value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name not in known:
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise _RowRefused(f"`{where}.{name}` is not supported{instead}", name)
        found[name] = value
    return found


def _plain(value: Any) -> Any:
    """Return a NumPy array as lists; raises TypeError for values that are not JSON."""
    if isinstance(value, (list, tuple, dict, str)) or value is None:
        return value
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} is not JSON serializable")
    return value.tolist()


def _without_nulls(value: Any) -> Any:
    """Return a message without the null fields that Arrow gives to structs of one column."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return value
