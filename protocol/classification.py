"""Classification: request bodies and response bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from pydantic import PlainValidator

from .bodies import list_body
from .embeddings import InputRequest
from .fields import empty, encodable, fault
from .prompts import MAX_PROMPTS, Prompt, prompts_of

_PAIR = ("text", "text_pair")
_FORM = 'must be an object like {"text": "…", "text_pair": "…"}'


AggregationStrategy = Literal["none", "simple", "first", "average", "max"]
"""How the tokens of a text become spans, by transformers' names."""


class SpanBody(TypedDict):
    """A labeled span of a text: `text` is `input[start:end]`, in characters (code points)."""

    label: str
    score: float
    start: int
    end: int
    text: str


class TextPair(NamedTuple):
    """Two texts that a classifier reads together, such as a premise and a hypothesis."""

    text: str
    text_pair: str


def _inputs(value: object) -> list[Prompt] | list[TextPair]:
    """Return prompts, or the pairs of one object or a list of them."""
    if isinstance(value, dict):
        return [_pair(value)]
    if not isinstance(value, list) or not any(isinstance(item, dict) for item in value[:1]):
        return prompts_of(value)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must not have more than {MAX_PROMPTS:,} pairs: split the request")
    return [_pair(item, index) for index, item in enumerate(value)]


def _pair(value: object, *places: int) -> TextPair:
    if not isinstance(value, dict) or value.keys() != set(_PAIR):
        raise fault(places, _FORM, value)
    for name in _PAIR:
        text = value[name]
        if not isinstance(text, str):
            raise fault((*places, name), "must be a string", text)
        if not text:
            raise fault((*places, name), str(empty()), text)
        try:
            encodable(text)
        except ValueError as exc:
            raise fault((*places, name), str(exc), text) from None
    return TextPair(**value)


class ClassificationRequest(InputRequest):
    """The body of a request to `/v1/classify`: texts, pairs of texts or a conversation.

    Logits are returned as they are with `use_activation: false`. Token classifiers read texts, and
    join their tokens by the `aggregation_strategy`.
    """

    input: Annotated[list[Prompt] | list[TextPair], PlainValidator(_inputs)] | None = None  # type: ignore[assignment]
    aggregation_strategy: AggregationStrategy | None = None

    @property
    def pairs(self) -> list[TextPair]:
        """Return the pairs of texts, none if the input has other forms."""
        return [item for item in self.input or [] if isinstance(item, TextPair)]

    @property
    def prompts(self) -> list[Prompt]:
        """Return the texts or lists of token IDs that are classified one by one."""
        return [item for item in self.input or [] if not isinstance(item, TextPair)]


def classification_body(
    body_id: str,
    *,
    created: int,
    model: str,
    labels: tuple[str, ...],
    values: list[list[float]],
    num_tokens: int,
) -> dict[str, Any]:
    """Return the response body, as in vLLM, with the names of the `labels` that `probs` follow."""
    data = [
        {
            "index": index,
            "label": labels[max(range(len(probs)), key=probs.__getitem__)],
            "probs": probs,
            "num_classes": len(probs),
        }
        for index, probs in enumerate(values)
    ]
    return list_body(
        body_id,
        created=created,
        model=model,
        data=data,
        num_tokens=num_tokens,
        labels=list(labels),
    )


def span_body(
    body_id: str,
    *,
    created: int,
    model: str,
    spans: list[list[SpanBody]],
    num_tokens: int,
) -> dict[str, Any]:
    """Return the response body of a token classifier, with the spans of each text."""
    data = [{"index": index, "spans": own} for index, own in enumerate(spans)]
    return list_body(body_id, created=created, model=model, data=data, num_tokens=num_tokens)
