"""Pooling: the request body and the response body of vLLM's `/pooling`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from .bodies import list_body
from .embeddings import EncodingFormat, InputRequest, check_prompt_name
from .fields import Text
from .prompts import Prompts

PoolTask = Literal["embed", "embed_sparse", "classify", "token_embed", "token_classify"]


class PoolRequest(InputRequest):
    """The body of a request to `/pooling`: numbers of each input, or of each of its tokens.

    Without a `task` it is the first one of the model, as in vLLM from 0.21 on. `prompt_name`
    selects one of the model's prompts for texts, such as `query` and `document` of ColBERT.
    """

    task: PoolTask | None = None
    encoding_format: EncodingFormat | None = None
    prompt_name: Text | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse a prompt for anything but texts."""
        check_prompt_name(self.prompt_name, self.input)
        return self


class SparseEmbedRequest(BaseModel):
    """The body of a request to `/embed_sparse` of text-embeddings-inference."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    inputs: Prompts
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    prompt_name: Text | None = None

    def pooling(self) -> dict[str, Any]:
        """Return the body of the same request to `/pooling`."""
        return {
            "model": self.model,
            "task": "embed_sparse",
            "input": self.inputs,
            "prompt_name": self.prompt_name,
            "truncate_prompt_tokens": -1 if self.truncate else None,
            "truncation_side": (self.truncation_direction or "right").lower(),
        }


def pooling_body(
    body_id: str,
    *,
    created: int,
    model: str,
    values: list[Any],
    num_tokens: int,
) -> dict[str, Any]:
    """Return the response body, as in vLLM, with the `values` of each input in order.

    They are numbers, a list of numbers for each token, their bytes in base64, or the pairs of index
    and value of a sparse vector, as in text-embeddings-inference.
    """
    data = [
        {"index": index, "object": "pooling", "data": each} for index, each in enumerate(values)
    ]
    return list_body(body_id, created=created, model=model, data=data, num_tokens=num_tokens)
