"""Embeddings: the request body and the response body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .bodies import list_body
from .chat import free_names
from .errors import RequestError
from .fields import CutTo, Priority, Side, Text, Whole
from .messages import Message
from .prompts import Prompts


class PoolingRequest(BaseModel):
    """Fields of embedding and scoring requests; unknown fields are ignored.

    A text longer than `truncate_prompt_tokens`, including special tokens, is truncated; -1 means
    the model's maximum. `normalize` is the older name of a vector's `use_activation`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    is_cut_by_default: ClassVar[bool] = True
    """Whether a default of the server truncates texts."""
    how_to_truncate: ClassVar[str] = (
        "set `truncate_prompt_tokens`, or pass --truncate-prompt-tokens for all requests"
    )
    """Advice for texts above the context length."""

    model: str | None = None

    truncate_prompt_tokens: CutTo | None = None
    truncation_side: Side | None = None
    use_activation: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(free_names)] | None = None
    priority: Priority | None = None


EncodingFormat = Literal["float", "base64"]
OutputDtype = Literal["float", "float32", "float16", "int8", "uint8", "binary", "ubinary"]
"""Element types of vectors (`engine/endpoints/vectors.py`)."""

TYPE_CODES: Mapping[str, str] = MappingProxyType(
    {
        "float": "f",
        "float32": "f",
        "float16": "e",
        "int8": "b",
        "uint8": "B",
        "binary": "b",
        "ubinary": "B",
    }
)
"""The code of each element type in `struct` and numpy."""


class InputRequest(PoolingRequest):
    """Fields of requests with an `input`, or `messages` for the model's template."""

    input: Prompts | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None

    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _agree_on_input(self) -> Self:
        """Refuse a body without an input, and parameters that contradict each other."""
        if self.input is None and self.messages is None:
            raise RequestError("`input` is required.", param="input")
        if self.input is not None and self.messages is not None:
            raise RequestError("`input` and `messages` cannot be used together.", param="messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "`continue_final_message` and `add_generation_prompt` cannot both be true: one"
                " continues the last message, the other starts a new one.",
                param="continue_final_message",
            )
        return self


def check_prompt_name(name: str | None, prompts: Prompts | None) -> None:
    """Refuse the name of a prompt for an input that is not text."""
    if name is not None and not (prompts is not None and isinstance(prompts[0], str)):
        raise RequestError(
            "`prompt_name` is only supported for text `input`, not for messages or token IDs.",
            param="prompt_name",
        )


class EmbeddingRequest(InputRequest):
    """The body of a request to `/v1/embeddings`.

    `prompt_name` selects one of the model's predefined prompts for texts.
    """

    encoding_format: EncodingFormat | None = None
    output_dtype: OutputDtype | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    normalize: bool | None = None
    prompt_name: Text | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse parameters that contradict each other."""
        check_prompt_name(self.prompt_name, self.input)
        values = {self.normalize, self.use_activation} - {None}
        if len(values) > 1:
            raise RequestError(
                "`normalize` and `use_activation` differ: send only one of them.",
                param="normalize",
            )
        return self

    @property
    def wants_length_one(self) -> bool | None:
        """Say whether vectors are normalized to length 1; None for the model's default."""
        return self.use_activation if self.normalize is None else self.normalize


def embedding_body(
    body_id: str,
    *,
    created: int,
    model: str,
    vectors: Sequence[Sequence[float] | str],
    dtype: OutputDtype | None,
    num_tokens: int,
) -> dict[str, Any]:
    """Return the response body, with vectors in the order of their inputs.

    It names a `dtype` that was requested: base64 does not show it.
    """
    named = {} if dtype is None else {"output_dtype": dtype}
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(vectors)
    ]
    return list_body(
        body_id, created=created, model=model, data=data, num_tokens=num_tokens, **named
    )
