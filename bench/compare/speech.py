"""Transcription: seconds of audio per second, compared with transformers' batched `generate`.

    python -m bench.compare.speech out/bench/speech --shape base --dtype bfloat16

200 clips of 5 to 20 s are noise, the model has whisper's shape and random weights, and every
window is written to the same number of tokens, about what such a clip has in speech: so neither
side waits for a longer text. Each side runs in a separate process, on all cores, from samples to
tokens; loading is not counted. transformers runs with each of some batch sizes over a part of the
clips, and with the best over all of them. With --one-core each has one thread, and the seconds are
those of its process, so that other work on the machine has little influence.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tidemill.engine.config import DeviceName

Clock = Callable[[], float]

RATE = 16_000
SHORTEST, LONGEST = 5.0, 20.0
OUTPUT_TOKENS = 44
# The prompt of an English-only model without timestamps.
PROMPT_TOKENS = 2
VOCABULARY, END = 51_864, 50_256
# Hidden width, layers of encoder and decoder, heads; the smallest is to try scripts.
SHAPES = {"trial": (64, 1, 1), "tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
BATCH_SIZES = (1, 4, 8, 16)
CLIPS_TO_CHOOSE_BY = 32


def clips(count: int) -> list[NDArray[np.float32]]:
    """Return recordings of noise."""
    rng = np.random.default_rng(0)
    lengths = (rng.uniform(SHORTEST, LONGEST, count) * RATE).astype(int)
    return [(rng.standard_normal(length) * 0.1).astype(np.float32) for length in lengths]


def make_model(folder: Path, shape: str) -> None:
    """Write a random English-only model and its preprocessor."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    hidden, layers, heads = SHAPES[shape]
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=hidden,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * hidden,
        decoder_ffn_dim=4 * hidden,
    )
    model = WhisperForConditionalGeneration(config)
    config = model.generation_config
    config.eos_token_id = config.pad_token_id = END
    config.decoder_start_token_id, config.no_timestamps_token_id = 50_257, 50_362
    config.forced_decoder_ids = [[1, 50_362]]
    config.suppress_tokens = [END]
    config.begin_suppress_tokens = None
    config.max_length = OUTPUT_TOKENS
    model.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)


def run_ours(
    folder: Path, dtype: Any, count: int, clock: Clock, device: DeviceName = "cpu"
) -> float:
    """Return our engine's seconds."""
    from tidemill.engine.config import EngineConfig
    from tidemill.engine.model.speech.loading import load_speech
    from tidemill.engine.scheduling.speech import SpeechRequest
    from tidemill.engine.tasks.speech import make_core

    settings = EngineConfig(str(folder), dtype=dtype, device=device, max_num_seqs=64)
    core = make_core(load_speech(settings), settings)
    requests = [SpeechRequest(samples) for samples in clips(count)]
    core.add(requests[0])
    while core.step() is not None:
        pass
    start = clock()
    recordings = [core.add(request) for request in requests]
    while core.step() is not None:
        pass
    seconds = clock() - start
    for recording in recordings:
        assert recording.result().num_output_tokens == OUTPUT_TOKENS
    return seconds


def run_transformers(folder: Path, dtype: str, count: int, clock: Clock, batch_size: int) -> float:
    """Return transformers' seconds in batches."""
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype))

    def write(samples: list[NDArray[np.float32]]) -> None:
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        made = model.generate(features.to(model.dtype), return_timestamps=False)
        assert made.shape == (len(samples), OUTPUT_TOKENS), made.shape

    recordings = clips(count)
    write(recordings[:1])
    start = clock()
    for first in range(0, count, batch_size):
        write(recordings[first : first + batch_size])
    return clock() - start


def measured(arguments: argparse.Namespace, count: int, batch_size: int) -> float:
    """Return one side's seconds of audio per second, in a new process; batch size 0 is ours."""
    command = [
        sys.executable,
        "-m",
        "bench.compare.speech",
        str(arguments.folder),
        "--dtype",
        arguments.dtype,
    ]
    command += ["--clips", str(count), "--side", str(batch_size)]
    command += ["--one-core"] if arguments.one_core else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    audio = sum(len(samples) for samples in clips(count)) / RATE
    return audio / float(done.stdout.split()[-1])


def main() -> None:
    """Compare the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--side", type=int, help="run only one side: 0 for ours, else a batch size")
    parser.add_argument("--one-core", action="store_true")
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(run_side(arguments))
        return
    if not (arguments.folder / "config.json").exists():
        make_model(arguments.folder, arguments.shape)
    few = min(CLIPS_TO_CHOOSE_BY, arguments.clips)
    speeds = {size: measured(arguments, few, size) for size in BATCH_SIZES}
    for size, speed in speeds.items():
        print(f"transformers, {few} clips, batches of {size}: {speed:.1f} s of audio a second")
    best = max(speeds, key=lambda size: speeds[size])
    for _ in range(arguments.runs):
        theirs, ours = (measured(arguments, arguments.clips, side) for side in (best, 0))
        print(f"transformers {theirs:.1f}, tidemill {ours:.1f}: {ours / theirs:.2f} times")


def run_side(arguments: argparse.Namespace) -> float:
    """Return the seconds of one side, run here."""
    import torch

    clock: Clock = time.perf_counter
    if arguments.one_core:
        torch.set_num_threads(1)
        clock = time.process_time
    parts = (arguments.folder, arguments.dtype, arguments.clips, clock)
    return run_transformers(*parts, arguments.side) if arguments.side else run_ours(*parts)


if __name__ == "__main__":
    main()
