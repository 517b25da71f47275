"""Encoders and speech: random weights of bge-base's and Whisper's shapes, texts and noise."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from bench.compare import speech
from bench.gpu.parts.task import Numbers, Place, Task
from tidemill.engine.config import DeviceName, EngineConfig
from tidemill.engine.kernels.backends import TRITON_TYPES
from tidemill.engine.model.encoders.families import architecture_of
from tidemill.engine.model.encoders.native import load
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.scheduling.encoding import EncodingRequest
from tidemill.engine.tasks.pooling import make_core

SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
TINY_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# Texts of a run, and their tokens.
TEXTS = {"short": (40_000, 16, 64), "long": (8_000, 300, 500)}
TINY_TEXTS = {"short": (4, 3, 9)}
CLIPS = 400
SECONDS = 8.0


def tasks(place: Place) -> Iterator[Task]:
    """Yield texts of two lengths, and recordings."""
    for name, texts in (TINY_TEXTS if place.is_tiny else TEXTS).items():
        yield Task(f"bge-base, {name} texts", partial(encode, place, *texts), SECONDS)
    yield Task("whisper small", partial(transcribe, place), SECONDS)


def encode(place: Place, count: int, shortest: int, longest: int) -> Numbers:
    """Measure vectors of random texts, after a first round that captures the graphs."""
    import torch
    from transformers import BertConfig, BertModel

    sizes = TINY_SIZES if place.is_tiny else SIZES
    torch.manual_seed(0)
    config = BertConfig(intermediate_size=4 * sizes["hidden_size"], **sizes)
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        found = architecture_of("bge-base", config.to_dict())
        model = load(find_checkpoint(folder), found, place.dtype, place.device)
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest, count).tolist()
    requests = [EncodingRequest(rng.integers(200, 30_000, size).tolist()) for size in lengths]
    core = make_core(model, EngineConfig("bge-base", max_num_seqs=4 if place.is_tiny else None))
    for _ in range(2):
        started, before = time.perf_counter(), core.stats()
        for request in requests:
            core.add(request)
        while core.step() is not None:
            pass
        place.wait()
        seconds = time.perf_counter() - started
    steps = core.stats().steps - before.steps
    return {
        "rows_per_second": count / seconds,
        "tokens_per_second": sum(lengths) / seconds,
        "step_seconds": seconds / steps,
        "steps": steps,
    }


@contextmanager
def not_interpreting() -> Iterator[None]:
    """Use the CPU's own kernels."""
    TRITON_TYPES.discard("cpu")
    try:
        yield
    finally:
        TRITON_TYPES.add("cpu")


def transcribe(place: Place) -> Numbers:
    """Measure recordings of noise, from samples to tokens."""
    count = 1 if place.is_tiny else CLIPS
    with tempfile.TemporaryDirectory() as folder:
        speech.make_model(Path(folder), "trial" if place.is_tiny else "small")
        dtype = "float32" if place.is_tiny else "bfloat16"
        # Interpreted, a window of 1,500 states takes minutes.
        with not_interpreting() if place.is_tiny else nullcontext():
            device: DeviceName = "cpu" if place.is_tiny else "cuda"
            seconds = speech.run_ours(Path(folder), dtype, count, time.perf_counter, device)
    audio = sum(map(len, speech.clips(count))) / speech.RATE
    return {"audio_per_second": audio / seconds, "rows_per_second": count / seconds}
