"""Throughput of a run over the last minute, and the estimated remaining time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidemill.protocol.contract import Usage

WINDOW_SECONDS = 60.0
# The first rows of a run say little about its end.
TELLING_SHARE = 0.02
_MIN_SECONDS = 1.0
_TELLING_SECONDS = 20.0


class Rates(NamedTuple):
    """Rows, generated tokens, prompt tokens and seconds of audio, each per second.

    The main one depends on the work: requests without output still read tokens.
    """

    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    input_tokens_per_second: float = 0.0
    audio_seconds_per_second: float = 0.0

    @property
    def main_rate(self) -> str:
        """Return the main rate: `512 tokens/s`, `9,000 tokens in/s` or seconds of audio."""
        return format_rate(*self[1:])


class RateWindow:
    """Rates over the last minute, or `window`, or since creation; they fall while nothing arrives.

    A shard may last only seconds: the next one continues the rates, or they would drop to zero.
    """

    def __init__(self, clock: Callable[[], float], window: float = WINDOW_SECONDS) -> None:
        self._clock = clock
        self._window = window
        self._since = clock()
        self._gains: deque[_Gain] = deque()

    def add(self, num_rows: int, usage: Usage) -> None:
        """Add rows that have just finished, and their tokens."""
        self._gains.append(_Gain(self._clock(), num_rows, usage))

    def merge(self, other: RateWindow) -> None:
        """Add the rates of another, ended run of the batch."""
        self._since = min(self._since, other._since)
        gains = [*self._gains, *other._gains]
        self._gains = deque(sorted(gains, key=lambda gain: gain.at))

    @property
    def rates(self) -> Rates:
        """Return the current rates."""
        now = self._clock()
        while self._gains and self._gains[0].at < now - self._window:
            self._gains.popleft()
        seconds = max(_MIN_SECONDS, min(self._window, now - self._since))
        rows = sum(gain.num_rows for gain in self._gains)
        usage = sum((gain.usage for gain in self._gains), start=Usage())
        gained = (rows, usage.completion_tokens, usage.prompt_tokens, usage.audio_seconds)
        return Rates(*(round(each / seconds, 3) for each in gained))


class _Gain(NamedTuple):
    """Rows and usage that arrived at one moment."""

    at: float
    num_rows: int
    usage: Usage


def format_rate(tokens: float, input_tokens: float, audio_seconds: float) -> str:
    """Return one rate as text: of audio if there is any, else of generated or of read tokens."""
    if audio_seconds:
        return f"{audio_seconds:,.1f} s of audio/s"
    if input_tokens and not tokens:
        return f"{input_tokens:,.0f} tokens in/s"
    return f"{tokens:,.0f} tokens/s"


class Countdown:
    """Remaining time, estimated when a row ends and counting down until the next one.

    Without new rows there is no new estimate: the time counts down, and is None once it has
    passed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_rows = 0
        self._end: float | None = None

    def left(self, num_rows: int, estimate: float | None) -> float | None:
        """Return the remaining seconds; `estimate` counts if rows ended since the last call."""
        now = self._clock()
        if estimate is not None and num_rows != self._num_rows:
            self._num_rows, self._end = num_rows, now + estimate
        return None if self._end is None or self._end <= now else self._end - now


def seconds_left(share: float, seconds: float, share_per_second: float) -> float | None:
    """Return the remaining seconds at this rate, after these seconds and this share of the work.

    None while unknown: without a rate, and before 2 % or 20 seconds; and once all is done.
    """
    is_known = share >= TELLING_SHARE or seconds >= _TELLING_SECONDS
    if share >= 1 or share_per_second <= 0 or not is_known:
        return None
    return (1 - share) / share_per_second
