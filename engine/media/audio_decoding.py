"""Audio decoding: a container's bytes to mono fp32 samples at the model's sampling rate.

FFmpeg reads untrusted bytes, so it gets few ways to fail: bytes in memory and a reader that opens
nothing else, only the containers and codecs of `_CONTAINERS` and `_CODECS`, and one frame after
another, so that decoding never exceeds the limit of seconds. No allocation of FFmpeg's is larger
than the header of a few hours needs.

The container's length, or an estimate if it has none, is reserved before anything is decoded; only
one recording at a time may exceed its reservation.

A recording must have the length that its container states: a much shorter one was truncated.
Streams (mp3, ogg, aac) state none; a truncated one is transcribed as far as it goes.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import av
import av.utils
import numpy as np
import soxr
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import FILE_URL
from tidemill.protocol.in_flight import MemoryBudget, Reservation

_CONTAINERS = "wav,w64,aiff,au,caf,flac,mp3,ogg,mov,mp4,m4a,3gp,matroska,webm,aac,amr"
# Containers whose length is an estimate from the first packets' sizes, or the last timestamp.
_STREAMS = frozenset({"mp3", "ogg", "aac", "amr"})
_PCM = "u8 s16le s16be s24le s24be s32le s32be f32le f32be f64le f64be alaw mulaw".split()
_CODECS = (
    *(f"pcm_{form}" for form in _PCM),
    *"adpcm_ms adpcm_ima_wav adpcm_ima_qt alac flac mp2 mp2float mp3 mp3float".split(),
    *"aac opus vorbis amrnb amrwb gsm gsm_ms".split(),
)
_MIN_RATE, _MAX_RATE = 1_000, 768_000
_MAX_CHANNELS = 32
# PyAV reads past the eighth plane pointer.
_MAX_PLANES = 7
# At most two channels at 96 kHz: otherwise a forged rate could make a second very long.
_MAX_VALUES_PER_SECOND = 192_000
# Above this missing part a recording counts as truncated.
_MAX_MISSING_SHARE, _MAX_MISSING_SECONDS = 0.1, 0.25
_MAX_BROKEN_SHARE = 0.1
# Smaller gaps between frames are rounding of their timestamps.
_MAX_GAP_SECONDS = 0.1
_MAX_RIFF_CHUNKS = 64
_UNKNOWN_RIFF_BYTES = 0x7FFF0000
_MAX_AMPLITUDE = 1e4
_ZERO_AND_SCALE = {"u8": (128, 128), "s16": (0, 2**15), "s32": (0, 2**31)}
_FIRST_SECONDS = 30
# 16 kbit/s: streams compressed more tightly outgrow their reservation.
_LEAST_BYTES_PER_SECOND = 2_000

# Limit on a container's tables, regardless of its header; FFmpeg itself would allocate 2 GB.
_MAX_TABLE_BYTES = 64 * 2**20

Samples = NDArray[np.float32]
_SAMPLE_BYTES = 4

# PyAV's FFmpeg is loaded through a module that is linked to it.
_set_max_alloc = ctypes.CDLL(av.utils.__file__).av_max_alloc
_set_max_alloc.argtypes, _set_max_alloc.restype = (ctypes.c_size_t,), None
_set_max_alloc(_MAX_TABLE_BYTES)


class _Refused(Exception):
    """An unreadable recording; the message follows the words "the recording"."""


def decode(
    data: bytes,
    sampling_rate: int,
    *,
    max_seconds: float,
    budget: MemoryBudget,
    param: str = FILE_URL,
) -> Samples:
    """Return the samples `[n]` of a recording; raise `RequestError` for an invalid one.

    Nothing is decoded beyond `max_seconds`, the limit of a recording. The call blocks until the
    budget has room for the samples. `param` is the recording's place in the body.
    """
    try:
        return _samples_of(data, sampling_rate, max_seconds, budget)
    except _Refused as exc:
        message = f"The recording of `{param}` {exc}."
        raise RequestError(message, param=param, code="bad_audio") from exc


def _samples_of(
    data: bytes, sampling_rate: int, max_seconds: float, budget: MemoryBudget
) -> Samples:
    """Return the samples of a recording; raises `_Refused`."""
    if not data:
        _refuse("is empty: 0 bytes")
    try:
        with av.open(
            io.BytesIO(data),
            "r",
            container_options={
                "format_whitelist": _CONTAINERS,
                "codec_whitelist": ",".join(_CODECS),
                "protocol_whitelist": "none",
            },
            io_open=_open_nothing,
        ) as container:
            stream = _audio_stream_of(container)
            stated = _stated_seconds(container, stream)
            if stated is not None and stated > max_seconds:
                _refuse_longer(max_seconds)
            expected = len(data) / _LEAST_BYTES_PER_SECOND if stated is None else max(0.0, stated)
            num_samples = int((min(expected, max_seconds) + 1) * sampling_rate)
            with budget.reserve(num_samples * _SAMPLE_BYTES) as reservation:
                buffer = _SampleBuffer(
                    sampling_rate,
                    max_seconds,
                    reservation,
                    keeps_time=container.format.name not in _STREAMS,
                )
                samples = _decoded(container, stream, buffer)
                stated = buffer.seconds if stated is None else stated
    except (av.FFmpegError, ValueError) as exc:
        raise _Refused(
            "is not a valid recording, is truncated, or has an unsupported format: use wav, flac,"
            " mp3, ogg, m4a or webm"
        ) from exc
    _check_whole(len(samples) / sampling_rate, stated * _claimed_share(data))
    return samples


def _open_nothing(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    """Raise for every file that a container refers to."""
    del url, flags, options
    raise PermissionError("a recording must not refer to other files")


def _audio_stream_of(container: InputContainer) -> AudioStream:
    """Return a container's audio stream; raises `_Refused` for an unsupported one."""
    stream = container.streams.best("audio")
    if not isinstance(stream, AudioStream):
        _refuse(
            "has no audio" + (": it is a video without sound" if container.streams.video else "")
        )
    # A codec that FFmpeg does not know has no context.
    if getattr(stream.codec_context, "name", None) not in _CODECS:
        _refuse("has an unsupported audio codec")
    _check_rate(stream.codec_context.sample_rate)
    return stream


