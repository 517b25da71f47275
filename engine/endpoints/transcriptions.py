"""`/v1/audio/transcriptions` and `/v1/audio/translations`: a recording in, what was said out.

The body of every format is a JSON object, since a row is one: `text` holds the words, or the whole
document of `srt` and `vtt`. Times are in seconds from the recording's start.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.backpressure import MemoryBudget
from engine.config import MAX_DECODING_BYTES
from engine.contract import Reply, Usage
from engine.endpoints.endpoint import Check, Fetched, Heading, Prepared, Unfolding
from engine.endpoints.sequences import seed_of_choice
from engine.endpoints.subtitles import Cue, srt, vtt
from engine.endpoints.transcripts import Transcript, TranscriptUnfolding, is_unspaced
from engine.protocol.audio import (
    FILE,
    FILE_URL,
    TranscriptionRequest,
    TranslationRequest,
    inline_recording,
    too_large,
)
from engine.protocol.errors import RequestError
from engine.protocol.languages import LANGUAGES
from engine.protocol.requests import read_body
from engine.protocol.routes import TRANSCRIPTIONS, TRANSLATIONS
from engine.protocol.stream import StreamOptions
from engine.scheduling.sequence import Sampling
from engine.scheduling.speech import Hearing, SpeechRequest, SpeechResult, SpeechSegment, Task
from engine.text.tokenizer import Tokenizer
from engine.text.words import words_of

_ROUTES = {"transcribe": TRANSCRIPTIONS, "translate": TRANSLATIONS}
_SENT = "data:;base64,"  # stands for what is there already
_TIMED_FORMATS = frozenset({"verbose_json", "srt", "vtt"})


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """What the endpoints know of a model that hears.

    A recording may have `max_file_bytes` and `max_seconds`; `seed` keys requests that name none;
    `decoding` is the memory that all share.
    """

    hearing: Hearing
    tokenizer: Tokenizer
    max_file_bytes: int
    max_seconds: float
    seed: int = 0
    decoding: MemoryBudget = field(default_factory=lambda: MemoryBudget(MAX_DECODING_BYTES))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a body asks of a recording, whatever that is."""

    file_url: str
    language: str | None
    prompt_ids: tuple[int, ...]
    sampling: Sampling  # without its seed
    seed: int | None
    response_format: str
    granularities: tuple[str, ...]

    @property
    def wants_segments(self) -> bool:
        """Say whether the answer has a place for times of segments."""
        return self.response_format in _TIMED_FORMATS and "segment" in self.granularities


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the answer needs of the request: its format, and how long the recording is."""

    response_format: str
    granularities: tuple[str, ...]
    seconds: float


_Prepared = Prepared[SpeechRequest, _Answer]


class Recordings:
    """The endpoint of one task, of a model that hears.

    `bring` makes the step that brings what a url names, after a check of all else.
    """

    def __init__(self, model: SpeechModel, task: Task, bring: Callable[[Check], Fetched]) -> None:
        self.route = _ROUTES[task]
        self.fetched = bring(self._asked)
        self._model = model
        self._task = task

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return the recording as the model hears it, and what is asked of it."""
        data = body.get(FILE)
        is_there = isinstance(data, bytes)  # which no JSON holds: fetched, or sent in a form
        if is_there:
            body = {FILE_URL: _SENT} | {k: v for k, v in body.items() if k != FILE}
        asked = self._asked(body)
        if not is_there:
            data = inline_recording(asked.file_url)
        if data is None:
            raise RequestError(f"`{FILE_URL}` was not fetched.", param=FILE_URL)
        if len(data) > self._model.max_file_bytes:
            raise too_large(self._model.max_file_bytes)
        # Here, for all models load this file: only one that hears needs what reads containers.
        from engine.audio.decoding import decode

        hearing = self._model.hearing
        samples = decode(
            data,
            hearing.sampling_rate,
            max_seconds=self._model.max_seconds,
            budget=self._model.decoding,
        )
        seconds = len(samples) / hearing.sampling_rate
        if not hearing.has_timestamps and seconds > hearing.window_seconds:
            raise RequestError(
                f"The recording of `{FILE_URL}` is longer than {hearing.window_seconds:g} s, which "
                "is all that this model hears: it tells no times, by which longer ones are cut.",
                param=FILE_URL,
            )
        seed = seed_of_choice(
            asked.seed,
            engine_seed=self._model.seed,
            request_id=heading.request_id,
            prompt=0,
            choice=0,
        )
        speech = SpeechRequest(
            samples,
            task=self._task,
            language=asked.language,
            prompt_ids=asked.prompt_ids,
            sampling=replace(asked.sampling, seed=seed),
            wants_segments=asked.wants_segments,
            wants_words="word" in asked.granularities,
        )
        context = _Answer(asked.response_format, asked.granularities, seconds)
        return Prepared([speech], context, heading, num_bytes=samples.nbytes)

    def finish(self, prepared: _Prepared, results: Sequence[SpeechResult]) -> Reply:
        """Return what was said, in the form that was asked for."""
        [result], answer = results, prepared.context
        usage = Usage(
            prompt_tokens=result.num_prompt_tokens,
            completion_tokens=result.num_output_tokens,
            audio_seconds=answer.seconds,
        )
        body: dict[str, Any] = {"text": Transcript(self._model.tokenizer, self._task).add(result)}
        match answer.response_format:
            case "srt":
                body["text"] = srt(self._cues(result))
            case "vtt":
                body["text"] = vtt(self._cues(result))
            case "verbose_json":
                body = self._verbose(result, answer, body["text"])
        if self._task == "transcribe":  # OpenAI and vLLM tell it of these alone
            body["usage"] = {"type": "duration", "seconds": math.ceil(answer.seconds)}
        return Reply(200, body, usage)

    def unfold(self, prepared: _Prepared, options: StreamOptions) -> Unfolding:
        """Return the text before anything of it has come; raises `RequestError` for documents."""
        response_format = prepared.context.response_format
        if response_format in _TIMED_FORMATS:
            raise RequestError(
                f"`response_format` {response_format} comes whole: leave `stream` out, or send json"
                " or text.",
                param="response_format",
            )
        return TranscriptUnfolding(self._model.tokenizer, self._task, prepared.heading, options)

    def _asked(self, body: dict[str, Any]) -> _Asked:
        """Return what is asked of a recording; raises `RequestError` for what cannot be."""
        granularities: tuple[str, ...] = ("segment",)
        request: TranscriptionRequest | TranslationRequest
        if self._task == "translate":
            request = read_body(TranslationRequest, body)
        else:
            request = told = read_body(TranscriptionRequest, body)
            granularities = tuple(told.timestamp_granularities or granularities)
        response_format = request.response_format or "json"
        self._check_times(response_format, granularities)
        return _Asked(
            file_url=request.file_url,
            language=self._language(request.language),
            prompt_ids=self._prompt_ids(request.prompt),
            sampling=_sampling(request),
            seed=request.seed,
            response_format=response_format,
            granularities=granularities,
        )

    def _check_times(self, response_format: str, granularities: Sequence[str]) -> None:
        hearing = self._model.hearing
        if response_format in _TIMED_FORMATS and not hearing.has_timestamps:
            raise RequestError(
                f"This model tells no times: `response_format` cannot be {response_format}.",
                param="response_format",
            )
        if "word" in granularities and not hearing.has_word_times:
            raise RequestError(
                "This model tells no times of words.", param="timestamp_granularities"
            )

    def _language(self, code: str | None) -> str | None:
        known = self._model.hearing.languages
        if code is None or code in known:
            return code
        if not known and code == "en":
            return None
        raise RequestError(
            f"This model does not know {LANGUAGES[code].title()}"
            f"{'' if known else ': it hears English alone'}.",
            param="language",
        )

    def _prompt_ids(self, prompt: str | None) -> tuple[int, ...]:
        """Return the prompt's last tokens, written as the model met them: behind a space."""
        text = (prompt or "").strip()
        if not text:
            return ()
        tokenizer = self._model.tokenizer
        ids = tokenizer.encode(f" {text}", add_special_tokens=False)
        if any(token_id in tokenizer.vocabulary.added for token_id in ids):
            raise RequestError("`prompt` must not hold the model's own marks.", param="prompt")
        max_tokens = self._model.hearing.max_prompt_tokens
        return tuple(ids[-max_tokens:]) if max_tokens else ()

    def _cues(self, result: SpeechResult) -> list[Cue]:
        tokenizer = self._model.tokenizer
        return [
            Cue(segment.start, segment.end, tokenizer.text(segment.token_ids))
            for segment in result.segments
        ]

    def _verbose(self, result: SpeechResult, answer: _Answer, text: str) -> dict[str, Any]:
        language = "en" if self._task == "translate" else result.language or "en"
        body: dict[str, Any] = {
            "task": self._task,
            "language": LANGUAGES.get(language, language),
            "duration": round(answer.seconds, 3),
            "text": text,
        }
        if "word" in answer.granularities:
            body["words"] = self._words(result)
        if "segment" in answer.granularities:
            segments = enumerate(result.segments)
            body["segments"] = [self._segment(i, segment) for i, segment in segments]
        return body

    def _segment(self, index: int, segment: SpeechSegment) -> dict[str, Any]:
        text = self._model.tokenizer.text(segment.token_ids)
        data = text.encode()
        return {
            "id": index,
            "seek": segment.seek,
            "start": round(segment.start, 3),
            "end": round(segment.end, 3),
            "text": text,
            "tokens": list(segment.token_ids),
            "temperature": segment.temperature,
            "avg_logprob": segment.avg_logprob,
            "compression_ratio": len(data) / len(zlib.compress(data)),
            "no_speech_prob": segment.no_speech_prob,
        }

    def _words(self, result: SpeechResult) -> list[dict[str, Any]]:
        tokenizer, has_spaces = self._model.tokenizer, not is_unspaced(self._task, result.language)
        words: list[dict[str, Any]] = []
        for segment in result.segments:
            pieces = [tokenizer.piece(token_id) for token_id in segment.token_ids]
            for word in words_of(pieces, segment.token_times or (), has_spaces=has_spaces):
                start, end = round(word.start, 3), round(word.end, 3)
                words.append({"word": word.text.strip(), "start": start, "end": end})
        return words


def _sampling(request: TranscriptionRequest | TranslationRequest) -> Sampling:
    top_p, top_k = request.top_p, max(0, request.top_k or 0)
    if top_p == 0:  # nothing but the likeliest token is within a share of 0
        top_p, top_k = 1.0, 1
    repetition_penalty = request.repetition_penalty
    return Sampling(
        temperature=request.temperature or 0.0,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
    )
