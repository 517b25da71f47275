"""What an engine tells of itself: what it is, and what it is doing now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine runs, and on what; `revision` is None for a model without one.

    `max_num_seqs` is how many sequences one step may hold. `num_gpus` is 0 on a CPU.
    """

    model: str
    revision: str | None
    engine_version: str
    device: str
    num_gpus: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sequences now running and waiting, share of KV pages in use, and totals since the start."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
