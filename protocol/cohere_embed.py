"""Cohere's embeddings (`/v2/embed`): the request body and the response body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from .embeddings import EmbeddingRequest
from .errors import RequestError
from .fields import Priority, Text, Whole, fault
from .parts import IMAGE_URL, CheckedUrl, ImagePart, PlacedImage, TextPart
from .prompts import MAX_PROMPTS
from .validation import short_repr

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
"""Forms of a vector; `base64` contains little-endian fp32."""

_FilledText = Annotated[Text, Field(min_length=1)]
_Texts = Annotated[list[_FilledText], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
_INPUTS = ("texts", "images", "inputs")
_INPUT_TYPES = ("search_query", "search_document", "classification", "clustering", "image")
# Other names of Cohere's input types in the prompts of published models.
_OTHER_NAMES = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
}
_MAX_NAMES_SHOWN = 20


class _TextPart(TextPart):
    text: _FilledText


def _kind_of_part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<image>" if kind == IMAGE_URL else "<text>"


_Part = Annotated[
    Annotated[_TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")],
    Discriminator(_kind_of_part),
]


class _Input(BaseModel):
    """Parts that have one vector: texts, which are joined, or an image."""

    model_config = ConfigDict(extra="ignore", strict=True)

    content: Annotated[list[_Part], Field(fail_fast=True, min_length=1)]

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.content) > 1 and self.image is not None:
            raise fault(("content",), "must have either text parts or one image part", self.content)
        return self

    @property
    def image(self) -> ImagePart | None:
        """Return its first image, if it has any."""
        return next((part for part in self.content if isinstance(part, ImagePart)), None)

    @property
    def text(self) -> str:
        """Return the texts of its parts."""
        return "\n".join(part.text for part in self.content if isinstance(part, _TextPart))


class CohereEmbedRequest(BaseModel):
    """The body of a request to `/v2/embed`: `texts`, `images`, or `inputs` with parts of either.

    `input_type` selects the prompt of the model that has this name, or the usual one for it.
    Longer texts are cut to the context, or to `max_tokens`, unless `truncate` is `NONE`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    texts: _Texts | None = None
    images: (
        Annotated[list[CheckedUrl], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | None
    ) = None
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
        given = [name for name in _INPUTS if getattr(self, name) is not None]
        if not given:
            raise RequestError("`texts` is required.", param="texts")
        if len(given) > 1:
            names = " and ".join(f"`{name}`" for name in given[:2])
            raise RequestError(f"{names} cannot be used together.", param=given[1])
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
        return [each.text for each in self.inputs or () if each.image is None]

    @property
    def placed_images(self) -> dict[int, PlacedImage]:
        """Return the images to embed by their indexes among all vectors."""
        found = {i: PlacedImage(f"images.{i}", url) for i, url in enumerate(self.images or ())}
        for i, each in enumerate(self.inputs or ()):
            if each.image is not None:
                found[i] = PlacedImage(f"inputs.{i}.content.0", each.image.url)
        return found

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
            input=[*(self.joined_texts or ["-"])],  # unread if there are only images
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
    num_images: int,
    num_tokens: int,
) -> dict[str, Any]:
    """Return the response body, with vectors of each type in the order of the inputs."""
    units = {"input_tokens": num_tokens, **({"images": num_images} if num_images else {})}
    return {
        "id": body_id,
        "response_type": "embeddings_by_type",
        "embeddings": embeddings,
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": units},
    }
