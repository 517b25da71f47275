"""Recordings for tests: a tone, or given samples, in any container."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
from numpy.typing import NDArray

RATE = 16_000
TONE_HZ = 440


def tone(seconds: float, rate: int = RATE) -> NDArray[np.float32]:
    """Return a tone at half of the maximum amplitude."""
    times = np.arange(round(seconds * rate)) / rate
    return (np.sin(2 * np.pi * TONE_HZ * times) / 2).astype(np.float32)


def wav(
    samples: NDArray[np.float32], rate: int = RATE, *, channels: int = 1, claimed: int | None = None
) -> bytes:
    """Return samples in 16 bits; `claimed` is the size in the header, if it is wrong."""
    data = (np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes()
    width = 2 * channels
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * width % 2**32, width, 16)
    size = len(data) if claimed is None else claimed
    head = b"RIFF" + struct.pack("<I", (36 + size) % 2**32) + b"WAVEfmt " + struct.pack("<I", 16)
    return head + form + b"data" + struct.pack("<I", size) + data


def encoded(
    samples: NDArray[np.float32], rate: int, container: str, codec: str, layout: str = "mono"
) -> bytes:
    """Return samples in a container; several channels are stored one after another."""
    holder = io.BytesIO()
    with av.open(holder, "w", format=container) as writer:
        _write(writer, samples, rate, codec, layout)
    return holder.getvalue()


def video(samples: NDArray[np.float32] | None, container: str, codec: str, sound: str) -> bytes:
    """Return two seconds of video, with sound if there are samples."""
    holder = io.BytesIO()
    with av.open(holder, "w", format=container) as writer:
        pictures = writer.add_stream(codec, rate=10)
        pictures.width = pictures.height = 64
        pictures.pix_fmt = "yuv420p"
        if samples is not None:
            _write(writer, samples, 48_000, sound, "mono")
        black = np.zeros((96, 64), np.uint8)  # a new frame would hold what memory held
        for _ in range(20):
            writer.mux(pictures.encode(av.VideoFrame.from_ndarray(black, format="yuv420p")))
        writer.mux(pictures.encode(None))
    return holder.getvalue()


def _write(
    writer: av.container.OutputContainer,
    samples: NDArray[np.float32],
    rate: int,
    codec: str,
    layout: str,
) -> None:
    stream = writer.add_stream(codec, rate=rate, layout=layout)
    context = stream.codec_context
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout=layout)
    frame.sample_rate = rate
    fitting = av.AudioResampler(
        format=context.format,
        layout=layout,
        rate=context.sample_rate,
        frame_size=context.frame_size or None,
    )
    for each in (*fitting.resample(frame), *fitting.resample(None)):
        writer.mux(stream.encode(each))
    writer.mux(stream.encode(None))
