"""Pooling: the request body and the response body of vLLM's `/pooling`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from .bodies import list_body
from .embeddings import EncodingFormat, InputRequest, check_prompt_name
from .fields import Text

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
