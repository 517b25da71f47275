"""Scoring, reranking and generative scoring: request bodies and response bodies."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from .bodies import list_body
from .embeddings import PoolingRequest
from .errors import RequestError
from .fields import MAX_NAMED_TOKENS, Count, Priority, Text, empty, encodable, fault
from .prompts import OnePrompt, Prompts

MAX_TEXTS = 2_048

_FORM = 'must be a string or an object like {"text": "…"}'
_FORMS = 'must be a string, an object like {"text": "…"}, or a list of either'
_SIDES = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
_OF_SCORES = ("text_1", "text_2", "data_1", "data_2", "queries", "items")


def _text(value: object) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        # Of the two, pydantic only handles ValueError as invalid input.
        raise ValueError(_FORM)  # noqa: TRY004
    if not text:
        raise empty()
    return encodable(text)


def _texts(value: object) -> list[str]:
    if isinstance(value, str | dict):
        return [_text(value)]
    if not isinstance(value, list):
        raise ValueError(_FORMS)  # noqa: TRY004
    if not value:
        raise empty()
    if len(value) > MAX_TEXTS:
        raise ValueError(f"must not have more than {MAX_TEXTS:,} texts: split the request")
    texts = []
    for index, item in enumerate(value):
        try:
            texts.append(_text(item))
        except ValueError as exc:
            raise fault((index,), str(exc), item) from None
    return texts


OneText = Annotated[str, PlainValidator(_text)]
Texts = Annotated[list[str], PlainValidator(_texts)]


class ScoringRequest(PoolingRequest):
    """Fields of score and rerank requests.

    A document is truncated to `max_tokens_per_doc` tokens, a query to `max_tokens_per_query`; 0 is
    no limit. `instruction` is for the template of a reranker.
    """

    max_tokens_per_query: Count | None = None
    max_tokens_per_doc: Count | None = None
    instruction: Text | None = None


class ScoreRequest(ScoringRequest):
    """The body of a request to `/v1/score`: two sides, under one of four pairs of names.

    One text is scored against each text of the other side, or equal numbers pairwise.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse a body without two sides, or with sides of incompatible lengths."""
        given = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        if given not in map(set, _SIDES):
            ways = ", ".join(f"`{first}` and `{second}`" for first, second in _SIDES)
            raise RequestError(f"A score requires two sides: {ways}.", param="text_1")
        firsts, seconds = self.sides
        if len(firsts) not in (1, len(seconds)):
            first, second = self.names
            raise RequestError(
                f"`{first}` has {len(firsts)} texts and `{second}` has {len(seconds)}: the first"
                " must have one text, or both the same number.",
                param=first,
            )
        return self

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the two sides."""
        return next(names for names in _SIDES if all(getattr(self, name) for name in names))

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of the two sides."""
        first, second = self.names
        return getattr(self, first), getattr(self, second)


class RerankRequest(ScoringRequest):
    """The body of a request to `/v1/rerank` or `/v2/rerank`.

    A `top_n` of 0, or above the number of documents, returns all of them.
    """

    query: OneText
    documents: Texts
    top_n: Count | None = None
    return_documents: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_one(cls, body: Any) -> Any:
        """Refuse a body that also contains a side of a score."""
        others = [name for name in _OF_SCORES if isinstance(body, dict) and body.get(name)]
        if others and "documents" in body:
            raise RequestError(
                f"`{others[0]}` and `query` cannot be used together: send one pair of sides.",
                param=others[0],
            )
        return body

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the two sides."""
        return "query", "documents"

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of the two sides."""
        return [self.query], self.documents


class GenerativeScoringRequest(BaseModel):
    """The body of a request to `/v1/generative_scoring`, as in vLLM and SGLang.

    Each of the `items` follows the `query` (or precedes it with `item_first`), and the tokens
    `label_token_ids` are scored as the next token: among themselves, or among all tokens
    without `apply_softmax`. Special tokens are added only to the query.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None

    query: OnePrompt
    items: Prompts
    label_token_ids: Annotated[
        list[Count], Field(fail_fast=True, min_length=1, max_length=MAX_NAMED_TOKENS)
    ]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    priority: Priority | None = None


def score_body(
    body_id: str, *, created: int, model: str, scores: list[float], num_tokens: int
) -> dict[str, Any]:
    """Return the response body, with scores in the order of their pairs."""
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return list_body(body_id, created=created, model=model, data=data, num_tokens=num_tokens)


def generative_scoring_body(
    body_id: str,
    *,
    created: int,
    model: str,
    scores: list[list[float]],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """Return the response body: the score of each item's first label, then those of all labels.

    vLLM returns the former, SGLang the latter.
    """
    firsts = [of_item[0] for of_item in scores]
    body = score_body(body_id, created=created, model=model, scores=firsts, num_tokens=0)
    return body | {"scores": scores, "usage": usage}


def rerank_body(
    body_id: str, *, model: str, scores: list[float], request: RerankRequest, num_tokens: int
) -> dict[str, Any]:
    """Return the response body, with documents by descending score, then by index."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in order[: request.top_n or None]:
        result: dict[str, Any] = {"index": index}
        if request.return_documents is not False:
            result["document"] = {"text": request.documents[index]}
        results.append({**result, "relevance_score": scores[index]})
    return {
        "id": body_id,
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "results": results,
    }
