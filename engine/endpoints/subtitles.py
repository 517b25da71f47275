"""Texts with their times as subtitles: SubRip (`srt`) and WebVTT (`vtt`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Cue(NamedTuple):
    """What is shown from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str


def srt(cues: Iterable[Cue]) -> str:
    """Return a SubRip document; what is blank is not shown."""
    shown = enumerate(_shown(cues), 1)
    return "".join(
        f"{i}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{cue.text}\n\n"
        for i, cue in shown
    )


def vtt(cues: Iterable[Cue]) -> str:
    """Return a WebVTT document; what is blank is not shown."""
    blocks = [
        f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{cue.text}\n\n"
        for cue in _shown(cues)
    ]
    return "".join(["WEBVTT\n\n", *blocks])


def _shown(cues: Iterable[Cue]) -> Iterable[Cue]:
    """Yield what has text, in one line that cannot be taken for times."""
    for cue in cues:
        if text := " ".join(cue.text.split()):
            yield cue._replace(text=text.replace("-->", "->"))


def _clock(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(max(seconds, 0) * 1_000), 1_000)
    minutes, seconds_of_minute = divmod(whole, 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    return f"{hours:02}:{minutes_of_hour:02}:{seconds_of_minute:02}{point}{milliseconds:03}"
