"""What the choices of a chat say while they come: stretches read, and shown as deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.answers.answer import CallPiece, Piece
from engine.answers.plain import PlainReading
from engine.endpoints.conversations import Conversation
from engine.endpoints.endpoint import Told
from engine.endpoints.growing import Chunks, GrowingChoices, Growth
from engine.endpoints.logprobs import chat_logprobs, prompt_logprobs
from engine.endpoints.messages import (
    echoed,
    finish_reason,
    num_thinking_tokens,
    shows_reasoning,
)
from engine.protocol.chat import REASONING_FIELDS, chat_choice
from engine.scheduling.sequence import SequenceResult
from engine.text.tokenizer import Tokenizer

_SAYING = (*REASONING_FIELDS, "content", "tool_calls")


class ChatUnfolding:
    """A chat completion as it comes."""

    def __init__(
        self,
        choices: GrowingChoices,
        conversation: Conversation,
        prompt_ids: list[int],
        chunks: Chunks,
        tokenizer: Tokenizer,
    ) -> None:
        self._choices = choices
        self._conversation = conversation
        self._prompt_ids = prompt_ids
        self._chunks = chunks
        self._tokenizer = tokenizer
        num_choices = conversation.request.n or 1
        self._readers = [conversation.reading.reader(place) for place in range(num_choices)]
        self._has_calls = [False] * num_choices
        self._has_said = [False] * num_choices
        self._may_be_silent = not isinstance(conversation.reading, PlainReading)
        self._num_thinking_tokens = 0
        self._is_told = False

    def add(self, place: int, told: Told, result: SequenceResult | None) -> list[dict[str, Any]]:
        """Return the chunks of what came for the choice at this place."""
        chunks = []
        for growth in self._choices.add(place, told, result):
            choice = self._shown(growth)
            if _says(choice):
                chunks.append(self._chunks.of(choice, self._choices) | self._of_prompt(growth))
        return chunks

    def end(self) -> list[dict[str, Any]]:
        """Return the usage, where it was asked for."""
        thought = self._num_thinking_tokens if self._conversation.reading.thinks else None
        return self._chunks.last(self._choices.usage, reasoning_tokens=thought)

    def _of_prompt(self, growth: Growth) -> dict[str, Any]:
        """Return what the first chunk says of the prompt, where it was asked for."""
        if self._is_told:
            return {}
        self._is_told = True
        request, shown = self._conversation.request, dict[str, Any]()
        if request.return_token_ids:
            shown["prompt_token_ids"] = self._prompt_ids
        if request.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(growth.prompt_logprobs, self._tokenizer)
        return shown

    def _shown(self, growth: Growth) -> dict[str, Any]:
        request, ended, reader = (
            self._conversation.request,
            growth.ended,
            self._readers[growth.place],
        )
        pieces = [*reader.push(growth.text)]
        if ended is not None:
            pieces += reader.end()
            self._num_thinking_tokens += num_thinking_tokens(
                ended.result.token_ids, reader.thinking, self._conversation, self._tokenizer
            )
        delta = self._delta(growth, pieces)
        shown = chat_choice(
            growth.place,
            delta,
            said_as="delta",
            logprobs=self._logprobs(growth),
            finish_reason=None
            if ended is None
            else finish_reason(ended.result.finish_reason, has_calls=self._has_calls[growth.place]),
            stop_reason=None if ended is None else ended.stop_reason,
            warnings=[piece.warning for piece in pieces if piece.warning is not None],
        )
        if request.return_token_ids:
            shown["token_ids"] = growth.token_ids
        return shown

    def _delta(self, growth: Growth, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return what came as a delta; put together, content is null where the whole answer's is.

        So the first delta has null, unless there is content or can be nothing else.
        """
        place, request = growth.place, self._conversation.request
        delta = _delta_of(pieces, with_reasoning=shows_reasoning(self._conversation))
        self._has_calls[place] |= "tool_calls" in delta
        if growth.is_first:
            content = echoed(request) + delta.get("content", "")
            delta = {"role": "assistant", **delta, "content": content or None}
        self._has_said[place] |= any(delta.get(name) for name in _SAYING)
        if not self._has_said[place] and (growth.ended or not self._may_be_silent):
            delta["content"] = ""
            self._has_said[place] = True
        return delta

    def _logprobs(self, growth: Growth) -> dict[str, Any] | None:
        request = self._conversation.request
        if not request.logprobs:
            return None
        as_ids = bool(request.return_tokens_as_token_ids)
        return chat_logprobs(growth.logprobs, self._tokenizer, as_ids=as_ids)


def _says(choice: dict[str, Any]) -> bool:
    """Say whether there is anything to tell: some tokens bring no text, or none yet."""
    return bool(
        choice["delta"]
        or choice["finish_reason"]
        or choice["logprobs"]
        or choice.get("token_ids")
        or choice.get("warnings")
    )


def _delta_of(pieces: Iterable[Piece], *, with_reasoning: bool) -> dict[str, Any]:
    """Return the pieces that came at once as one delta, without what none of them has."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        reasoning = piece.reasoning if with_reasoning else ""
        said = (*((name, reasoning) for name in REASONING_FIELDS), ("content", piece.content))
        for name, text in said:
            if text:
                delta[name] = delta.get(name, "") + text
        for more in piece.calls:
            if (begun := calls.get(more.index)) is None:
                calls[more.index] = _call_of(more)
            else:
                begun["function"]["arguments"] += more.arguments
    if calls:
        delta["tool_calls"] = [*calls.values()]
    return delta


def _call_of(piece: CallPiece) -> dict[str, Any]:
    function = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.index, "function": function}
    return {
        "index": piece.index,
        "id": piece.call_id,
        "type": "function",
        "function": {"name": piece.name, **function},
    }
