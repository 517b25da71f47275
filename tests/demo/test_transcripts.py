"""Recordings through `tidemill run` and a small model: texts and times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.demo.spoken import CLIPS, WORDS_A_SEGMENT
from tests.examples.runs import bodies_of
from tidemill import demo
from tools.demo.voices import SAMPLE_RATE

FOLDER = Path(__file__).parent
SCRIPTS = json.loads((FOLDER / "recordings" / "said.json").read_text())
SECONDS = 0.25
"""Maximum error of a time."""


@pytest.fixture(scope="module")
def transcripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the speech model's answer to each line."""
    return bodies_of(
        FOLDER / "audio.jsonl",
        demo.SPEECH_PATH,
        "tidemill-speech",
        tmp_path_factory.mktemp("audio"),
    )


@pytest.mark.parametrize(
    ("line", "clip"), [("request-1", "digits.wav"), ("request-2", "numbers.flac")]
)
def test_speech_is_transcribed(transcripts: dict[str, Any], line: str, clip: str) -> None:
    """The answer is JSON or text (stored as JSON in a row); the language is set or detected."""
    assert transcripts[line]["text"] == SCRIPTS[clip]["text"]


def test_german_is_transcribed_or_translated(transcripts: dict[str, Any]) -> None:
    """The same recording is sent to both URLs without a language."""
    assert transcripts["request-5"]["text"] == SCRIPTS["german.ogg"]["text"]
    assert transcripts["request-6"]["text"] == SCRIPTS["german.ogg"]["english"]


def test_a_recording_of_several_windows_keeps_its_times(transcripts: dict[str, Any]) -> None:
    """Each phrase is a segment with correct times; no word is lost or repeated."""
    body = transcripts["request-3"]
    assert body["text"].split() == SCRIPTS["pauses.m4a"]["text"].split()
    assert body["language"] == "english"
    assert body["duration"] == pytest.approx(SCRIPTS["pauses.m4a"]["seconds"], abs=0.1)
    [clip] = [clip for clip in CLIPS if clip.name == "pauses.m4a"]
    spoken = clip.recording().segments
    assert len(body["segments"]) == len(spoken)
    for found, phrase in zip(body["segments"], spoken, strict=True):
        assert found["start"] == pytest.approx(phrase.bounds[0] / SAMPLE_RATE, abs=SECONDS)
        assert found["end"] == pytest.approx(phrase.bounds[-1] / SAMPLE_RATE, abs=SECONDS)
        assert len(found["text"].split()) == len(phrase.words)


def test_words_have_their_times(transcripts: dict[str, Any]) -> None:
    """Each word ends when the next begins; the first includes the silence before it."""
    words = transcripts["request-4"]["words"]
    assert [word["word"] for word in words] == SCRIPTS["words.mp3"]["text"].split()
    [clip] = [clip for clip in CLIPS if clip.name == "words.mp3"]
    [spoken] = clip.recording().segments
    for word, end in zip(words, spoken.bounds[1:], strict=True):
        assert word["end"] == pytest.approx(end / SAMPLE_RATE, abs=SECONDS)


@pytest.mark.long
def test_subtitles_of_speech_without_a_pause_lose_nothing(transcripts: dict[str, Any]) -> None:
    """The recording is longer than a window: cues are in sequence, and each word is in one cue."""
    cues = re.findall(
        r"\d+\n(\S+) --> (\S+)\n(.+)\n\n", transcripts["request-7"]["text"], flags=re.MULTILINE
    )
    words = " ".join(text for *_, text in cues).split()
    assert words == SCRIPTS["breathless.webm"]["text"].split()
    assert all(start < end for start, end, _ in cues)
    assert [end for _, end, _ in cues[:-1]] <= [start for start, *_ in cues[1:]]
    assert all(len(text.split()) <= WORDS_A_SEGMENT for *_, text in cues)


def test_web_subtitles_have_the_right_format(transcripts: dict[str, Any]) -> None:
    """They have a header and a cue with the text."""
    text = transcripts["request-8"]["text"]
    assert text.startswith("WEBVTT\n\n00:00:00.")
    assert SCRIPTS["words.mp3"]["text"] in text


def test_a_prompt_changes_how_words_are_written(transcripts: dict[str, Any]) -> None:
    """Figures in the prompt make the model write figures."""
    assert transcripts["request-9"]["text"] == "3 1 4"
