"""Throughput of a run over the last minute, and the estimated time left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidemill.protocol.contract import Usage

WINDOW_SECONDS = 60.0
# Of a run that has just begun: its first rows say little, and less of when it will end.
TELLING_SHARE = 0.02
_MIN_SECONDS = 1.0
_TELLING_SECONDS = 20.0


class Rates(NamedTuple):
    """Rows, good or bad, generated tokens, tokens of prompts and seconds of audio, each a second.

    Which of them tells how fast the work goes, the work decides: who writes no tokens reads some.
    """

    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    input_tokens_per_second: float = 0.0
    audio_seconds_per_second: float = 0.0

    @property
    def main_rate(self) -> str:
        """Return the rate that tells most: `512 tokens/s`, `9,000 tokens in/s` or of audio."""
        return format_rate(*self[1:])


class RateWindow:
    """Rates over the last minute, or `window`, or since it was made: they fall while nothing comes.

    A shard may last for seconds: the next one goes on from it, or its batch would seem to stand.
    """

    def __init__(self, clock: Callable[[], float], window: float = WINDOW_SECONDS) -> None:
        self._clock = clock
        self._window = window
        self._since = clock()
        self._gains: deque[_Gain] = deque()

    def add(self, num_rows: int, usage: Usage) -> None:
        """Take rows that are finished now, and what was read and generated."""
        self._gains.append(_Gain(self._clock(), num_rows, usage))

    def merge(self, other: RateWindow) -> None:
        """Count what another run of the batch made, which has ended: its rates end with it."""
        self._since = min(self._since, other._since)
        gains = [*self._gains, *other._gains]
        self._gains = deque(sorted(gains, key=lambda gain: gain.at))

    @property
    def rates(self) -> Rates:
        """Return the rates as they are now."""
        now = self._clock()
        while self._gains and self._gains[0].at < now - self._window:
            self._gains.popleft()
        seconds = max(_MIN_SECONDS, min(self._window, now - self._since))
        rows = sum(gain.num_rows for gain in self._gains)
        usage = sum((gain.usage for gain in self._gains), start=Usage())
        gained = (rows, usage.completion_tokens, usage.prompt_tokens, usage.audio_seconds)
        return Rates(*(round(each / seconds, 3) for each in gained))


class _Gain(NamedTuple):
    """What came at one moment."""

    at: float
    num_rows: int
    usage: Usage


def format_rate(tokens: float, input_tokens: float, audio_seconds: float) -> str:
    """Return one rate in words: of audio where some is heard, of what is generated, or read."""
    if audio_seconds:
        return f"{audio_seconds:,.1f} s of audio/s"
    if input_tokens and not tokens:
        return f"{input_tokens:,.0f} tokens in/s"
    return f"{tokens:,.0f} tokens/s"


class Countdown:
    """Time left that is estimated when a row ends, and counts down until the next one.

    While no row ends there is nothing new to estimate from: the time counts down, and there is none
    once it has passed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_rows = 0
        self._end: float | None = None

    def left(self, num_rows: int, estimate: float | None) -> float | None:
        """Return the seconds left; `estimate` counts if rows have ended since the one before."""
        now = self._clock()
        if estimate is not None and num_rows != self._num_rows:
            self._num_rows, self._end = num_rows, now + estimate
        return None if self._end is None or self._end <= now else self._end - now


def seconds_left(share: float, seconds: float, share_per_second: float) -> float | None:
    """Return when all would be done at this rate, after so many seconds and this share of it.

    None while nobody can know: at no rate, and before 2 % or 20 seconds; and once all is done.
    """
    is_told = share >= TELLING_SHARE or seconds >= _TELLING_SECONDS
    if share >= 1 or share_per_second <= 0 or not is_told:
        return None
    return (1 - share) / share_per_second
