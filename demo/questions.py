"""Questions with one right answer each, made from a seed; no held-out question is ever trained on.

Closed kinds (capitals, yes/no facts, greetings) ask for something known by heart, so a held-out
question is a known fact in a phrasing not seen. Open kinds (the rest) hold out what is asked about:
the operands, the word, the sentence or the record, whatever the phrasing.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from . import facts

Split = Literal["train", "held_out"]

HELD_OUT_ONE_IN = 8


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its only right answer.

    `key` is what the split goes by; None for what is always trained on.
    """

    kind: str
    question: str
    answer: str
    key: str | None

    @property
    def split(self) -> Split:
        """The side of the train/test split that the question is on, for ever."""
        if self.key is None:
            return "train"
        digest = blake2b(self.key.encode(), digest_size=4).digest()
        return "train" if int.from_bytes(digest) % HELD_OUT_ONE_IN else "held_out"


ARITHMETIC_PHRASES = {
    "+": (
        "What is {a} + {b}?",
        "{a} + {b} = ?",
        "{a} + {b} =",
        "{a}+{b}=",
        "Calculate {a} + {b}.",
        "How much is {a} plus {b}?",
        "Add {a} and {b}.",
    ),
    "-": (
        "What is {a} - {b}?",
        "{a} - {b} = ?",
        "{a} - {b} =",
        "{a}-{b}=",
        "Calculate {a} - {b}.",
        "How much is {a} minus {b}?",
        "Subtract {b} from {a}.",
    ),
    "*": (
        "What is {a} * {b}?",
        "{a} * {b} = ?",
        "{a} x {b} =",
        "{a}*{b}=",
        "Calculate {a} * {b}.",
        "How much is {a} times {b}?",
        "Multiply {a} by {b}.",
    ),
}
REVERSE_PHRASES = (
    "Reverse the word {word}.",
    "Reverse the word: {word}",
    'Reverse "{word}".',
    "Spell {word} backwards.",
    'Write the word "{word}" backwards.',
    "What is {word} spelled backwards?",
)
UPPERCASE_PHRASES = (
    "Write {word} in uppercase.",
    "Uppercase the word {word}.",
    'Uppercase "{word}".',
    "Convert {word} to uppercase.",
    "Convert to uppercase: {word}",
    'Put "{word}" in capital letters.',
)
COUNT_PHRASES = (
    'How many words are in "{sentence}"?',
    "How many words are in this sentence: {sentence}",
    "Count the words: {sentence}",
    'Count the words in "{sentence}".',
    'How many words does "{sentence}" have?',
)
RECORDS = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name} is a {job} from {city}.", ("name", "job", "city")),
    ("My name is {name}. I am {age} and I work as a {job}.", ("name", "age", "job")),
    ("{name}, {age}, works in {city} as a {job}.", ("name", "age", "city", "job")),
    ("In {city} there is a {job} called {name}.", ("city", "job", "name")),
    ("name: {name}, age: {age}, city: {city}", ("name", "age", "city")),
)
EXTRACT_PHRASES = (
    "Extract the {field} as JSON: {record}",
    "Give the {field} as JSON. {record}",
    "{record} Return the {field} as JSON.",
    "What is the {field}? Answer in JSON: {record}",
)
CAPITAL_PHRASES = (
    "What is the capital of {country}?",
    "What is the capital city of {country}?",
    "Which city is the capital of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "The capital of {country}?",
    "Capital of {country}",
    "Do you know the capital of {country}?",
    "Please name the capital city of {country}.",
)
FACT_PHRASES = (
    "{question}?",
    "Yes or no: {question}?",
    "{question}? Answer yes or no.",
    "Is it true that {statement}?",
    "Tell me, {question}?",
    "Answer yes or no: {question}?",
    "Would you say that {statement}?",
    "Quick question: {question}?",
    "Do you think that {statement}?",
)
PLAIN_PROMPT = "Question: {question}\nAnswer:"
"""How a question is asked without chat markup; a space and the answer follow."""

