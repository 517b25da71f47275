"""Subtitles, and text that must not break them."""

from __future__ import annotations

import pytest

from tidemill.engine.endpoints.transcriptions import Cue, srt, vtt


@pytest.mark.parametrize(
    ("seconds", "clock"),
    [
        (0, "00:00:00,000"),
        (0.0004, "00:00:00,000"),
        (0.9996, "00:00:01,000"),
        (59.9999, "00:01:00,000"),
        (3_599.9996, "01:00:00,000"),
        (36_000.02, "10:00:00,020"),
        (360_000, "100:00:00,000"),
        (-0.001, "00:00:00,000"),
        (0.1 + 0.2, "00:00:00,300"),
    ],
)
def test_times_are_exact_to_the_millisecond(seconds: float, clock: str) -> None:
    """Rounding carries over to seconds."""
    document = srt([Cue(seconds, seconds, "x")])
    assert document == f"1\n{clock} --> {clock}\nx\n\n"
    assert f"{clock.replace(',', '.')} --> " in vtt([Cue(seconds, seconds, "x")])


def test_a_cue_is_one_line_and_not_a_time() -> None:
    """A blank line would end it, and an arrow would begin another."""
    cues = [Cue(0, 1, " a\n\nb  --> c "), Cue(1, 2, " \n"), Cue(2, 3, "d")]
    assert srt(cues) == (
        "1\n00:00:00,000 --> 00:00:01,000\na b -> c\n\n2\n00:00:02,000 --> 00:00:03,000\nd\n\n"
    )
    assert vtt(cues).count("\n\n") == 3
    assert (srt([]), vtt([])) == ("", "WEBVTT\n\n")