def _decoded(container: InputContainer, stream: AudioStream, buffer: _SampleBuffer) -> Samples:
    """Return the samples of a stream."""
    packets = _Packets()
    for frame in packets.frames(container, stream):
        buffer.add(frame)
    samples = buffer.end()
    if not len(samples):
        _refuse("has no audio: 0 samples")
    if packets.broken > _MAX_BROKEN_SHARE * packets.total:
        _refuse(f"is damaged: {packets.broken} of its {packets.total} packets are unreadable")
    return samples


def _check_whole(seconds: float, stated: float) -> None:
    """Raise `_Refused` for a recording much shorter than its container states."""
    if stated - seconds > max(_MAX_MISSING_SECONDS, _MAX_MISSING_SHARE * stated):
        _refuse(f"is truncated: it has {seconds:.1f} of the {stated:.1f} s that it states")


def _claimed_share(data: bytes) -> float:
    """Return the ratio of a wav's claimed length to its actual one; FFmpeg uses the actual one."""
    if data[:4] != b"RIFF":
        return 1.0
    start = 12
    for _ in range(_MAX_RIFF_CHUNKS):
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        if data[start : start + 4] == b"data":
            num_bytes = len(data) - start - 8
            # A writer to a pipe does not know the size, and writes the largest one.
            return size / num_bytes if 0 < num_bytes < size < _UNKNOWN_RIFF_BYTES else 1.0
        start += 8 + size + size % 2
    return 1.0


def _stated_seconds(container: InputContainer, stream: AudioStream) -> float | None:
    """Return the length that the container states; None if that is an estimate."""
    if container.format.name in _STREAMS:
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is None or len(container.streams) > 1:
        return None
    return container.duration / av.time_base


