"""Recordings as files of many kinds, those of `examples/`: `python -m tidemill.demo.recordings`.

Each says words that the speech model knows; `said.json` tells which.
"""

from __future__ import annotations

import base64
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from .speech_words import NUM_DIGITS, WORDS, Language, Recording, speak
from .voices import SAMPLE_RATE, Voice

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "tidemill-speech"
DEFAULT = Voice()


@dataclass(frozen=True, slots=True)
class Container:
    """A kind of file: its codec, the rate that it is written at, and the type of its content."""

    codec: str
    sample_rate: int
    media_type: str
    bit_rate: int | None = None


CONTAINERS = {
    "wav": Container("pcm_s16le", 16_000, "audio/wav"),
    "flac": Container("flac", 16_000, "audio/flac"),
    "mp3": Container("libmp3lame", 22_050, "audio/mpeg", 32_000),
    "ogg": Container("libopus", 48_000, "audio/ogg", 24_000),
    "m4a": Container("aac", 44_100, "audio/mp4", 40_000),
    "webm": Container("libopus", 48_000, "audio/webm", 24_000),
}
"""Kinds of files by their endings."""
FORMATS = {"m4a": "mp4"}


def encode(samples: NDArray[np.float32], kind: str) -> bytes:
    """Return `samples [n]` at 16 kHz as a file of `kind`, one of `CONTAINERS`."""
    container = CONTAINERS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=FORMATS.get(kind, kind)) as output:
        stream = output.add_stream(container.codec, rate=container.sample_rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono"
        if container.bit_rate:
            stream.bit_rate = container.bit_rate
        pulses = (samples.clip(-1, 1) * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(pulses, format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        resampler = av.AudioResampler(stream.format, "mono", container.sample_rate, _block(stream))
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return file.getvalue()


def _block(stream: av.AudioStream) -> int:
    """Return how many samples the codec takes at a time."""
    return stream.codec_context.frame_size or 4096


def data_url(file: bytes, kind: str) -> str:
    """Return a file as a data URL."""
    return f"data:{CONTAINERS[kind].media_type};base64,{base64.b64encode(file).decode()}"


def recite(text: str, language: Language, pauses: tuple[float, ...], voice: Voice) -> Recording:
    """Return `text`, in which a comma is a pause, as it is spoken."""
    phrases = [[WORDS[language].index(word) for word in part.split()] for part in text.split(",")]
    return speak(phrases, pauses, language, voice)


@dataclass(frozen=True, slots=True)
class Clip:
    """One of the recordings in `examples/recordings`: a comma in `text` is a pause."""

    name: str
    text: str
    language: Language = "en"
    voice: Voice = DEFAULT

    @property
    def kind(self) -> str:
        """The ending of its file."""
        return self.name.rpartition(".")[2]

    def recording(self) -> Recording:
        """Return it spoken; it begins and ends in a little silence."""
        num_phrases = self.text.count(",") + 1
        return recite(self.text, self.language, (0.3, *[0.8] * (num_phrases - 1), 0.4), self.voice)


def _long(seed: int, phrases: int, words: int, known: list[str]) -> str:
    """Return some of the `known` words, enough to fill more than one window."""
    rng = random.Random(seed)
    return ",".join(" ".join(rng.choices(known, k=words)) for _ in range(phrases))


CLIPS = (
    Clip("digits.wav", "three one four"),
    Clip("numbers.flac", "two seven one eight", voice=Voice("en-us+f3", 180)),
    Clip("words.mp3", "water wheel moon river", voice=Voice("en-gb-scotland+m3", 160)),
    Clip("german.ogg", "drei eins vier Wasser", "de", Voice("de+f2", 160)),
    Clip("pauses.m4a", _long(6, 5, 5, WORDS["en"]), voice=Voice("en-us+m2", 160)),
    Clip("breathless.webm", _long(111, 1, 24, WORDS["en"][:NUM_DIGITS]), voice=Voice("en-us", 140)),
)
"""The last two are longer than a window of the speech model, with pauses and without one."""


def write_clips(folder: Path) -> dict[str, str]:
    """Write the recordings and `said.json`; return each as a data URL."""
    folder.mkdir(parents=True, exist_ok=True)
    said, urls = {}, {}
    for clip in CLIPS:
        recording = clip.recording()
        file = encode(recording.samples, clip.kind)
        (folder / clip.name).write_bytes(file)
        urls[clip.name] = data_url(file, clip.kind)
        said[clip.name] = {
            "language": clip.language,
            "text": recording.text(),
            "english": recording.text("en"),
            "seconds": round(len(recording.samples) / SAMPLE_RATE, 2),
        }
    (folder / "said.json").write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n")
    return urls


def write_lines(path: Path, lines: list[tuple[str, str, dict[str, object]]]) -> None:
    """Write a batch file of `(custom_id, url, body)`."""
    path.write_text(
        "".join(
            json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"
            for name, url, body in lines
        )
    )


def main() -> None:
    """Write the recordings and the batch files that hold them."""
    urls = write_clips(EXAMPLES / "recordings")
    transcriptions, translations = "/v1/audio/transcriptions", "/v1/audio/translations"

    def body(clip: str, **asked: object) -> dict[str, object]:
        return {"model": MODEL, "file_url": urls[clip], **asked}

    lines: list[tuple[str, str, dict[str, object]]] = [
        ("request-1", transcriptions, body("digits.wav", response_format="json")),
        ("request-2", transcriptions, body("numbers.flac", response_format="text", language="en")),
        (
            "request-3",
            transcriptions,
            body("pauses.m4a", response_format="verbose_json", timestamp_granularities=["segment"]),
        ),
        (
            "request-4",
            transcriptions,
            body("words.mp3", response_format="verbose_json", timestamp_granularities=["word"]),
        ),
        ("request-5", transcriptions, body("german.ogg")),
        ("request-6", translations, body("german.ogg")),
        ("request-7", transcriptions, body("breathless.webm", response_format="srt")),
        ("request-8", transcriptions, body("words.mp3", response_format="vtt")),
        ("request-9", transcriptions, body("digits.wav", prompt="2 7 1 8")),
    ]
    write_lines(EXAMPLES / "audio.jsonl", lines)


if __name__ == "__main__":
    main()
