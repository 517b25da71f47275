"""What vectors and scores ask of the engine: texts and pairs of texts into sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.model.encoders.description import EncoderDescription
from engine.protocol.errors import RequestError
from engine.protocol.messages import Message
from engine.protocol.pooling import PoolingRequest
from engine.protocol.prompts import Prompt
from engine.protocol.scoring import ScoringRequest
from engine.protocol.validation import shown
from engine.scheduling.encoding import EncodingRequest
from engine.text.chat_template import ChatTemplate
from engine.text.reader import Cut, TextReader

_MAX_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """What the endpoints know of a model that gives vectors or scores.

    `template` renders conversations, and pairs for a reranker that `reads_pairs_by_template`.
    `max_model_len` counts the tokens of a sequence, special ones too; ids lie below `vocab_size`.
    `width` is how many numbers a vector has. `has_types`: the segments of a pair differ.
    """

    reader: TextReader
    template: ChatTemplate | None
    reads_pairs_by_template: bool
    max_model_len: int
    vocab_size: int
    width: int
    has_types: bool
    description: EncoderDescription


class Encodings:
    """Makes the sequences of one model's requests."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self._reader = model.reader

    def of_prompts(
        self,
        prompts: Sequence[Prompt],
        request: PoolingRequest,
        *,
        param: str,
        add_special_tokens: bool = True,
        prefix: str = "",
        limit: int | None = None,
    ) -> list[EncodingRequest]:
        """Return a sequence for each text, with `prefix` before it, or list of token ids.

        Of a text itself no more than `limit` tokens are read; 0 and None are no limit.
        Raises `RequestError` naming `param` for what the model cannot take.
        """
        cut, num_skipped = self._cut(request), 0
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if limit:
            texts = [self._reader.start_of(text, limit) for text in texts]
        if texts:
            texts = [prefix + text for text in texts]
            read = self._reader.texts(texts, cut, add_special_tokens=add_special_tokens)
            num_skipped = self._num_skipped(prefix, add_special_tokens=add_special_tokens)
        else:
            read = [_shortened(ids, cut) for ids in prompts if isinstance(ids, list)]
            self._check_ids(read, param)
        self._check_lengths(read, param, texts)
        return [EncodingRequest(ids, num_skipped=num_skipped) for ids in read]

    def of_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        request: ScoringRequest,
        *,
        param: str,
        created: int,
    ) -> list[EncodingRequest]:
        """Return a sequence for each of `seconds`, behind its first text or the only one.

        Raises `RequestError` naming `param` for what the model cannot take.
        """
        if self._model.reads_pairs_by_template:
            read = self._templated(firsts, seconds, request, created)
            self._check_lengths(read, param, seconds)
            return [EncodingRequest(ids) for ids in read]
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise RequestError(
                    f"`{name}` is for a template, and this model reads pairs without one; "
                    "`--chat-template` gives it one.",
                    param=name,
                )
        pairs = self._reader.pairs(firsts, seconds, self._cut(request))
        self._check_lengths([pair.ids for pair in pairs], param, seconds)
        has_types = self._model.has_types
        return [EncodingRequest(pair.ids, pair.type_ids if has_types else None) for pair in pairs]

    def rendered(self, messages: Sequence[Message], *, created: int, **options: Any) -> str:
        """Return the text of a conversation; `RequestError` where the model has no template."""
        if self._model.template is None:
            raise RequestError(
                "This model has no chat template: send `input`, or run it with `--chat-template`.",
                param="messages",
            )
        return self._model.template.render(messages, created=created, **options)

    def prompt_of(self, name: str | None) -> str:
        """Return the prompt of a name, the model's default one where none is given."""
        description = self._model.description
        if name is None:
            default = description.default_prompt_name
            return "" if default is None else description.prompts[default]
        if name not in description.prompts:
            names = ", ".join(sorted(description.prompts)[:_MAX_NAMES_SHOWN])
            raise RequestError(
                f"`prompt_name` {shown(name)} is no prompt of this model; it has "
                f"{names or 'none'}.",
                param="prompt_name",
            )
        return description.prompts[name]

    def _num_skipped(self, prefix: str, *, add_special_tokens: bool) -> int:
        """Return how many tokens of a prompt, and before it, are left out of what is pooled."""
        pooling = self._model.description.pooling
        if not prefix or pooling is None or pooling.include_prompt:
            return 0
        return self._reader.num_opening(prefix, add_special_tokens=add_special_tokens)

    def _templated(
        self, firsts: Sequence[str], seconds: Sequence[str], request: ScoringRequest, created: int
    ) -> list[list[int]]:
        cut = self._cut(request)
        heads = list(firsts) * (len(seconds) if len(firsts) == 1 else 1)
        told = {} if request.instruction is None else {"instruction": request.instruction}
        variables = {
            "add_generation_prompt": False,
            **self._model.description.template_variables,
            **told,
            **(request.chat_template_kwargs or {}),
        }
        opens = bool(variables.pop("add_generation_prompt"))

        def text_of(first: str, second: str) -> str:
            pair = [Message(role="query", content=first), Message(role="document", content=second)]
            return self.rendered(
                pair, created=created, add_generation_prompt=opens, variables=variables
            )

        return [
            self._templated_pair(first, second, cut, text_of)
            for first, second in zip(heads, seconds, strict=True)
        ]

    def _templated_pair(
        self, first: str, second: str, cut: Cut, text_of: Callable[[str, str], str]
    ) -> list[int]:
        """Return a pair as the template has it, its second text cut until all of it fits."""
        if cut.max_first:
            first = self._reader.start_of(first, cut.max_first)
        if cut.max_second:
            second = self._reader.start_of(second, cut.max_second)
        while True:
            [ids] = self._reader.texts([text_of(first, second)], Cut())
            excess = 0 if cut.max_tokens is None else len(ids) - cut.max_tokens
            if excess <= 0:
                return ids
            num_left = self._reader.num_tokens(second) - excess
            if num_left < 1:
                raise RequestError(
                    "`truncate_prompt_tokens` is too small: it leaves no token of the document.",
                    param="truncate_prompt_tokens",
                )
            second = self._reader.start_of(second, num_left)

    def _cut(self, request: PoolingRequest) -> Cut:
        max_tokens = request.truncate_prompt_tokens
        limit = self._model.max_model_len
        if max_tokens is not None and max_tokens > limit:
            raise RequestError(
                f"`truncate_prompt_tokens` ({max_tokens}) must not be above {limit}, which is as "
                "much as this model takes; -1 stands for that.",
                param="truncate_prompt_tokens",
            )
        cut = Cut(
            max_tokens=limit if max_tokens == -1 else max_tokens,
            side=request.truncation_side or "right",
        )
        if not isinstance(request, ScoringRequest):
            return cut
        first, second = (
            min(tokens, limit) if tokens else None
            for tokens in (request.max_tokens_per_query, request.max_tokens_per_doc)
        )
        return replace(cut, max_first=first, max_second=second)

    def _check_lengths(self, read: Sequence[list[int]], param: str, texts: Sequence[str]) -> None:
        """Refuse what the context cannot hold; `texts` are what was read, if it was texts."""
        limit = self._model.max_model_len
        for number, ids in enumerate(read, 1):
            if len(ids) > limit:
                which = f"text {number} of `{param}`" if len(read) > 1 else f"`{param}`"
                is_part = bool(texts) and len(texts[number - 1]) > self._reader.max_chars
                raise RequestError(
                    f"This model's maximum context length is {limit} tokens. However, {which} has "
                    f"{'at least ' if is_part else ''}{len(ids)} tokens; `truncate_prompt_tokens` "
                    "cuts what is longer.",
                    param=param,
                    code="context_length_exceeded",
                )
            if not ids:
                raise RequestError(f"`{param}` has no tokens.", param=param)

    def _check_ids(self, read: Sequence[list[int]], param: str) -> None:
        size = self._model.vocab_size
        for ids in read:
            for token_id in (min(ids), max(ids)):
                if not 0 <= token_id < size:
                    raise RequestError(
                        f"`{param}` names token {token_id}; this model has tokens 0 to {size - 1}.",
                        param=param,
                    )


def _shortened(ids: list[int], cut: Cut) -> list[int]:
    if cut.max_tokens is None:
        return ids
    return ids[-cut.max_tokens :] if cut.side == "left" else ids[: cut.max_tokens]