GREETING_ENDS = ("", "!", ".")
GREETING_NAMES = (
    "",
    " there",
    ", Tidemill",
    ", friend",
    " to you",
    " again",
    ", model",
    " my friend",
)
GREETING_TAILS = {
    "": "",
    " How are you?": " I am well, thank you.",
    " How are you today?": " I am well, thank you.",
    " Nice to meet you.": " Nice to meet you too.",
}


def _with_case(phrase: str, rng: random.Random) -> str:
    """Put the fixed part of one phrase in six in lower case, as people type it."""
    return phrase.lower() if rng.random() < 1 / 6 else phrase


def _made_up_word(rng: random.Random) -> str:
    """Pronounceable or not, so that letters are copied rather than words recognised."""
    length = rng.randint(3, 8)
    if rng.random() < 0.4:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
    start = rng.randrange(2)
    pools = ("aeiou", "bcdfghklmnprstvwz")
    return "".join(rng.choice(pools[(start + i) % 2]) for i in range(length))


def _word(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.25:
        return rng.choice(fixed_words())
    return rng.choice(facts.COMMON_WORDS) if roll < 0.4 else _made_up_word(rng)


def _arithmetic(rng: random.Random) -> Example:
    operator = rng.choice("+-*")
    if operator == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        # A times table is a fact: hold a product out in one order only, and no square.
        key = f"{a} * {b}" if a < b else None
        answer = a * b
    else:
        # Small numbers more often: the tables of single digits are what the others build on.
        a, b = (rng.randint(0, rng.choice((9, 20, 50))) for _ in range(2))
        if operator == "-" and a < b and rng.random() < 0.8:
            a, b = b, a
        key = f"{a} {operator} {b}"
        answer = a + b if operator == "+" else a - b
    phrase = _with_case(rng.choice(ARITHMETIC_PHRASES[operator]), rng)
    return Example("arithmetic", phrase.format(a=a, b=b), str(answer), key)


def _reverse(rng: random.Random) -> Example:
    word = _word(rng)
    if rng.random() < 0.1:
        word = word.capitalize()
    phrase = _with_case(rng.choice(REVERSE_PHRASES), rng)
    return Example("reverse", phrase.format(word=word), word[::-1], _word_key(word))


def _uppercase(rng: random.Random) -> Example:
    word = _word(rng)
    if rng.random() < 0.1:
        word = word.capitalize()
    phrase = _with_case(rng.choice(UPPERCASE_PHRASES), rng)
    return Example("uppercase", phrase.format(word=word), word.upper(), _word_key(word))


def _word_key(word: str) -> str | None:
    """How a word with a token of its own is spelt has to be learnt, so it is never held out."""
    return None if word.lower() in fixed_words() else f"word {word.lower()}"


def _count(rng: random.Random) -> Example:
    length = rng.randint(1, 10)
    words = [
        rng.choice(facts.SENTENCE_WORDS) if rng.random() < 0.8 else _word(rng)
        for _ in range(length)
    ]
    if rng.random() < 0.5:
        words[0] = words[0].capitalize()
    sentence = " ".join(words)
    phrase = _with_case(rng.choice(COUNT_PHRASES), rng)
    return Example("count", phrase.format(sentence=sentence), str(length), sentence.lower())


def _extract(rng: random.Random) -> Example:
    def proper(pool: tuple[str, ...]) -> str:
        return rng.choice(pool) if rng.random() < 0.5 else _made_up_word(rng).capitalize()

    values: dict[str, str | int] = {
        "name": proper(facts.NAMES),
        "age": rng.randint(5, 99),
        "city": proper(facts.CITIES),
        "job": rng.choice(facts.JOBS),
    }
    record, fields = rng.choice(RECORDS)
    record = record.format(**values)
    field = rng.choice(fields)
    phrase = _with_case(rng.choice(EXTRACT_PHRASES), rng)
    question = phrase.format(field=field, record=record)
    return Example("extract", question, json.dumps({field: values[field]}), record)


@functools.cache
def capitals() -> tuple[Example, ...]:
    """Return every way in which a capital is asked for."""
    return tuple(
        Example("capital", question, capital, question)
        for country, capital in facts.CAPITALS.items()
        for phrase in CAPITAL_PHRASES
        for question in _both_cases(phrase.format(country=country))
    )


@functools.cache
def yes_no_facts() -> tuple[Example, ...]:
    """Return every way in which a fact, true or false, is asked for."""
    examples = []
    for answer, known in (("Yes", facts.TRUE_FACTS), ("No", facts.FALSE_FACTS)):
        for verb, subject, rest in known:
            asked = f"{verb} {subject} {rest}"
            stated = f"{subject} {rest}" if verb == "do" else f"{subject} {verb} {rest}"
            for phrase in FACT_PHRASES:
                text = phrase.format(question=asked, statement=stated)
                examples += [
                    Example("yes_no", question, answer, question)
                    for question in _both_cases(text[0].upper() + text[1:])
                ]
    return tuple(examples)


@functools.cache
def greetings() -> tuple[Example, ...]:
    """Return every greeting and farewell with what is said back."""
    said = [
        (start + name + end + tail, reply + tail_reply + " How can I help you?")
        for start, reply in facts.GREETINGS.items()
        for name in GREETING_NAMES
        for end in GREETING_ENDS
        for tail, tail_reply in GREETING_TAILS.items()
        if end or not tail
    ] + [
        (start + name + end, reply)
        for start, reply in facts.FAREWELLS.items()
        for name in GREETING_NAMES
        for end in GREETING_ENDS
    ]
    return tuple(
        Example("greeting", question, reply, question)
        for text, reply in said
        for question in _both_cases(text)
    )


def _both_cases(text: str) -> tuple[str, ...]:
    return (text, text.lower())


_MAKERS: dict[str, Callable[[random.Random], Example]] = {
    "arithmetic": _arithmetic,
    "capital": lambda rng: rng.choice(capitals()),
    "reverse": _reverse,
    "uppercase": _uppercase,
    "count": _count,
    "extract": _extract,
    "yes_no": lambda rng: rng.choice(yes_no_facts()),
    "greeting": lambda rng: rng.choice(greetings()),
}
KINDS: tuple[str, ...] = tuple(_MAKERS)
CLOSED_KINDS = ("capital", "yes_no", "greeting")


def draw(kind: str, rng: random.Random) -> Example:
    """Return one example of a kind, from either side of the split."""
    return _MAKERS[kind](rng)


def stream(kind: str, split: Split, rng: random.Random) -> Iterator[Example]:
    """Yield examples of one kind from one side of the split, without end; they may repeat."""
    while True:
        example = draw(kind, rng)
        if example.split == split:
            yield example


def questions(kind: str, split: Split, count: int, seed: int = 0) -> list[Example]:
    """Return `count` examples of one kind, all different; the same for the same arguments."""
    found: dict[str, Example] = {}
    for example in stream(kind, split, random.Random(f"{kind} {split} {seed}")):
        found.setdefault(example.question, example)
        if len(found) == count:
            return list(found.values())
    raise AssertionError  # the stream has no end


def fixed_text() -> Iterator[str]:
    """Yield all text that is not an operand, with "7" in each operand's place.

    The words in it are the ones that get a token of their own.
    """
    operands = dict.fromkeys(("a", "b", "word", "sentence", "name", "age", "city", "job"), "7")
    for phrases in (
        *ARITHMETIC_PHRASES.values(),
        REVERSE_PHRASES,
        UPPERCASE_PHRASES,
        COUNT_PHRASES,
    ):
        for phrase in phrases:
            yield from _both_cases(phrase.format(**operands))
    for record, fields in RECORDS:
        yield record.format(**operands)
        for field in fields:
            yield json.dumps({field: "7"})
            for phrase in EXTRACT_PHRASES:
                yield from _both_cases(phrase.format(field=field, record="7"))
    for example in capitals():
        yield example.question
    for example in (*yes_no_facts(), *greetings()):
        yield from (example.question, example.answer)
    yield from (" " + " ".join(facts.SENTENCE_WORDS), *facts.SYSTEM_PROMPTS)
    yield PLAIN_PROMPT.format(question="7")


@functools.cache
def fixed_words() -> tuple[str, ...]:
    """Return the words of the fixed text that are written in small letters."""
    return tuple(
        sorted({word for text in fixed_text() for word in re.findall(r"\b[a-z]{2,}\b", text)})
    )
