"""Transcripts: the text of a recording, joined segment by segment, whole or as a stream.

A chunk is both an OpenAI event (`transcript.text.delta`, last `transcript.text.done`) and a vLLM
chunk: clients of each API read their own fields.
"""

from __future__ import annotations

from typing import Any

from tidemill.protocol.audio import UNSPACED
from tidemill.protocol.bodies import response_id, usage_body
from tidemill.protocol.stream import StreamOptions

from ..scheduling.speech import SpeechResult, Task
from ..text.tokenizer import Tokenizer
from .endpoint import OutputDelta, RequestMetadata

_PREFIXES = {"transcribe": "trsc", "translate": "trsl"}
_KINDS = {"transcribe": "transcription.chunk", "translate": "translation.chunk"}


def is_unspaced(task: Task, language: str | None) -> bool:
    """Return whether the text's language is written without spaces between words."""
    return task == "transcribe" and language in UNSPACED


class Transcript:
    """The text of segments as they arrive, without leading or trailing whitespace."""

    def __init__(self, tokenizer: Tokenizer, task: Task) -> None:
        self._tokenizer = tokenizer
        self._task = task
        self._last = self._held = ""
        self._has_begun = False

    def add(self, part: SpeechResult) -> str:
        """Return the text that new segments add."""
        joint = "" if is_unspaced(self._task, part.language) else " "
        text = self._held
        for segment in part.segments:
            piece = self._tokenizer.text(segment.token_ids)
            if piece and self._last and not (self._last.isspace() or piece[0].isspace()):
                piece = joint + piece
            text += piece
            self._last = piece[-1:] or self._last
        if not self._has_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._has_begun = self._has_begun or bool(shown)
        return shown


class TranscriptStream:
    """A streamed transcript, window by window."""

    def __init__(
        self, tokenizer: Tokenizer, task: Task, metadata: RequestMetadata, options: StreamOptions
    ) -> None:
        self._transcript = Transcript(tokenizer, task)
        self._texts: list[str] = []
        self._options = options
        self._usage: dict[str, Any] = {}
        self._frame = {
            "id": response_id(_PREFIXES[task], metadata.request_id),
            "object": _KINDS[task],
            "created": metadata.created,
            "model": metadata.model,
        }

    def add(
        self, place: int, delta: OutputDelta, result: SpeechResult | None
    ) -> list[dict[str, Any]]:
        """Return the chunk of a window's text, and the last one with the result."""
        del place
        chunks = []
        part: SpeechResult | None = delta.part
        if part is not None:
            self._usage = usage_body(part.num_prompt_tokens, part.num_output_tokens)
            if text := self._transcript.add(part):
                self._texts.append(text)
                chunks.append(self._delta(text))
        if result is not None:
            chunks.append(self._done(result))
        return chunks

    def end(self) -> list[dict[str, Any]]:
        """Return the usage in vLLM's format, if it is requested."""
        if not self._options.include_usage:
            return []
        return [self._frame | {"choices": [], "usage": self._usage}]

    def _delta(self, text: str) -> dict[str, Any]:
        event = {"type": "transcript.text.delta", "delta": text}
        chunk = event | self._frame | {"choices": [_choice(text, None)]}
        return chunk | {"usage": self._usage} if self._options.continuous_usage_stats else chunk

    def _done(self, result: SpeechResult) -> dict[str, Any]:
        num_in, num_out = result.num_prompt_tokens, result.num_output_tokens
        usage = {
            "type": "tokens",
            "input_tokens": num_in,
            "output_tokens": num_out,
            "total_tokens": num_in + num_out,
        }
        event = {"type": "transcript.text.done", "text": "".join(self._texts)}
        return event | self._frame | {"choices": [_choice("", "stop")], "usage": usage}


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "delta": {"content": text},
        "finish_reason": finish_reason,
        "stop_reason": None,
    }