@dataclass(slots=True)
class _Packets:
    """A stream's packets: unreadable ones are skipped and counted."""

    total: int = 0
    broken: int = 0

    def frames(self, container: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
        """Yield the readable frames."""
        try:
            for packet in container.demux(stream):
                self.total += 1
                try:
                    frames = packet.decode()
                except av.FFmpegError:
                    self.broken += 1
                    continue
                yield from frames
        except av.FFmpegError:
            self.total, self.broken = self.total + 1, self.broken + 1


class _SampleBuffer:
    """The samples so far, at the model's rate, in one array that grows.

    With `keeps_time` frames have timestamps: a gap between two of them, which browsers leave for
    silence, becomes silence.
    """

    def __init__(
        self,
        sampling_rate: int,
        max_seconds: float,
        reservation: Reservation,
        *,
        keeps_time: bool,
    ) -> None:
        self._reservation = reservation
        self.seconds = 0.0
        self._keeps_time = keeps_time
        self._start_time: float | None = None
        self._rate = sampling_rate
        self._max_seconds = max_seconds
        self._num_values = 0
        self._samples: Samples = np.empty(_FIRST_SECONDS * sampling_rate, np.float32)
        self._length = 0
        self._from_rate = 0
        self._resampling: soxr.ResampleStream | None = None

    def add(self, frame: AudioFrame) -> None:
        """Append one frame; raises `_Refused` beyond the limits."""
        rate, channels = frame.sample_rate, len(frame.layout.channels)
        _check_rate(rate)
        if not 1 <= channels <= _MAX_CHANNELS:
            _refuse(f"has {channels} channels: 1 to {_MAX_CHANNELS} are supported")
        if rate != self._from_rate:
            self._end_rate()
            self._from_rate = rate
            if rate != self._rate:
                self._resampling = soxr.ResampleStream(rate, self._rate, 1, dtype="float32")
        if self._keeps_time and frame.time is not None:
            self._pad_silence_until(frame.time, rate)
        self._count(frame.samples, channels)
        self._append(_mono(frame, channels))

    def _pad_silence_until(self, time: float, rate: int) -> None:
        """Append silence up to a frame's time, if it is later than the samples so far."""
        if self._start_time is None:
            self._start_time = time
        while (missing := time - self._start_time - self.seconds) > _MAX_GAP_SECONDS:
            silence = np.zeros(max(1, int(min(missing, 1.0) * rate)), np.float32)
            self._count(len(silence), 1)
            self._append(silence)

    def _count(self, num_samples: int, channels: int) -> None:
        self.seconds += num_samples / self._from_rate
        self._num_values += num_samples * channels
        if (
            self.seconds > self._max_seconds
            or self._num_values > self._max_seconds * _MAX_VALUES_PER_SECOND
        ):
            _refuse_longer(self._max_seconds)

    def _append(self, mono: Samples) -> None:
        self._store(mono if self._resampling is None else self._resampling.resample_chunk(mono))

    def end(self) -> Samples:
        """Return all samples `[n]`."""
        self._end_rate()
        self._samples.resize(self._length, refcheck=False)
        return self._samples

    def _end_rate(self) -> None:
        if self._resampling is not None:
            nothing = np.empty(0, np.float32)
            self._store(self._resampling.resample_chunk(nothing, last=True))
            self._resampling = None

    def _store(self, samples: Samples) -> None:
        if len(samples) and not np.abs(samples).max() <= _MAX_AMPLITUDE:  # true for NaN, too
            _refuse("has invalid samples: not finite, or far too large")
        length = self._length + len(samples)
        self._reservation.grow(length * _SAMPLE_BYTES)
        if length > len(self._samples):
            # In place if the system can move pages, so that hours of audio are not copied.
            self._samples.resize(max(length, 2 * len(self._samples)), refcheck=False)
        self._samples[self._length : length] = samples
        self._length = length


def _mono(frame: AudioFrame, channels: int) -> Samples:
    """Return a frame's samples `[n]`, the mean of its channels, in [-1, 1]."""
    if frame.format.is_planar and channels > _MAX_PLANES:
        packed = av.AudioResampler(format=frame.format.packed, layout=frame.layout)
        [frame] = packed.resample(frame)
    values: NDArray[Any] = frame.to_ndarray()  # [channels, n], or [1, n * channels]
    if not frame.format.is_planar:
        values = values.reshape(-1, channels).T
    zero, scale = _ZERO_AND_SCALE.get(frame.format.name.removesuffix("p"), (0, 1))
    mono = values.mean(axis=0, dtype=np.float64)
    samples: Samples = ((mono - zero) / scale).astype(np.float32)
    return samples


def _check_rate(rate: int) -> None:
    if not _MIN_RATE <= rate <= _MAX_RATE:
        _refuse(f"has a sample rate of {rate:,} Hz: {_MIN_RATE:,} to {_MAX_RATE:,} are supported")


def _refuse_longer(max_seconds: float) -> NoReturn:
    _refuse(f"is longer than the maximum of {max_seconds:,.0f} s")


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)
