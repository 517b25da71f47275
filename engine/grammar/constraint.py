"""A constraint on an output, and the watch that holds one sequence to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.grammar.beginning import Beginning
from engine.protocol.errors import RequestError


class MakesMatchers(Protocol):
    """Makes what goes through a grammar, from its beginning; knows the bytes of tokens."""

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return one of a grammar that was made before, quickly where that was lately."""

    def fresh_matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return one that shares nothing with any other."""

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""


@dataclass(frozen=True, slots=True)
class TextConstraint:
    """An output is a text of a `grammar`, from behind a beginning on where there is one.

    A sequence may begin with the token `opener`, and only then has a beginning; without one, all
    have. The field `param` asked for it. A `Constraint`.
    """

    grammar: str
    beginning: Beginning | None
    made_by: MakesMatchers
    param: str = field(compare=False)
    opener: int | None = None

    def begin(self) -> TextWatch:
        """Begin to hold one sequence to it, before its first token."""
        return TextWatch(self)


class TextWatch:
    """Holds one sequence to its grammar; what goes through that is made when first asked."""

    __slots__ = ("_asked", "_matcher", "_may_open", "_tail", "_token_ids")

    def __init__(self, asked: TextConstraint) -> None:
        self._asked = asked
        self._matcher: LLMatcher | None = None
        self._token_ids: list[int] = []  # of the grammar
        self._may_open = asked.opener is not None
        is_behind = asked.beginning is None or self._may_open
        self._tail = None if is_behind else b""  # None behind the beginning

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write which tokens may come next."""
        if self._tail is not None:
            assert self._asked.beginning is not None
            self._asked.beginning.fill(self._tail, mask)
            return True
        if self._matcher is None:
            self._matcher = self._asked.made_by.matcher(self._asked.grammar, self._asked.param)
        if not _filled(self._matcher, mask):
            self._matcher = self._again()
            if not _filled(self._matcher, mask):
                raise self._stuck(self._matcher.get_error())
        if self._may_open:
            assert self._asked.opener is not None
            mask[self._asked.opener // 32] |= np.uint32(1 << self._asked.opener % 32)
        return True

    def push(self, token_id: int) -> bool:
        """Append one generated token and say whether the text is whole."""
        if self._may_open and token_id == self._asked.opener:
            self._tail = b""
        self._may_open = False
        if self._tail is not None:
            self._note_before(token_id)
            return False
        assert self._matcher is not None, "a token came before any was asked for"
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._matcher = self._again()
        if self._matcher.is_error():
            raise self._stuck(self._matcher.get_error())
        return self._matcher.is_stopped()

    def _again(self) -> LLMatcher:
        """Go through all tokens anew.

        Others of this grammar may have used up what it may take: a row depends on none of them.
        """
        matcher = self._asked.made_by.fresh_matcher(self._asked.grammar, self._asked.param)
        matcher.consume_tokens(self._token_ids)
        return matcher

    def _note_before(self, token_id: int) -> None:
        """Take a token of what stands before; the grammar begins behind the last one."""
        assert self._asked.beginning is not None
        assert self._tail is not None
        wanted = self._asked.beginning.text
        tail = self._tail + self._asked.made_by.piece(token_id)
        self._tail = None if wanted in tail else tail[-len(wanted) :]

    def _stuck(self, error: str) -> RequestError:
        return RequestError(
            f"`{self._asked.param}` allows nothing more after {len(self._token_ids)} tokens: "
            f"{first_words(error)}",
            param=self._asked.param,
            code="constraint_cannot_be_held",
        )


def first_words(error: str) -> str:
    """Return what an error of llguidance says, without what it knows of itself."""
    return error.split("\n<", 1)[0].strip()


def _filled(matcher: LLMatcher, mask: NDArray[np.uint32]) -> bool:
    """Fill a mask, and say whether that went well."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return not matcher.is_error()
