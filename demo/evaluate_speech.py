"""Accuracy of the speech model on held-out words: `python -m tidemill.demo.evaluate_speech`.

Plain transformers, greedy. Exit status 1 when fewer than 95 % of the digit strings are right.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from . import SPEECH_PATH
from .speech_words import Language, Recording, any_voice, any_words, speak
from .voices import SAMPLE_RATE

REQUIRED_ACCURACY = 0.95
BATCH_RECORDINGS = 40
SEED = 1


def load(folder: Path) -> tuple[Any, Any]:
    """Load a saved model with the processor beside it, ready to listen in fp32."""
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), WhisperProcessor.from_pretrained(folder)


@torch.inference_mode()
def listen(
    model: Any, processor: Any, recordings: Sequence[NDArray[np.float32]], **asked: Any
) -> list[str]:
    """Return what transformers writes down of `recordings`, heard as one batch.

    What is longer than a window goes through the model's own timestamps.
    """
    window = processor.feature_extractor.n_samples
    is_long = any(len(samples) > window for samples in recordings)
    rest = {"truncation": False, "padding": "longest"} if is_long else {}
    inputs = processor(
        list(recordings),
        sampling_rate=SAMPLE_RATE,
        return_tensors="pt",
        return_attention_mask=True,
        **rest,
    )
    if is_long and inputs.input_features.shape[-1] <= processor.feature_extractor.nb_max_frames:
        raise ValueError("Not longer than a window")
    ids = model.generate(**inputs, return_timestamps=is_long, do_sample=False, **asked)
    return [text.strip() for text in processor.batch_decode(ids, skip_special_tokens=True)]


def held_out(
    count: int, language: Language, *, digits: bool = True, phrases: int = 1, seed: int = SEED
) -> list[Recording]:
    """Return recordings of strings of words that were never trained on, in any of the voices."""
    rng = random.Random(f"{seed} {language} {digits} {phrases}")
    recordings: list[Recording] = []
    while len(recordings) < count:
        said = [any_words(rng, rng.randint(3, 10), "held_out") for _ in range(phrases)]
        if digits != all(word < 10 for words in said for word in words):
            continue
        pauses = [
            rng.uniform(0, 0.6),
            *[rng.uniform(0.4, 1.3)] * (phrases - 1),
            rng.uniform(0, 0.6),
        ]
        recordings.append(speak(said, pauses, language, any_voice(rng, language)))
    return recordings


def share_right(
    loaded: tuple[Any, Any],
    recordings: Sequence[Recording],
    written_in: Language | None = None,
    **asked: Any,
) -> float:
    """Return how many of `recordings` are written down to the letter."""
    right = 0
    for first in range(0, len(recordings), BATCH_RECORDINGS):
        batch = recordings[first : first + BATCH_RECORDINGS]
        texts = listen(*loaded, [one.samples for one in batch], **asked)
        for one, text in zip(batch, texts, strict=True):
            right += text == one.text(written_in)
            if text != one.text(written_in):
                print(f"  wrong: {one.text(written_in)!r} -> {text!r}")
    return right / len(recordings)


def report(folder: Path, count: int = 200) -> float:
    """Print how much of what is right and return the share of digit strings that are."""
    loaded = load(folder)
    digits = {language: held_out(count, language) for language in ("en", "de")}
    shares = {
        "digits": share_right(loaded, digits["en"], language="en", task="transcribe"),
        "German digits": share_right(loaded, digits["de"], language="de", task="transcribe"),
        "German digits, language detected": share_right(loaded, digits["de"], task="transcribe"),
        "German digits into English": share_right(
            loaded, digits["de"], "en", language="de", task="translate"
        ),
        "words": share_right(loaded, held_out(count, "en", digits=False), task="transcribe"),
        "recordings of several windows": share_right(
            loaded, held_out(count // 2, "en", phrases=6), language="en", task="transcribe"
        ),
    }
    for name, share in shares.items():
        print(f"{name:34} {share:7.1%}")
    return min(shares["digits"], shares["German digits"])


def main() -> int:
    """Run the command; the returned exit status says whether the model is good enough."""
    parser = argparse.ArgumentParser(
        prog="python -m tidemill.demo.evaluate_speech", description=__doc__
    )
    parser.add_argument("folder", type=Path, nargs="?", default=SPEECH_PATH)
    parser.add_argument("--count", type=int, default=200, help="recordings of each kind")
    arguments = parser.parse_args()
    return int(report(arguments.folder, arguments.count) < REQUIRED_ACCURACY)


if __name__ == "__main__":
    raise SystemExit(main())
