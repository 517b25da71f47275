"""`/v1/audio/transcriptions` and `/v1/audio/translations`: a recording in, its transcript out.

The body is a JSON object in every format, as a row requires: `text` contains the transcript, or the
whole document for `srt` and `vtt`. Times are in seconds from the recording's start.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tidemill.protocol.audio import (
    FILE,
    LANGUAGES,
    TranscriptionRequest,
    TranslationRequest,
    inline_recording,
    too_large,
)
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import FILE_URL
from tidemill.protocol.in_flight import MemoryBudget
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import TRANSCRIPTIONS, TRANSLATIONS
from tidemill.protocol.stream import StreamOptions

from ..config import MAX_DECODING_BYTES
from ..scheduling.sequence import Sampling
from ..scheduling.speech import (
    Hearing,
    LanguageDetection,
    SpeechRequest,
    SpeechResult,
    SpeechSegment,
    Task,
    Thresholds,
)
from ..text.tokenizer import Tokenizer
from ..text.word_timestamps import word_timestamps
from .endpoint import BodyCheck, FetchStep, Prepared, RequestMetadata, ResponseStream
from .generation_requests import seed_of_choice
from .transcripts import Transcript, TranscriptStream, is_unspaced


class Cue(NamedTuple):
    """A subtitle from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str


def srt(cues: Iterable[Cue]) -> str:
    """Return a SubRip document, without blank cues."""
    shown = enumerate(_printable_cues(cues), 1)
    return "".join(
        f"{i}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{cue.text}\n\n"
        for i, cue in shown
    )


def vtt(cues: Iterable[Cue]) -> str:
    """Return a WebVTT document, without blank cues."""
    blocks = [
        f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{cue.text}\n\n"
        for cue in _printable_cues(cues)
    ]
    return "".join(["WEBVTT\n\n", *blocks])


def _printable_cues(cues: Iterable[Cue]) -> Iterable[Cue]:
    """Yield cues with text, each on one line that cannot be mistaken for times."""
    for cue in cues:
        if text := " ".join(cue.text.split()):
            yield cue._replace(text=text.replace("-->", "->"))


