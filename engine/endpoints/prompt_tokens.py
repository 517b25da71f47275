"""Prompt tokenization, which rejects a text above the context without reading all of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tidemill.protocol.errors import RequestError

from ..text.text_model import TextModel
from ..text.truncation import TruncatingTokenizer, Truncation

# Shorter texts are tokenized unchecked: it takes a few milliseconds at most.
_LONG_TEXT_CHARS = 20_000
# Hardly any tokenizer joins a line break and the letter after it.
_NEW_LINE = re.compile(r"\n(?=[A-Za-z])")


class PromptTokenizer:
    """Tokenizes prompts of one model and rejects prompts above its context."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        # Token ids of a tokenizer without a fast backend are truncated, special tokens included.
        has_backend = model.tokenizer.vocabulary.backend is not None
        self._reader = (
            TruncatingTokenizer(model.tokenizer, model.max_model_len) if has_backend else None
        )

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text; raise `RequestError` for a long text above the context.

        Tokenization of such a text stops once it is known to be too long.
        """
        self.check_text(text, param)
        return self._model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_text(self, text: str, param: str) -> None:
        """Raise `RequestError` for a long text above the context, without reading all of it."""
        if len(text) > _LONG_TEXT_CHARS:
            self._check_least(self._model.tokenizer.least_tokens(text), param)
            if self._reader is not None:
                self._check_least(self._reader.least_tokens_of_longer(text) or 0, param)

    def encode_branches(
        self, texts: Sequence[str], param: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return the token ids of each text; a long beginning that all share is tokenized once.

        It is split off only if that gives the first text the same tokens.
        """
        whole = self.encode(texts[0], param, add_special_tokens=add_special_tokens)
        starts = [match.end() for match in _NEW_LINE.finditer(_common(texts))]
        if len(texts) > 1 and starts:
            heads, tails = texts[0][: starts[-1]], [text[starts[-1] :] for text in texts]
            head = self.encode(heads, param, add_special_tokens=add_special_tokens)
            branches = [
                [*head, *self.encode(tail, param, add_special_tokens=False)] for tail in tails
            ]
            if branches[0] == whole:
                return branches
        return [
            whole,
            *(
                self.encode(text, param, add_special_tokens=add_special_tokens)
                for text in texts[1:]
            ),
        ]

    def encode_truncated(
        self, text: str, cut: Truncation, *, add_special_tokens: bool
    ) -> list[int] | None:
        """Return the token ids of a truncated text; None if the tokenizer cannot truncate."""
        if self._reader is None:
            return None
        return self._reader.encode([text], cut, add_special_tokens=add_special_tokens)[0]

    def check_length(self, num_tokens: int, param: str, *, num_to_come: int = 0) -> None:
        """Reject a prompt that exceeds the context together with the tokens that must follow."""
        if num_tokens + num_to_come > self._model.max_model_len:
            words = f"the prompt has {num_tokens} tokens, which leaves no room for the completion."
            raise self._too_long(words, param)

    @property
    def limit(self) -> str:
        """Return the beginning of each message about the context."""
        return (
            f"This model's maximum context length is {self._model.max_model_len} tokens. However, "
        )

    def _check_least(self, least: int, param: str) -> None:
        if least > self._model.max_model_len:
            raise self._too_long(f"the prompt has at least {least} tokens.", param)

    def _too_long(self, words: str, param: str) -> RequestError:
        return RequestError(f"{self.limit}{words}", param=param, code="context_length_exceeded")


def _common(texts: Sequence[str]) -> str:
    """Return the longest common beginning of texts."""
    first, last = min(texts), max(texts)
    differing = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(differing, min(len(first), len(last)))]
