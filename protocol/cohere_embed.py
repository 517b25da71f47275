"""Cohere's embeddings (`/v2/embed`): the request body and the response body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .embeddings import EmbeddingRequest
from .errors import RequestError
from .fields import Priority, Text, Whole
from .parts import TextPart
from .prompts import MAX_PROMPTS
from .validation import short_repr

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
"""Forms of a vector; `base64` contains little-endian fp32."""

_FilledText = Annotated[Text, Field(min_length=1)]
_Texts = Annotated[list[_FilledText], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
_INPUT_TYPES = ("search_query", "search_document", "classification", "clustering", "image")
# Other names of Cohere's input types in the prompts of published models.
_OTHER_NAMES = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
}
_MAX_NAMES_SHOWN = 20


class _TextPart(TextPart):
    text: _FilledText


class _Input(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    content: Annotated[list[_TextPart], Field(fail_fast=True, min_length=1)]


class CohereEmbedRequest(BaseModel):
    """The body of a request to `/v2/embed`: `texts`, or `inputs` with parts, which are joined.

    `input_type` selects the prompt of the model that has this name, or the usual one for it.
    Longer texts are cut to the context, or to `max_tokens`, unless `truncate` is `NONE`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    texts: _Texts | None = None
    inputs: (
        Annotated[list[_Input], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)] | None
    ) = None
    input_type: Text | None = None
    embedding_types: (
        Annotated[list[EmbeddingType], Field(fail_fast=True, min_length=1, max_length=32)] | None
    ) = None
    output_dimension: Annotated[Whole, Field(ge=1)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    priority: Priority | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse a body with two kinds of input, or none."""
        if self.texts is None and self.inputs is None:
            raise RequestError("`texts` is required.", param="texts")
        if self.texts is not None and self.inputs is not None:
            raise RequestError("`texts` and `inputs` cannot be used together.", param="inputs")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise RequestError(
                "`max_tokens` cuts texts, so `truncate` cannot be 'NONE'.", param="truncate"
            )
        return self

    @property
    def types(self) -> Sequence[EmbeddingType]:
        """Return the requested forms of vectors, each once, in their usual order."""
        wanted = self.embedding_types or ["float"]
        return [kind for kind in get_args(EmbeddingType) if kind in wanted]

    @property
    def joined_texts(self) -> list[str]:
        """Return the texts to embed."""
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in each.content) for each in self.inputs or ()]

    def embedding_request(
        self, prompts: Mapping[str, str], max_model_len: int, default_cut: int
    ) -> EmbeddingRequest:
        """Return the request to `/v1/embeddings` for a model with prompts and a context length.

        Texts are cut to `default_cut` tokens without `max_tokens`; -1 is the context length.
        Raises `RequestError` for an unknown `input_type`.
        """
        cut = None if self.max_tokens is None else min(self.max_tokens, max_model_len)
        kind = _WholeTexts if self.truncate == "NONE" else EmbeddingRequest
        return kind(
            input=[*self.joined_texts],
            dimensions=self.output_dimension,
            prompt_name=self._prompt_name(prompts),
            truncate_prompt_tokens=None if self.truncate == "NONE" else cut or default_cut,
            truncation_side="left" if self.truncate == "START" else "right",
        )

    def _prompt_name(self, prompts: Mapping[str, str]) -> str | None:
        """Return the name of the prompt for the input type; None for the model's default."""
        wanted = self.input_type
        if wanted is None:
            return None
        by_name: dict[str, str] = {name.lower(): name for name in prompts}
        for name in (wanted.lower(), *_OTHER_NAMES.get(wanted.lower(), ())):
            if name in by_name:
                return by_name[name]
        if wanted.lower() in _INPUT_TYPES:
            return None
        names = ", ".join(sorted({*_INPUT_TYPES, *prompts})[:_MAX_NAMES_SHOWN])
        raise RequestError(
            f"Unknown `input_type` {short_repr(wanted)}: it must be one of {names}.",
            param="input_type",
        )


class _WholeTexts(EmbeddingRequest):
    """A request whose texts are never cut."""

    is_cut_by_default = False
    how_to_truncate = "remove `truncate`"


def cohere_body(
    body_id: str,
    *,
    embeddings: Mapping[EmbeddingType, Sequence[Sequence[float] | str]],
    texts: Sequence[str],
    num_tokens: int,
) -> dict[str, Any]:
    """Return the response body, with vectors of each type in the order of the texts."""
    return {
        "id": body_id,
        "response_type": "embeddings_by_type",
        "embeddings": embeddings,
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
    }
