"""Decoding of recordings, and the errors of invalid bytes."""

from __future__ import annotations

import io
import random
import socket
import struct
import sys
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.media.clips import RATE, TONE_HZ, encoded, tone, video, wav
from tidemill.engine.media.audio_decoding import decode
from tidemill.protocol.errors import RequestError
from tidemill.protocol.in_flight import MemoryBudget

HOURS = 3_600.0
BUDGET = MemoryBudget(2**30)


def refusal(data: bytes, *, max_seconds: float = 2 * HOURS) -> str:
    """Return the message of a rejected recording: a 400 with the field as param."""
    with pytest.raises(RequestError) as caught:
        decode(data, RATE, max_seconds=max_seconds, budget=BUDGET)
    assert (caught.value.status_code, caught.value.param) == (400, "file_url")
    return caught.value.message


def decoded(data: bytes) -> NDArray[np.float32]:
    """Return the decoded samples, one row."""
    samples = decode(data, RATE, max_seconds=2 * HOURS, budget=BUDGET)
    assert (samples.dtype, samples.ndim) == (np.float32, 1)
    return samples


def pitch(samples: NDArray[np.float32]) -> float:
    """Return the loudest frequency, in Hz."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples))


def test_samples_at_the_models_rate_do_not_change() -> None:
    """With 16 bits and no resampling they differ only by rounding."""
    samples = tone(3)
    np.testing.assert_allclose(decoded(wav(samples)), samples, atol=1 / 16_000)


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("wav", "pcm_u8", 8_000),
        ("wav", "pcm_s24le", 96_000),
        ("wav", "pcm_f32le", 8_000),
        ("wav", "pcm_f64le", 16_000),
        ("wav", "pcm_mulaw", 8_000),
        ("w64", "pcm_s16le", 44_100),
        ("aiff", "pcm_s16be", 22_050),
        ("au", "pcm_s16be", 16_000),
        ("caf", "pcm_s16le", 11_025),
        ("flac", "flac", 44_100),
        ("mp3", "libmp3lame", 44_100),
        ("mp3", "libmp3lame", 16_000),
        ("ogg", "libopus", 48_000),
        ("ipod", "aac", 44_100),
        ("mp4", "aac", 22_050),
        ("adts", "aac", 44_100),
        ("mov", "alac", 44_100),
        ("webm", "libopus", 48_000),
    ],
)
def test_containers_of_all_kinds_are_read(container: str, codec: str, rate: int) -> None:
    """The tone keeps its pitch, loudness and length, for any sampling rate."""
    samples = decoded(encoded(tone(3, rate), rate, container, codec))
    assert len(samples) / RATE == pytest.approx(3, abs=0.1)
    assert pitch(samples) == pytest.approx(TONE_HZ, abs=1)
    assert np.sqrt((samples**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.07)


def test_channels_are_mixed_down() -> None:
    """The result is their mean, planar or not."""
    left, right = tone(1), np.zeros(RATE, np.float32)
    both = np.stack([left, right], axis=1).ravel()
    np.testing.assert_allclose(decoded(wav(both, channels=2)), left / 2, atol=1 / 16_000)
    samples = decoded(encoded(both, RATE, "ipod", "alac", "stereo"))
    np.testing.assert_allclose(samples, left / 2, atol=1 / 16_000)


@pytest.mark.parametrize(
    ("container", "codec", "layout", "channels"),
    [
        ("ipod", "aac", "5.1", 6),
        ("ipod", "aac", "7.1", 8),
        ("mov", "alac", "7.1(wide)", 8),
        ("flac", "flac", "7.1", 8),
        ("wav", "pcm_s16le", "hexadecagonal", 16),
    ],
)
def test_many_channels_are_one_recording(
    container: str, codec: str, layout: str, channels: int
) -> None:
    """They are in separate planes, or interleaved."""
    samples = np.repeat(tone(1, 48_000), channels)
    mixed = decoded(encoded(samples, 48_000, container, codec, layout))
    assert pitch(mixed) == pytest.approx(TONE_HZ, abs=1)
    assert np.abs(mixed).max() > 0.4


def test_silence_is_a_recording() -> None:
    """A single sample is also a recording."""
    assert not decoded(wav(np.zeros(RATE, np.float32))).any()
    assert len(decoded(wav(np.zeros(1, np.float32)))) == 1


def test_the_sound_of_a_video_is_decoded() -> None:
    """Its pictures are ignored, and may be longer."""
    for container, codec, sound in (("mp4", "mpeg4", "aac"), ("webm", "libvpx", "libopus")):
        samples = decoded(video(tone(0.5, 48_000), container, codec, sound))
        assert len(samples) / RATE == pytest.approx(0.5, abs=0.05)
        assert pitch(samples) == pytest.approx(TONE_HZ, abs=2)


def test_a_video_without_sound_is_rejected() -> None:
    """The message says that it is a video without sound."""
    for container, codec in (("mp4", "mpeg4"), ("webm", "libvpx")):
        assert "video without sound" in refusal(video(None, container, codec, ""))


def test_no_bytes_and_no_samples_are_rejected() -> None:
    """A header alone is not a recording."""
    assert "0 bytes" in refusal(b"")
    assert "0 samples" in refusal(wav(np.zeros(0, np.float32)))


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 50,
        b'{"error": "expired"}',
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"PK\x03\x04" + bytes(2_000),
        np.random.default_rng(1).bytes(10_000),
        wav(tone(1))[:20],
    ],
)
def test_data_that_is_not_a_recording_is_rejected(data: bytes) -> None:
    """It is a page, a picture, an archive or noise."""
    assert "is not a valid recording" in refusal(data)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("wav", "pcm_s16le"), ("flac", "flac"), ("ipod", "aac"), ("webm", "libopus")],
)
def test_a_truncated_recording_is_rejected(container: str, codec: str) -> None:
    """The container states its length."""
    whole = encoded(tone(10, 48_000), 48_000, container, codec)
    assert "is truncated" in refusal(whole[: len(whole) // 2])


@pytest.mark.parametrize(("container", "codec"), [("mp3", "libmp3lame"), ("ogg", "libopus")])
def test_the_rest_of_a_truncated_stream_is_decoded(container: str, codec: str) -> None:
    """Streams do not state their length."""
    whole = encoded(tone(10, 48_000), 48_000, container, codec)
    assert len(decoded(whole[: len(whole) // 2])) / RATE == pytest.approx(5, abs=0.1)


def test_a_piped_wav_has_no_size() -> None:
    """Its writer could not know the size: all data is used."""
    for claimed in (0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF024):
        assert len(decoded(wav(tone(2), claimed=claimed))) == 2 * RATE


def test_a_short_missing_end_is_accepted() -> None:
    """Encoders round; a second is a large part of a short recording."""
    assert len(decoded(wav(tone(1), claimed=2 * 6 * RATE // 5))) == RATE
    assert "is truncated" in refusal(wav(tone(1), claimed=2 * 2 * RATE))


def test_damaged_packets_are_skipped_if_they_are_few() -> None:
    """Too many make the recording meaningless."""
    whole = encoded(tone(20, 44_100), 44_100, "ipod", "aac")
    few, many = bytearray(whole), bytearray(whole)
    few[len(whole) // 2 : len(whole) // 2 + 500] = b"\xff" * 500
    assert len(decoded(bytes(few))) / RATE == pytest.approx(20, abs=0.1)
    many[len(whole) // 4 : len(whole) // 2] = b"\xff" * (len(whole) // 2 - len(whole) // 4)
    assert "is damaged" in refusal(bytes(many))


@pytest.mark.parametrize("rate", [1, 999, 800_000, 2**32 - 1])
def test_an_implausible_sample_rate_is_rejected(rate: int) -> None:
    """Seconds would become days, or hours would become a moment."""
    message = refusal(wav(tone(1), rate))
    assert "sample rate" in message or "is not a valid recording" in message


def test_samples_that_are_not_finite_are_rejected() -> None:
    """They would make the model's output meaningless."""
    for value in (np.nan, np.inf, 1e30):
        samples = tone(1)
        samples[RATE // 2] = value
        assert "invalid samples" in refusal(encoded(samples, RATE, "wav", "pcm_f32le"))


def test_ten_hours_are_rejected_by_the_containers_length() -> None:
    """Nothing is decoded."""
    data = wav(np.zeros(8_000 * 100, np.float32), 8_000)
    assert "longer than the maximum of 99 s" in refusal(data, max_seconds=99)
    assert len(decode(data, 8_000, max_seconds=101, budget=BUDGET)) == 800_000


def test_a_container_that_unfolds_into_ten_hours_is_stopped_on_its_way() -> None:
    """It states no length; memory and time stay near those of the limit."""
    minute = encoded(np.zeros(48_000 * 60, np.float32), 48_000, "adts", "aac")
    hours = minute * 600
    assert len(hours) < 25 * 2**20
    tracemalloc.start()
    try:
        assert "longer than the maximum of 120 s" in refusal(hours, max_seconds=120)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * 120 * RATE * 4


def test_many_channels_of_a_high_rate_are_stopped_on_their_way() -> None:
    """A second of them takes more than a second's work."""
    samples = np.zeros(8 * 192_000 * 4, np.float32)
    data = encoded(samples, 192_000, "wav", "pcm_s16le", "7.1")
    assert "longer than the maximum of 10 s" in refusal(data, max_seconds=10)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory can be reset only there")
@pytest.mark.parametrize("num_packets", [2**20, 2**24, 2**26, 2**31])
def test_a_header_with_many_packets_gets_no_memory_for_them(num_packets: int) -> None:
    """FFmpeg keeps 24 bytes for each: with one byte each, in one chunk, they need no table."""
    data = bytearray(encoded(tone(2, 44_100), 44_100, "ipod", "aac"))
    for box, place, values in (
        (b"stsz", 8, struct.pack(">II", 1, num_packets)),  # the size of each, how many
        (b"stsc", 16, struct.pack(">I", num_packets)),  # how many in a chunk
        (b"stts", 12, struct.pack(">I", num_packets)),  # how many of one duration
    ):
        start = data.index(box) + place
        data[start : start + len(values)] = values
    peak_bytes()
    before = peak_bytes()
    assert "`file_url`" in refusal(bytes(data))
    assert peak_bytes() - before < 150 * 2**20


def peak_bytes() -> int:
    """Return the peak memory of this process since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1_024


class _Silence:
    """A server that counts its visits."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.visits = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, which does not notice that its socket is closed while it waits."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.socket.close()

    def _listen(self) -> None:
        while True:
            try:
                self.socket.accept()[0].close()
            except OSError:
                return
            self.visits += 1


def test_no_playlist_makes_anything_be_opened(tmp_path: Path) -> None:
    """Neither files nor hosts of HLS, concat, DASH, SDP or numbered pictures are opened."""
    inside = tmp_path / "inside.wav"
    inside.write_bytes(wav(tone(1)))
    with closing(_Silence()) as server:
        for place in (
            str(inside),
            f"file://{inside}",
            "/etc/passwd",
            f"http://127.0.0.1:{server.socket.getsockname()[1]}/a.wav",
        ):
            for text in (
                f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{place}\n#EXT-X-ENDLIST\n",
                f"ffconcat version 1.0\nfile '{place}'\nduration 1\n",
                f'<?xml version="1.0"?><MPD><Period><BaseURL>{place}</BaseURL></Period></MPD>',
                f"v=0\nc=IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\na=control:{place}\n",
            ):
                assert "is not a valid recording" in refusal(text.encode())
        assert server.visits == 0


def test_omitted_silence_is_restored() -> None:
    """The sound after it keeps its time."""
    holder = io.BytesIO()
    with av.open(holder, "w", format="matroska") as writer:
        stream = writer.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for start in (0, 5):
            samples = (tone(1) * 32_767).astype(np.int16).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = RATE
            frame.pts = start * RATE
            writer.mux(stream.encode(frame))
        writer.mux(stream.encode(None))
    samples = decoded(holder.getvalue())
    assert len(samples) / RATE == pytest.approx(6, abs=0.1)
    loud = np.abs(samples[: 6 * RATE]).reshape(-1, RATE // 10).max(axis=1) > 0.1
    assert loud.tolist() == [True] * 10 + [False] * 40 + [True] * 10


def test_damaged_data_is_decoded_or_rejected() -> None:
    """No other error is raised, for any changed bytes."""
    forms = (("ogg", "libopus"), ("mp3", "libmp3lame"), ("flac", "flac"), ("webm", "libopus"))
    wholes = [encoded(tone(1, 48_000), 48_000, *form) for form in forms]
    wholes += [wav(tone(1)), video(tone(1, 48_000), "mp4", "mpeg4", "aac")]
    rng, refused = random.Random(5), 0
    for _ in range(400):
        data = bytearray(rng.choice(wholes))
        near = rng.choice((60, 600, len(data)))
        for _ in range(rng.randint(1, 30)):
            data[rng.randrange(min(len(data), near))] = rng.randrange(256)
        try:
            decode(bytes(data), RATE, max_seconds=60, budget=BUDGET)
        except RequestError:
            refused += 1
    assert 0 < refused < 400


def test_an_unsupported_codec_is_rejected() -> None:
    """One is unknown to FFmpeg, and another is known but not allowed."""
    data = bytearray(wav(tone(1)))
    data[20:22] = b"\x99\x19"
    for unread in (bytes(data), encoded(tone(1, 8_000), 8_000, "wav", "adpcm_g726")):
        assert "an unsupported audio codec" in refusal(unread)
