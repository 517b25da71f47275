"""Tally: counts of a run for progress, metrics and summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.protocol.contract import EngineStats, Usage

from ..console.error_summary import ErrorSummary
from ..files.shard import Shard

_MAX_BITS = 64


class LengthCounts:
    """Counts of rows by their number of tokens, in bins that double in width."""

    def __init__(self) -> None:
        self._counts = [0] * _MAX_BITS

    def add(self, num_tokens: Iterable[int]) -> None:
        """Count rows with these numbers of tokens."""
        for bits, count in Counter(map(int.bit_length, num_tokens)).items():
            self._counts[bits] += count

    def bins(self) -> list[dict[str, int]]:
        """Return the bins from the first to the last non-empty one, with bounds and counts."""
        counts = dict(enumerate(self._counts))
        used = [bits for bits, count in counts.items() if count]
        return [
            {"least": 1 << bits >> 1, "most": (1 << bits) - 1, "count": counts[bits]}
            for bits in (range(used[0], used[-1] + 1) if used else ())
        ]


@dataclass(slots=True)
class UsageTotal:
    """Sum of the usage of replies."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: float = 0.0
    reasoning_tokens: int = 0

    def add(self, usage: Usage) -> None:
        """Add the usage of one or more replies."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.audio_seconds += usage.audio_seconds
        self.reasoning_tokens += usage.reasoning_tokens


@dataclass(slots=True)
class Tally:
    """Counts of one run; `kept` rows existed before it, in a resumed output or as `reused` results.

    `unit` is the input's: `line`, `row` or `element`. `truncated` rows of the whole output have an
    answer that reached its token limit. `usage` covers answered requests, `computed_output_tokens`
    excludes repeats; `started` is on the monotonic clock. `questions` are the distributions of the
    answers in a complete table. `seconds_by_cause` are those of `engine` and `host`, which each add
    up to `seconds`, once all lines are done.
    """

    shard: Shard | None = None
    unit: str = "line"
    num_rows: int = 0
    kept: int = 0
    kept_ok: int = 0
    reused: int = 0
    answered: int = 0
    failed: int = 0
    num_not_run: int = 0
    truncated: int = 0
    usage: UsageTotal = field(default_factory=UsageTotal)
    computed_output_tokens: int = 0
    failures: ErrorSummary = field(default_factory=ErrorSummary)
    prompt_lengths: LengthCounts = field(default_factory=LengthCounts)
    completion_lengths: LengthCounts = field(default_factory=LengthCounts)
    questions: list[dict[str, Any]] = field(default_factory=list)
    load_seconds: float = 0.0
    print_seconds: float = 0.0
    write_seconds: float = 0.0
    seconds_by_cause: dict[str, dict[str, float]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def count(
        self, usage: Usage | None = None, *, failure: str | None = None, line: int | None = None
    ) -> None:
        """Count a finished line; `failure` is its error, if any."""
        self.count_all([] if usage is None else [usage])
        if failure is not None:
            self.count_failure(failure, line)

    def count_all(self, usages: Sequence[Usage], num_lines: int = 1) -> None:
        """Count finished lines, some of which have a usage."""
        self.answered += num_lines
        if usages:
            prompt, cached, completion, audio, reasoning = zip(*usages, strict=True)
            self.usage.add(
                Usage(sum(prompt), sum(cached), sum(completion), sum(audio), sum(reasoning))
            )
            self.prompt_lengths.add(prompt)
            self.completion_lengths.add(completion)

    def count_failure(self, message: str, line: int | None = None) -> None:
        """Count a failed line, which `count_all` has counted."""
        self.failed += 1
        self.failures.add(message, line)

    def note_engine(self, stats: EngineStats, num_engines: int) -> None:
        """Set the seconds by cause, up to now; those of several engines are sums."""
        wall = num_engines * self.seconds
        host = {
            **stats.request_seconds_by_cause,
            "printing": self.print_seconds,
            "writing": self.write_seconds,
        }
        self.seconds_by_cause = {
            "engine": {
                **stats.step_seconds_by_cause,
                "waiting_for_requests": max(0.0, wall - stats.step_seconds),
            },
            "host": {**host, "other": max(0.0, wall - sum(host.values()))},
        }

    @property
    def label(self) -> str:
        """Return the prefix of messages about a shard, such as `shard 3 of 8: `."""
        return "" if self.shard is None else f"{self.shard}: "

    @property
    def rows_done(self) -> int:
        """Return the number of lines with a row, including kept ones."""
        return self.kept + self.answered

    @property
    def rows_failed(self) -> int:
        """Return the number of failed rows among `rows_done`."""
        return self.kept - self.kept_ok + self.failed

    @property
    def seconds(self) -> float:
        """Return the seconds since `started`."""
        return max(time.monotonic() - self.started, 1e-9)
