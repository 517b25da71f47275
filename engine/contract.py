"""What an engine is to whoever holds one: requests in, replies out, and what it tells of itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Usage:
    """What one reply cost: tokens, and seconds of a recording that was listened to.

    `cached_tokens` of the prompt were already in the KV cache; `reasoning_tokens` of the completion
    were the model's thinking.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: float = 0.0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Return the sum, field by field."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.audio_seconds + other.audio_seconds,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def __sub__(self, earlier: Usage) -> Usage:
        """Return what has been added since, field by field."""
        return Usage(
            self.prompt_tokens - earlier.prompt_tokens,
            self.cached_tokens - earlier.cached_tokens,
            self.completion_tokens - earlier.completion_tokens,
            self.audio_seconds - earlier.audio_seconds,
            self.reasoning_tokens - earlier.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request: HTTP status, body (`{"error": …}` when it failed), tokens.

    `bare_message` is set for the two failures that vLLM's dialect prints as a plain string
    (stream mode and an unknown url). One that `is_long` is printed in a thread.
    """

    status_code: int
    body: dict[str, Any]
    usage: Usage = Usage()
    bare_message: bool = False
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine runs, and on what; `revision` is None for a model without one.

    `max_num_seqs` is how many sequences one step may hold. `num_gpus` is 0 on a CPU. `notes` are
    sentences that whoever runs it should read. `adapters` are the names of those that it serves,
    `endpoints` those of the routes that its lines may go to, `load_seconds` what the steps of its
    start took, by name.
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sequences now running and waiting, share of KV pages in use, and totals since the start.

    `layers` moves within a step, which may take minutes on a CPU. `failures` are steps that failed
    for another reason than memory, whatever came of them.
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


class Responder(Protocol):
    """Anything that answers requests: the engine behind its endpoints, or a scripted stand-in."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request; never raises for what the request holds.

        Raises `EngineError` when nothing can be answered any more.
        `request_id` also keys the randomness of a request that names no seed. `created` (seconds
        since the epoch) is the time that the reply carries and that a template may ask for.
        """


class Served(Responder, Protocol):
    """A loaded engine behind its endpoints, or a scripted stand-in."""

    def info(self) -> EngineInfo:
        """Return what runs here, and on what."""

    def stats(self) -> EngineStats:
        """Return what the engine is doing now; must not wait for it.

        Raises `EngineError` when it is known that nothing can be answered any more.
        """

    def close(self) -> None:
        """Stop the engine; called once, last."""


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """The answer to one request as it comes: bodies of chunks, each to be sent at once.

    Whoever stops reading closes `chunks`, which drops the work within a step. A request that fails
    on the way ends with a chunk `{"error": …}`.
    """

    chunks: AsyncGenerator[dict[str, Any], None]


class Online(Served, Protocol):
    """A loaded engine that answers people who wait, too: before all lines of files."""

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer one request, piece by piece where its body asks for a stream; as `respond` does.

        What is wrong with a request is a `Reply` also where a stream was asked for.
        """
