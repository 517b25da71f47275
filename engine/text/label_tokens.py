"""Label tokens: the tokens that spell short labels, alone and one after another."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from threading import Lock

from tidemill.protocol.errors import RequestError

from .text_model import TextModel

_LETTERS = string.ascii_uppercase
_DIGITS = string.digits
# A space, and as many bytes as a label has.
_MAX_PIECE_BYTES = 5

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTree:
    """Every way in which a model's tokens spell one of some labels.

    `next_tokens` has the tokens that may follow each unfinished path, the empty one first;
    `label_of` has the index of the label that a finished path spells.
    """

    next_tokens: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    label_of: dict[Path, int] = field(default_factory=dict)


NO_LABELS = LabelTree()


class LabelTokens:
    """Labels of one model's decisions, and the tokens that spell them; safe to use from threads."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._lock = Lock()
        self._index: dict[bytes, list[int]] | None = None
        self._trees: dict[tuple[tuple[str, ...], bool], LabelTree] = {}

    def letters(self, count: int) -> tuple[str, ...]:
        """Return labels for `count` options: single letters, or pairs of letters above 26.

        Pairs that are one token come first. No label begins another one.
        """
        if count <= len(_LETTERS):
            return tuple(_LETTERS[:count])
        pairs = ["".join(pair) for pair in product(_LETTERS, repeat=2)]
        index = self._pieces
        pairs.sort(key=lambda pair: pair.encode() not in index)
        return tuple(pairs[:count])

    def levels(self, count: int) -> tuple[str, ...]:
        """Return labels for the levels of a scale: digits, or pairs of letters above ten."""
        if count <= len(_DIGITS):
            return tuple(_DIGITS[:count])
        return self.letters(max(count, len(_LETTERS) + 1))[:count]

    def tree(self, labels: Sequence[str], *, after_space: bool = False) -> LabelTree:
        """Return the ways to spell the labels; raise `RequestError` if one cannot be spelled.

        A space may come before each, unless it comes `after_space`, such as a new line.
        """
        key = tuple(labels), after_space
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = self._built(*key)
        return tree

    def _built(self, labels: Sequence[str], after_space: bool) -> LabelTree:  # noqa: FBT001
        tree, index = LabelTree(), self._pieces
        follow: dict[Path, dict[int, None]] = {(): {}}

        def spell(path: Path, rest: bytes, label: int) -> bool:
            """Add all paths from `path` that spell the rest of a label."""
            can_end = False
            for length in range(1, len(rest) + 1):
                for token in index.get(rest[:length], ()):
                    longer = (*path, token)
                    if length == len(rest):
                        tree.label_of[longer] = label
                    elif not spell(longer, rest[length:], label):
                        continue
                    follow.setdefault(path, {})[token] = None
                    can_end = True
            return can_end

        for label, text in enumerate(labels):
            spellings = (text,) if after_space else (text, f" {text}")
            was_spelled = [spell((), spelling.encode(), label) for spelling in spellings]
            if not any(was_spelled):
                raise RequestError(
                    f"This model's tokenizer cannot write the label {text!r}, which decisions "
                    "need: use another model.",
                    param="questions",
                    code="decisions_not_supported",
                )
        tree.next_tokens.update((path, tuple(tokens)) for path, tokens in follow.items())
        return tree

    @property
    def _pieces(self) -> dict[bytes, list[int]]:
        """Return the tokens by their bytes, without special and long ones."""
        with self._lock:
            if self._index is None:
                tokenizer, index = self._model.tokenizer, dict[bytes, list[int]]()
                for token in range(self._model.vocab_size):
                    if tokenizer.is_special(token):
                        continue
                    piece = tokenizer.piece(token)
                    if 0 < len(piece) <= _MAX_PIECE_BYTES:
                        index.setdefault(piece, []).append(token)
                self._index = index
            return self._index
