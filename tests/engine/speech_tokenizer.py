"""The speech model's tokenizer: Whisper's, with byte-level BPE of its few words."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import WhisperTokenizer

from tests.demo.spoken import NUM_DIGITS, WORDS

TEXT_TOKENS = 390
"""Bytes and merges: a digit is one token, as are half of the words; the others are two or three."""
DIGIT_WEIGHT = 10
TIME_PRECISION = 0.02

END = "<|endoftext|>"
START = "<|startoftranscript|>"
START_OF_PREVIOUS = "<|startofprev|>"
NO_SPEECH = "<|nospeech|>"
NO_TIMESTAMPS = "<|notimestamps|>"
TASKS = ("translate", "transcribe")


def build_tokenizer(window_seconds: int, max_length: int) -> WhisperTokenizer:
    """Build the tokenizer, the same one every time, with a timestamp every 20 ms of a window."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    spoken = [f" {word}" for words in WORDS.values() for word in words]
    digits = [f" {word}" for words in WORDS.values() for word in words[:NUM_DIGITS]]
    figures = [f" {digit}" for digit in range(NUM_DIGITS)]
    bpe.train_from_iterator(spoken + (digits + figures) * DIGIT_WEIGHT, trainer)
    model = json.loads(bpe.to_str())["model"]
    languages = [f"<|{language}|>" for language in WORDS]
    tasks = [f"<|{task}|>" for task in TASKS]
    rest = ["<|startoflm|>", START_OF_PREVIOUS, NO_SPEECH, NO_TIMESTAMPS]
    special = [END, START, *languages, *tasks, *rest]
    tokenizer = WhisperTokenizer(
        {**model["vocab"], **{token: len(model["vocab"]) + i for i, token in enumerate(special)}},
        [tuple(merge) for merge in model["merges"]],
        pad_token=END,
        extra_special_tokens=special[1:],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    steps = round(window_seconds / TIME_PRECISION) + 1
    tokenizer.add_tokens([f"<|{i * TIME_PRECISION:.2f}|>" for i in range(steps)])
    return tokenizer
