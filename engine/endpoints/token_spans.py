"""Spans of labels: probabilities of a text's tokens, aggregated as by transformers' pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.classification import AggregationStrategy, SpanBody

from ..text.text_tokens import TextTokens
from .vectors import as_numbers

_OUTSIDE = "O"
_PREFIXES = ("B-", "I-")


class _Pieces(NamedTuple):
    """Tokens or words: the label of each, its probability, its first and its last character + 1."""

    labels: NDArray[np.int64]
    scores: NDArray[np.float32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class _Names(NamedTuple):
    """The name of each label in spans, and whether it is inside of entities."""

    names: Sequence[str]
    are_inside: NDArray[np.bool_]

    @classmethod
    def of(cls, names: Sequence[str]) -> _Names:
        return cls(names, np.array([name != _OUTSIDE for name in names]))


class SpanReader:
    """Finds the spans of a model's labels, which may have BIO prefixes (`B-`, `I-`)."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = _Names.of(labels)
        self._entities = _Names.of([label.split("-", 1)[-1] for label in labels])
        tags = [label[2:] if label.startswith(_PREFIXES) else label for label in labels]
        self._tags = np.array([tags.index(tag) for tag in tags])
        self._begins = np.array([label.startswith("B-") for label in labels])

    def spans(
        self, probs: NDArray[np.float32], tokens: TextTokens, strategy: AggregationStrategy
    ) -> list[SpanBody]:
        """Return the spans of a text in their order, except those outside of entities.

        `probs [t, L]` are those of the tokens in `tokens`. A token is a span with `none`. Otherwise
        neighbours of one entity are joined: tokens with `simple`, and with other strategies words,
        whose label is that of their first token (`first`), of their most certain one (`max`) or of
        their mean (`average`).
        """
        if not len(probs):
            return []
        if strategy in ("none", "simple"):
            labels = probs.argmax(axis=1)
            pieces = _Pieces(labels, _chosen(probs, labels), tokens.starts, tokens.ends)
        else:
            pieces = _words(probs, tokens, strategy)
        if strategy == "none":
            return [*_bodies(pieces, self._labels, tokens.text)]
        return [*_bodies(self._joined(pieces), self._entities, tokens.text)]

    def _joined(self, pieces: _Pieces) -> _Pieces:
        """Return entities of neighbours with one tag; a label with `B-` begins another one."""
        labels, scores, starts, ends = pieces
        tags = self._tags[labels]
        is_first = np.concatenate([[True], (tags[1:] != tags[:-1]) | self._begins[labels[1:]]])
        firsts = np.flatnonzero(is_first)
        nexts = np.append(firsts[1:], len(labels))
        means = np.add.reduceat(scores, firsts) / (nexts - firsts)
        return _Pieces(labels[firsts], means.astype(np.float32), starts[firsts], ends[nexts - 1])


def _words(
    probs: NDArray[np.float32], tokens: TextTokens, strategy: AggregationStrategy
) -> _Pieces:
    is_first = ~tokens.is_subword
    is_first[0] = True
    firsts = np.flatnonzero(is_first)
    nexts = np.append(firsts[1:], len(probs))
    of_words: NDArray[Any]
    if strategy == "first":
        of_words = probs[firsts]
    elif strategy == "average":
        sums = np.add.reduceat(probs, firsts, axis=0)
        of_words = sums / (nexts - firsts).astype(np.float32)[:, None]
    else:
        likeliest = probs.max(axis=1)
        spans = zip(firsts.tolist(), nexts.tolist(), strict=True)
        of_words = probs[[first + int(likeliest[first:stop].argmax()) for first, stop in spans]]
    labels = of_words.argmax(axis=1)
    return _Pieces(labels, _chosen(of_words, labels), tokens.starts[firsts], tokens.ends[nexts - 1])


def _chosen(probs: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[Any]:
    chosen: NDArray[Any] = probs[np.arange(len(labels)), labels]
    return chosen


def _bodies(pieces: _Pieces, found: _Names, text: str) -> Iterator[SpanBody]:
    names, is_inside = found.names, found.are_inside[pieces.labels]
    labels, scores, starts, ends = (values[is_inside] for values in pieces)
    rows = zip(labels.tolist(), as_numbers(scores), starts.tolist(), ends.tolist(), strict=True)
    for label, score, start, end in rows:
        yield {
            "label": names[label],
            "score": score,
            "start": start,
            "end": end,
            "text": text[start:end],
        }
