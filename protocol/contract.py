"""Engine contract: requests in, replies out, info and stats."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Usage(NamedTuple):
    """Usage of one reply: tokens, and seconds of transcribed audio.

    `cached_tokens` of the prompt were already in the KV cache; `reasoning_tokens` of the completion
    were reasoning.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: float = 0.0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:  # type: ignore[override]  # no tuple
        """Return the sum, field by field."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.audio_seconds + other.audio_seconds,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def __sub__(self, earlier: Usage) -> Usage:
        """Return the difference to an earlier value, field by field."""
        return Usage(
            self.prompt_tokens - earlier.prompt_tokens,
            self.cached_tokens - earlier.cached_tokens,
            self.completion_tokens - earlier.completion_tokens,
            self.audio_seconds - earlier.audio_seconds,
            self.reasoning_tokens - earlier.reasoning_tokens,
        )


class Reply(NamedTuple):
    """The reply to one request: HTTP status, body (`{"error": …}` if it failed), token usage.

    `bare_message` is set for the two failures that vLLM's dialect prints as a plain string
    (stream mode and an unknown URL). A reply that `is_long` is serialised in a thread, and one that
    `is_reused` was computed for an earlier request.
    """

    status_code: int
    body: dict[str, Any]
    usage: Usage = Usage()
    bare_message: bool = False
    is_long: bool = False
    is_reused: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's model, device and limits; `revision` is None for a model without one.

    `max_num_seqs` is the maximum number of sequences in a step. `num_gpus` is 0 on a CPU. `notes`
    are sentences for the operator. `adapters` are the names of LoRA adapters, `endpoints` those of
    the supported routes, `load_seconds` the time of each phase of the start, by name.
    `model_digest` is a digest of samples of the model's files, None if they cannot be read. A
    model that `labels_spans` is a token classifier.
    """

    model: str
    revision: str | None
    engine_version: str
    device: str
    num_gpus: int
    max_num_seqs: int
    notes: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    model_digest: str | None = None
    labels_spans: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sequences running and waiting, KV cache usage, and totals since the start.

    `layers` increases within a step, which may take minutes on a CPU. `failures` are steps that
    failed for a reason other than memory, recovered or not. `prompt_tokens` and `cached_tokens`
    count finished sequences; `prefilled_tokens` are all computed tokens except those of decodes,
    and `attended_tokens` those that decodes attended to. `draft_tokens` are those of speculative
    decoding, of which `accepted_tokens` were accepted.

    `step_seconds` are those of the engine's thread with work; the next four are parts of it.
    `tokenize_seconds` and `detokenize_seconds` are sums over threads.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    layers: int = 0
    failures: int = 0
    prefilled_tokens: int = 0
    attended_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    step_seconds: float = 0.0
    scheduling_seconds: float = 0.0
    launch_seconds: float = 0.0
    capture_seconds: float = 0.0
    token_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    detokenize_seconds: float = 0.0

    @property
    def step_seconds_by_cause(self) -> dict[str, float]:
        """Return the seconds of the engine's thread, which add up to `step_seconds`.

        On a CPU, `launching` is the computation itself. It excludes the `capture` of CUDA graphs.
        `results` is all other work, such as processing sampled tokens.
        """
        causes = {
            "scheduling": self.scheduling_seconds,
            "launching": self.launch_seconds,
            "capture": self.capture_seconds,
            "waiting_for_tokens": self.token_seconds,
        }
        return {**causes, "results": max(0.0, self.step_seconds - sum(causes.values()))}

    @property
    def request_seconds_by_cause(self) -> dict[str, float]:
        """Return the seconds of preparing requests and finishing results."""
        return {"tokenizing": self.tokenize_seconds, "detokenizing": self.detokenize_seconds}


class Responder(Protocol):
    """An engine that answers requests, or a scripted stand-in."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request; never raises for a fault of the request.

        Raises `EngineError` if the engine has failed for good. `request_id` also keys the
        randomness of a request without a seed. `created` (seconds since the epoch) is the time
        in the reply and in templates that use it.
        """


class Served(Responder, Protocol):
    """A loaded engine behind its endpoints, or a scripted stand-in."""

    def info(self) -> EngineInfo:
        """Return the engine's model, device and limits."""

    def stats(self) -> EngineStats:
        """Return the current stats, without waiting for the engine.

        Raises `EngineError` if the engine is known to have failed for good.
        """

    def close(self) -> None:
        """Stop the engine; called once, last."""


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """A streamed answer to one request: bodies of chunks, each to be sent at once.

    A reader that stops closes `chunks`, which drops the work within a step. A request that fails
    midway ends with a chunk `{"error": …}`.
    """

    chunks: AsyncGenerator[dict[str, Any], None]


class Online(Served, Protocol):
    """A loaded engine that also answers interactive requests, with priority over lines of files."""

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer one request as `respond` does, streamed if its body requests a stream.

        An error of the request is a `Reply` even if it requests a stream.
        """


class EngineError(Exception):
    """The engine cannot be built or has failed for good; the message is for the user."""

    code: str = "engine_error"
