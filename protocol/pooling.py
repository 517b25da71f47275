"""Pooling: the request body and the response body of vLLM's `/pooling`."""

from __future__ import annotations

from typing import Any, Literal

from .bodies import list_body
from .embeddings import EncodingFormat, InputRequest

PoolTask = Literal["embed", "classify", "token_embed", "token_classify"]


class PoolRequest(InputRequest):
    """The body of a request to `/pooling`: numbers of each input, or of each of its tokens.

    Without a `task` it is the first one of the model, as in vLLM from 0.21 on.
    """

    task: PoolTask | None = None
    encoding_format: EncodingFormat | None = None


def pooling_body(
    body_id: str,
    *,
    created: int,
    model: str,
    values: list[Any],
    num_tokens: int,
) -> dict[str, Any]:
    """Return the response body, as in vLLM, with the `values` of each input in order.

    They are numbers, a list of numbers for each token, or their bytes in base64.
    """
    data = [
        {"index": index, "object": "pooling", "data": each} for index, each in enumerate(values)
    ]
    return list_body(body_id, created=created, model=model, data=data, num_tokens=num_tokens)
