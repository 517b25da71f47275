"""Items of texts: the answer to each text of a list, from requests with many texts each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from tidemill.protocol.validation import short_repr

from .errors import RequestFailed
from .progress import progress_of

TEXTS_PER_REQUEST: Final = 64

Text = str | tuple[str, str]
"""A text, or a pair of texts."""


def items_of(
    answer_many: Callable[..., Iterable[Any]],
    texts: Iterable[Text],
    url: str,
    params: Mapping[str, Any],
    *,
    progress: bool,
    per_request: int = TEXTS_PER_REQUEST,
) -> Iterator[dict[str, Any]]:
    """Yield the item of each text, with the `labels` of its body; raises RequestFailed.

    `answer_many` is the engine's; it gets `per_request` texts at a time.
    """
    if isinstance(texts, str):
        raise TypeError("`texts` must be a list of texts, not one text")
    remaining, bodies = iter(texts), []
    while some := list(islice(remaining, per_request)):
        bodies.append({**params, "input": [*map(_input_of, some)]})
    num_texts = sum(len(body["input"]) for body in bodies)
    with progress_of("texts", num_texts, is_wanted=progress) as shown:
        for answer in answer_many(bodies, url=url, progress=False):
            if isinstance(answer, RequestFailed):
                raise answer
            for item in answer["data"]:
                yield {**item, "labels": answer.get("labels")}
            shown.add(len(answer["data"]))


def _input_of(text: Text) -> Any:
    """Return a text, token IDs, or a pair of texts as an object."""
    if not isinstance(text, tuple) or not any(isinstance(part, str) for part in text):
        return text
    if [*map(type, text)] != [str, str]:
        raise TypeError(f"a pair must have two texts; got {short_repr(text)}")
    return dict(zip(("text", "text_pair"), text, strict=True))
