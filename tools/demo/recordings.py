"""Recordings of `examples/` in many file formats: `python -m tools.demo.recordings`.

Each is spoken by espeak-ng; `said.json` contains its text.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from tidemill.demo.tiny_en import NAME

from .voices import SAMPLE_RATE, Voice, say

EXAMPLES = Path(__file__).parents[2] / "examples"
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Container:
    """A file format: its codec, sample rate and media type."""

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
"""File formats by suffix."""
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
    """Return the codec's frame size in samples."""
    return stream.codec_context.frame_size or 4096


def data_url(file: bytes, kind: str) -> str:
    """Return a file as a data URL."""
    return f"data:{CONTAINERS[kind].media_type};base64,{base64.b64encode(file).decode()}"


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording in `examples/recordings`; each sentence is followed by a pause."""

    name: str
    sentences: tuple[str, ...]
    voice: Voice

    @property
    def kind(self) -> str:
        """Return the suffix of its file."""
        return self.name.rpartition(".")[2]

    @property
    def text(self) -> str:
        """Return the spoken text."""
        return " ".join(self.sentences)

    def samples(self) -> NDArray[np.float32]:
        """Return the spoken samples, `[n]` at 16 kHz."""
        pause = np.zeros(round(PAUSE_SECONDS * SAMPLE_RATE), np.float32)
        spoken = [(say(sentence, self.voice).samples, pause) for sentence in self.sentences]
        return np.concatenate([pause, *(piece for pieces in spoken for piece in pieces)])


CLIPS = (
    Clip("dentist.wav", ("Good morning, this is the dentist.",), Voice("en-us", 150)),
    Clip("meeting.flac", ("The meeting starts at ten o'clock.",), Voice("en-us+f3", 150)),
    Clip(
        "weather.mp3",
        ("It will rain tomorrow afternoon, so please take your umbrella.",),
        Voice("en-us", 140),
    ),
    Clip(
        "train.ogg",
        ("The next train to London will leave in a few minutes.",),
        Voice("en-us", 140),
    ),
    Clip(
        "order.m4a",
        ("I would like a cup of coffee and a piece of chocolate cake.",),
        Voice("en-us+m3", 140),
    ),
    Clip(
        "mill.webm",
        (
            "Once upon a time there was an old miller.",
            "He never had to wait for the wind.",
            "In the summer, children came to watch the stones.",
            "In the winter, he told stories about the water.",
            "One day he was too old to work.",
            "His children built a second wheel.",
            "People came from all over the country to see it.",
            "Some of the visitors stayed for a week.",
            "A few of the children stayed for many years.",
            "And the old mill is still working today.",
        ),
        Voice("en-us+m3", 135),
    ),
)
"""One of each format; the last is longer than Whisper's window of 30 seconds."""


def write_clips(folder: Path) -> dict[str, str]:
    """Write the recordings and `said.json`; return each as a data URL."""
    folder.mkdir(parents=True, exist_ok=True)
    texts, urls = {}, {}
    for clip in CLIPS:
        samples = clip.samples()
        file = encode(samples, clip.kind)
        (folder / clip.name).write_bytes(file)
        urls[clip.name] = data_url(file, clip.kind)
        texts[clip.name] = {"text": clip.text, "seconds": round(len(samples) / SAMPLE_RATE, 2)}
    (folder / "said.json").write_text(json.dumps(texts, indent=2, ensure_ascii=False) + "\n")
    return urls


def main() -> None:
    """Write the recordings and the batch file that contains them."""
    urls = write_clips(EXAMPLES / "recordings")
    formats: dict[str, dict[str, object]] = {
        "dentist.wav": {"response_format": "json"},
        "meeting.flac": {"response_format": "text", "language": "en"},
        "weather.mp3": {"response_format": "verbose_json", "timestamp_granularities": ["word"]},
        "train.ogg": {"response_format": "vtt"},
        "order.m4a": {"response_format": "verbose_json", "timestamp_granularities": ["segment"]},
        "mill.webm": {"response_format": "srt"},
    }
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/audio/transcriptions",
            "body": {"model": NAME, "file_url": urls[name], **options},
        }
        for name, options in formats.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (EXAMPLES / "audio.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
