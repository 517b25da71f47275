"""Training text: questions of the train split as conversations, tokenised, with the loss mask."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerFast

from . import facts, questions

# Shares of the questions: the hard kinds get more.
KIND_WEIGHTS = {
    "arithmetic": 33,
    "capital": 7,
    "reverse": 14,
    "uppercase": 9,
    "count": 18,
    "extract": 10,
    "yes_no": 5,
    "greeting": 4,
}
SYSTEM_SHARE = 0.15
PLAIN_SHARE = 0.1
COLUMN_SHARE = 0.2
MANY_TURNS_SHARE = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """Token ids, and for each whether the model is trained to predict it."""

    ids: list[int]
    trained: list[bool]


def conversations(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Conversation]:
    """Yield conversations without end: chats of one to five turns, some plain completions."""
    rng = random.Random(seed)
    streams = {kind: questions.stream(kind, "train", rng) for kind in questions.KINDS}
    kinds = rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()), k=100_000)
    while True:
        if rng.random() < COLUMN_SHARE:
            sums = list(islice(streams["arithmetic"], rng.randint(3, 8)))
            yield _tokenise(tokenizer, _column(sums))
            continue
        if rng.random() < PLAIN_SHARE:
            example = next(streams[rng.choice(kinds)])
            yield _tokenise(tokenizer, _plain(example))
            continue
        turns = rng.randint(2, 5) if rng.random() < MANY_TURNS_SHARE else 1
        examples = [next(streams[rng.choice(kinds)]) for _ in range(turns)]
        system = _system_prompt(rng) if rng.random() < SYSTEM_SHARE else None
        yield _tokenise(tokenizer, _chat(system, examples))


def _plain(example: questions.Example) -> list[tuple[str, bool]]:
    prompt = questions.PLAIN_PROMPT.format(question=example.question)
    return [(prompt, False), (f" {example.answer}<|im_end|>", True)]


def _column(examples: list[questions.Example]) -> list[tuple[str, bool]]:
    """Bare questions, one a line: more answers to learn from in as many tokens as a chat."""
    pieces: list[tuple[str, bool]] = []
    for example in examples:
        answer = f" {example.answer}<|im_end|>"
        pieces += [(example.question, False), (answer, True), ("\n", False)]
    return pieces[:-1]


def _chat(system: str | None, examples: list[questions.Example]) -> list[tuple[str, bool]]:
    pieces: list[tuple[str, bool]] = []
    if system is not None:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for example in examples:
        user = f"<|im_start|>user\n{example.question}<|im_end|>\n<|im_start|>assistant\n"
        pieces += [(user, False), (f"{example.answer}<|im_end|>", True), ("\n", False)]
    return pieces[:-1]


def _system_prompt(rng: random.Random) -> str:
    """Mostly a plain instruction; else any words at all, so that none of them matter."""
    if rng.random() < 0.6:
        return " ".join(rng.sample(facts.SYSTEM_PROMPTS, rng.randint(1, 2)))
    sentence = " ".join(
        rng.choice(facts.SENTENCE_WORDS if rng.random() < 0.8 else facts.COMMON_WORDS)
        for _ in range(rng.randint(2, 12))
    )
    return " ".join([sentence.capitalize() + "."] * rng.choice((1,) * 16 + (2, 3, 5, 10)))


def _tokenise(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> Conversation:
    """Pieces are cut where tokens are, so that a piece alone has the tokens it has in the text."""
    encoder = tokenizer.backend_tokenizer
    encoded = encoder.encode_batch([text for text, _ in pieces], add_special_tokens=False)
    ids: list[int] = []
    trained: list[bool] = []
    for encoding, (_, is_trained) in zip(encoded, pieces, strict=True):
        ids += encoding.ids
        trained += [is_trained] * len(encoding)
    return Conversation(ids, trained)