def _clock(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(max(seconds, 0) * 1_000), 1_000)
    minutes, seconds_of_minute = divmod(whole, 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    return f"{hours:02}:{minutes_of_hour:02}:{seconds_of_minute:02}{point}{milliseconds:03}"


_ROUTES = {"transcribe": TRANSCRIPTIONS, "translate": TRANSLATIONS}
_SENT = "data:;base64,"  # a placeholder for bytes that are already available
_TIMED_FORMATS = frozenset({"verbose_json", "srt", "vtt"})


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """A speech recognition model, as the endpoints see it.

    A recording may have `max_file_bytes` and `max_seconds`; `seed` is the default for requests
    without one; all requests share the memory budget `decoding`.
    """

    hearing: Hearing
    tokenizer: Tokenizer
    max_file_bytes: int
    max_seconds: float
    seed: int = 0
    decoding: MemoryBudget = field(default_factory=lambda: MemoryBudget(MAX_DECODING_BYTES))


@dataclass(frozen=True, slots=True)
class _Options:
    """The parameters of a transcription request."""

    file_url: str
    language: str | None
    prompt_ids: tuple[int, ...]
    sampling: Sampling  # without its seed
    retry_temperatures: tuple[float, ...]
    thresholds: Thresholds
    detection: LanguageDetection
    seed: int | None
    response_format: str
    granularities: tuple[str, ...]

    @property
    def wants_ratio(self) -> bool:
        """Return whether the compression ratio is part of the response or decides retries."""
        return bool(self.retry_temperatures) or self.response_format == "verbose_json"

    @property
    def wants_segments(self) -> bool:
        """Return whether the response includes segment timestamps."""
        return self.response_format in _TIMED_FORMATS and "segment" in self.granularities


@dataclass(frozen=True, slots=True)
class _ReplyOptions:
    """The parameters of a response: its format, and the recording's length."""

    response_format: str
    granularities: tuple[str, ...]
    seconds: float


_Prepared = Prepared[SpeechRequest, _ReplyOptions]


class Transcriptions:
    """The endpoint of one task of a speech recognition model.

    `fetch_step_after` creates the media fetch, which runs after a check of the body.
    """

    def __init__(
        self, model: SpeechModel, task: Task, fetch_step_after: Callable[[BodyCheck], FetchStep]
    ) -> None:
        self.route = _ROUTES[task]
        self.fetched = fetch_step_after(self._options)
        self._model = model
        self._task = task

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return the decoded recording with its parameters."""
        data = body.get(FILE)
        is_received = isinstance(data, bytes)  # never from JSON: fetched, or sent in a form
        if is_received:
            body = {FILE_URL: _SENT} | {k: v for k, v in body.items() if k != FILE}
        options = self._options(body)
        if not is_received:
            data = inline_recording(options.file_url)
        if data is None:
            raise RequestError(f"`{FILE_URL}` was not fetched.", param=FILE_URL)
        if len(data) > self._model.max_file_bytes:
            raise too_large(self._model.max_file_bytes)
        # Imported here: every model loads this file, and only speech models need FFmpeg.
        from ..media.audio_decoding import decode

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
                f"The recording of `{FILE_URL}` is longer than {hearing.window_seconds:g} s, the "
                "maximum of this model: without timestamps it cannot be split.",
                param=FILE_URL,
            )
        seed = seed_of_choice(
            options.seed,
            engine_seed=self._model.seed,
            request_id=metadata.request_id,
            prompt=0,
            choice=0,
        )
        speech = SpeechRequest(
            samples,
            task=self._task,
            language=options.language,
            prompt_ids=options.prompt_ids,
            sampling=replace(options.sampling, seed=seed),
            retry_temperatures=options.retry_temperatures,
            thresholds=options.thresholds,
            detection=options.detection,
            compression_ratio=self._compression_ratio if options.wants_ratio else None,
            wants_segments=options.wants_segments,
            wants_words="word" in options.granularities,
        )
        context = _ReplyOptions(options.response_format, options.granularities, seconds)
        return Prepared([speech], context, metadata, num_bytes=samples.nbytes)

    def finish(self, prepared: _Prepared, results: Sequence[SpeechResult]) -> Reply:
        """Return the transcript in the requested format."""
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
        if self._task == "transcribe":  # as OpenAI and vLLM do, for transcriptions only
            body["usage"] = {"type": "duration", "seconds": math.ceil(answer.seconds)}
        return Reply(200, body, usage)

    def stream(self, prepared: _Prepared, options: StreamOptions) -> ResponseStream:
        """Return the stream of a transcript; raises `RequestError` for subtitles."""
        response_format = prepared.context.response_format
        if response_format in _TIMED_FORMATS:
            raise RequestError(
                f"`response_format` {response_format} cannot be streamed: remove `stream`, or use"
                " json or text.",
                param="response_format",
            )
        return TranscriptStream(self._model.tokenizer, self._task, prepared.metadata, options)

    def _options(self, body: dict[str, Any]) -> _Options:
        """Return the parameters of a body; raises `RequestError` for invalid ones."""
        granularities: tuple[str, ...] = ("segment",)
        request: TranscriptionRequest | TranslationRequest
        if self._task == "translate":
            request = read_body(TranslationRequest, body)
        else:
            request = transcription = read_body(TranscriptionRequest, body)
            granularities = tuple(transcription.timestamp_granularities or granularities)
        response_format = request.response_format or "json"
        self._check_times(response_format, granularities)
        temperature, *retries = _temperatures(request)
        return _Options(
            file_url=request.file_url,
            language=self._language(request.language),
            prompt_ids=self._prompt_ids(request.prompt),
            sampling=_sampling(request, temperature),
            retry_temperatures=tuple(retries),
            thresholds=_thresholds(request),
            detection=_detection(request),
            seed=request.seed,
            response_format=response_format,
            granularities=granularities,
        )

    def _check_times(self, response_format: str, granularities: Sequence[str]) -> None:
        hearing = self._model.hearing
        if response_format in _TIMED_FORMATS and not hearing.has_timestamps:
            raise RequestError(
                f"This model does not support timestamps: `response_format` cannot be"
                f" {response_format}.",
                param="response_format",
            )
        if "word" in granularities and not hearing.has_word_times:
            raise RequestError(
                "This model does not support word timestamps.", param="timestamp_granularities"
            )

    def _language(self, code: str | None) -> str | None:
        known = self._model.hearing.languages
        if code is None or code in known:
            return code
        if not known and code == "en":
            return None
        kind = "model" if known else "English-only model"
        raise RequestError(
            f"This {kind} does not support {LANGUAGES[code].title()}.", param="language"
        )

    def _prompt_ids(self, prompt: str | None) -> tuple[int, ...]:
        """Return the prompt's last tokens, tokenized after a space, as in training."""
        text = (prompt or "").strip()
        if not text:
            return ()
        tokenizer = self._model.tokenizer
        ids = tokenizer.encode(f" {text}", add_special_tokens=False)
        if any(token_id in tokenizer.vocabulary.added for token_id in ids):
            raise RequestError("`prompt` must not contain special tokens.", param="prompt")
        max_tokens = self._model.hearing.max_prompt_tokens
        return tuple(ids[-max_tokens:]) if max_tokens else ()

    def _cues(self, result: SpeechResult) -> list[Cue]:
        tokenizer = self._model.tokenizer
        return [
            Cue(segment.start, segment.end, tokenizer.text(segment.token_ids))
            for segment in result.segments
        ]

    def _verbose(self, result: SpeechResult, answer: _ReplyOptions, text: str) -> dict[str, Any]:
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
        return {
            "id": index,
            "seek": segment.seek,
            "start": round(segment.start, 3),
            "end": round(segment.end, 3),
            "text": self._model.tokenizer.text(segment.token_ids),
            "tokens": list(segment.token_ids),
            "temperature": segment.temperature,
            "avg_logprob": segment.avg_logprob,
            "compression_ratio": segment.compression_ratio,
            "no_speech_prob": segment.no_speech_prob,
        }

    def _compression_ratio(self, token_ids: Sequence[int]) -> float:
        """Return how much zlib compresses a text: a repeated one by more than a natural one."""
        data = self._model.tokenizer.text(token_ids).encode()
        return len(data) / len(zlib.compress(data))

    def _words(self, result: SpeechResult) -> list[dict[str, Any]]:
        tokenizer, has_spaces = self._model.tokenizer, not is_unspaced(self._task, result.language)
        words: list[dict[str, Any]] = []
        for segment in result.segments:
            pieces = [tokenizer.piece(token_id) for token_id in segment.token_ids]
            for word in word_timestamps(pieces, segment.token_times or (), has_spaces=has_spaces):
                start, end = round(word.start, 3), round(word.end, 3)
                words.append({"word": word.text.strip(), "start": start, "end": end})
        return words


def _temperatures(request: TranscriptionRequest | TranslationRequest) -> list[float]:
    given = request.temperature
    return given if isinstance(given, list) else [given or 0.0]


def _thresholds(request: TranscriptionRequest | TranslationRequest) -> Thresholds:
    given = {
        "compression_ratio": request.compression_ratio_threshold,
        "logprob": request.logprob_threshold,
        "no_speech": request.no_speech_threshold,
    }
    return Thresholds(**{name: value for name, value in given.items() if value is not None})


def _detection(request: TranscriptionRequest | TranslationRequest) -> LanguageDetection:
    given = LanguageDetection(max_windows=request.language_detection_segments or 1)
    threshold = request.language_detection_threshold
    return given if threshold is None else replace(given, threshold=threshold)


def _sampling(request: TranscriptionRequest | TranslationRequest, temperature: float) -> Sampling:
    top_p, top_k = request.top_p, max(0, request.top_k or 0)
    if top_p == 0:  # only the most likely token is within a share of 0
        top_p, top_k = 1.0, 1
    repetition_penalty = request.repetition_penalty
    return Sampling(
        temperature=temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
    )
