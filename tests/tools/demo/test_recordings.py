"""The recordings in `examples/`: of many formats, small, and with the documented texts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pytest

from tools.demo.recordings import CLIPS, CONTAINERS, EXAMPLES, encode
from tools.demo.voices import SAMPLE_RATE, Voice, say

SCRIPTS = json.loads((EXAMPLES / "recordings" / "said.json").read_text())


def test_every_kind_of_file_has_a_recording_and_all_are_small() -> None:
    """One of each container; all of them together take less room than a picture."""
    assert {clip.kind for clip in CLIPS} == set(CONTAINERS)
    assert {clip.name for clip in CLIPS} == set(SCRIPTS)
    files = [EXAMPLES / "recordings" / clip.name for clip in CLIPS]
    assert sum(file.stat().st_size for file in files) < 400_000


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recording_is_as_long_as_its_speech(name: str) -> None:
    """Each file has the format of its suffix and can be decoded to its end."""
    with av.open(str(EXAMPLES / "recordings" / name)) as file:
        [stream] = file.streams.audio
        seconds = sum(frame.samples for frame in file.decode(stream)) / stream.rate
    assert seconds == pytest.approx(SCRIPTS[name]["seconds"], abs=0.15)


def test_one_is_longer_than_a_window_of_whisper() -> None:
    """Windows are joined in it; the text of each is that of its script."""
    assert max(clip["seconds"] for clip in SCRIPTS.values()) > 30
    assert {clip.name: clip.text for clip in CLIPS} == {
        name: clip["text"] for name, clip in SCRIPTS.items()
    }


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_is_encoded_is_heard_again(kind: str) -> None:
    """Whatever the codec loses, loudness over time stays what it was."""
    silence = np.zeros(SAMPLE_RATE // 4, np.float32)
    samples = np.concatenate([silence, say("three one four", Voice()).samples, silence])
    with av.open(io.BytesIO(encode(samples, kind))) as file:
        resampler = av.AudioResampler("flt", "mono", SAMPLE_RATE)
        frames = [piece for frame in file.decode(audio=0) for piece in resampler.resample(frame)]
        decoded = np.concatenate([frame.to_ndarray()[0] for frame in frames])

    def loudness(of: np.ndarray) -> np.ndarray:
        whole = of[: len(samples) // 800 * 800]
        return np.sqrt(np.square(whole.reshape(-1, 800)).mean(1))

    levels, padded = loudness(samples), np.pad(decoded, (0, 4000))
    likeness = [
        float(np.corrcoef(levels, loudness(padded[shift:]))[0, 1]) for shift in range(0, 2000, 200)
    ]
    assert max(likeness) > 0.95


def test_words_have_start_times() -> None:
    """There is one start per word, in order and within the audio."""
    spoken = say("three one four", Voice("en-us"))
    assert len(spoken.word_starts) == 3
    assert list(spoken.word_starts) == sorted(spoken.word_starts)
    assert spoken.word_starts[-1] < len(spoken.samples) < 2 * SAMPLE_RATE


def test_a_voice_that_there_is_not_is_named() -> None:
    """No other voice replaces it."""
    with pytest.raises(ValueError, match="'unknown'"):
        say("one", Voice("unknown"))


def test_the_batch_file_holds_the_recordings_themselves() -> None:
    """Lines of `audio.jsonl` carry files as data URLs: nothing has to be reachable to run them."""
    lines = [json.loads(line) for line in Path(EXAMPLES / "audio.jsonl").read_text().splitlines()]
    assert {line["custom_id"] for line in lines} == set(SCRIPTS)
    assert all(line["body"]["file_url"].startswith("data:audio/") for line in lines)
