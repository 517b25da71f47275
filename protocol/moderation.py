"""Moderation: the request body, and the response body with OpenAI's categories."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import PlainValidator

from .embeddings import PoolingRequest
from .fields import encodable, fault
from .prompts import MAX_PROMPTS, prompts_of

CATEGORIES: Final = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening"),
    *("illicit", "illicit/violent"),
    *("self-harm", "self-harm/instructions", "self-harm/intent"),
    *("sexual", "sexual/minors", "violence", "violence/graphic"),
)
"""OpenAI's categories."""

_LEAST_SCORE: Final = 0.5
_HARMLESS: Final = frozenset(
    """
    acceptable appropriate benign clean ham harmless innocuous inoffensive neither neutral none
    normal not ok okay safe sfw
    """.split()
)
# Nouns and adjectives that make a label harmless after "no", "not", "non" or "un".
_HARMS: Final = """
    abuse abusive aggression aggressive bullying cyberbullying explicit flagged harassment harm
    harmful hate hateful hatespeech hostile inappropriate injection insult insulting jailbreak
    malicious misogynistic misogynous misogyny nsfw obscene obscenity offense offensive porn profane
    profanity racism racist selfharm sexism sexist sexual spam suicidal suicide threat threatening
    toxic toxicity unsafe violence violent vulgar
""".split()
_NEGATED: Final = re.compile(f"(no|not|non|un)({'|'.join(_HARMS)})")
_UNNAMED: Final = re.compile("LABEL_[0-9]+")
_SEPARATORS: Final = re.compile("[^a-z0-9]+")
_FORM: Final = "must be a string, a list of strings or a list of text parts"


def _inputs(value: object) -> list[str]:
    """Return the texts; the parts of one list are one text, as in OpenAI's API."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"must not have more than {MAX_PROMPTS:,} parts: split the request")
        return ["\n".join(_part(item, index) for index, item in enumerate(value))]
    texts = prompts_of(value)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(_FORM)
    return [str(text) for text in texts]


def _part(item: object, index: int) -> str:
    text = item.get("text") if isinstance(item, dict) and item.get("type") == "text" else None
    if not isinstance(text, str) or not text:
        raise fault((index,), 'must be a part like {"type": "text", "text": "…"}', item)
    return encodable(text)


class ModerationRequest(PoolingRequest):
    """The body of a request to `/v1/moderations`."""

    input: Annotated[list[str], PlainValidator(_inputs)]


def category_of(label: str) -> str | None:
    """Return the category of a model's label: OpenAI's of that name, else the label itself.

    Case and punctuation do not matter. None for a harmless label, such as `safe` or `not_toxic`.
    """
    name = _plain(label)
    if name in _HARMLESS or _NEGATED.fullmatch(name):
        return None
    return _BY_NAME.get(name, label)


def are_named(labels: Sequence[str]) -> bool:
    """Return whether any of a model's labels has a name, unlike transformers' `LABEL_0`."""
    return not all(map(_UNNAMED.fullmatch, labels))


def moderation_body(
    body_id: str,
    *,
    model: str,
    categories: Sequence[str | None],
    values: Sequence[Sequence[float]],
    is_exclusive: bool,
) -> dict[str, Any]:
    """Return the response body; `categories` are those of the numbers in each of `values`.

    A category applies from 0.5 or, if labels are exclusive, if it is the most likely one. One that
    the model does not have is false, and applies to no input type.
    """
    results = [_result(categories, scores, is_exclusive=is_exclusive) for scores in values]
    return {"id": body_id, "model": model, "results": results}


def _result(
    categories: Sequence[str | None], values: Sequence[float], *, is_exclusive: bool
) -> dict[str, Any]:
    least = max(values) if is_exclusive else _LEAST_SCORE
    scores = dict.fromkeys(CATEGORIES, 0.0)
    flags = dict.fromkeys(CATEGORIES, False)
    types: dict[str, list[str]] = {name: [] for name in CATEGORIES}
    for name, value in zip(categories, values, strict=True):
        if name is not None:
            scores[name] = max(value, scores.get(name, value))
            flags[name] = value >= least or flags.get(name, False)
            types[name] = ["text"]
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": scores,
        "category_applied_input_types": types,
    }


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name.lower())


_BY_NAME: Final[Mapping[str, str]] = {_plain(name): name for name in CATEGORIES}
