"""The demo model's questions: the same every time, split for good, and rightly answered."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import islice

import pytest

from tidemill.demo import questions
from tidemill.demo.questions import Example, Split

SAMPLE = 400

OPERATIONS: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    (r"\+|plus|add", lambda a, b: a + b),
    (r"subtract", lambda a, b: b - a),
    (r"-|minus", lambda a, b: a - b),
    (r"\*| x |times|multiply", lambda a, b: a * b),
)
KNOWN_ANSWERS = {
    "capital": {
        "france": "Paris",
        "japan": "Tokyo",
        "australia": "Canberra",
        "peru": "Lima",
        "new zealand": "Wellington",
        "south korea": "Seoul",
        "switzerland": "Bern",
    },
    "yes_no": {
        "ice is cold": "Yes",
        "is ice hot": "No",
        "pigs can fly": "No",
        "can birds fly": "Yes",
        "the moon is a star": "No",
        "bees make honey": "Yes",
        "cows lay eggs": "No",
    },
    "greeting": {
        "good morning": "Good morning!",
        "thank": "You are welcome!",
        "hello": "Hello!",
        "see you later": "Goodbye!",
        "good night": "Good night!",
    },
}


def _sample(kind: str, split: Split = "train") -> list[Example]:
    return list(islice(questions.stream(kind, split, random.Random(kind)), SAMPLE))


def _asked_text(question: str) -> str:
    """Return what stands in quotes or after a colon: the text that the question is about."""
    found = re.search(r'"(.*)"', question) or re.search(r": (.*)$", question)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("kind", questions.KINDS)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_same_arguments_give_the_same_questions(kind: str, split: Split) -> None:
    """Two calls agree, and another seed gives others."""
    first = questions.questions(kind, split, 50, seed=3)
    assert first == questions.questions(kind, split, 50, seed=3)
    assert first != questions.questions(kind, split, 50, seed=4)
    assert len({example.question for example in first}) == 50


@pytest.mark.parametrize("kind", questions.KINDS)
def test_no_held_out_question_is_ever_trained_on(kind: str) -> None:
    """The two sides share neither a question nor what the split goes by."""
    train, held_out = _sample(kind), _sample(kind, "held_out")
    assert not {e.question.lower() for e in train if kind not in questions.CLOSED_KINDS} & {
        e.question.lower() for e in held_out
    }
    assert not {e.question for e in train} & {e.question for e in held_out}
    assert not {e.key for e in train} & {e.key for e in held_out}
    assert None not in {e.key for e in held_out}


@pytest.mark.parametrize("kind", questions.KINDS)
def test_a_phrasing_alone_does_not_give_the_side_away(kind: str) -> None:
    """About one draw in eight is held out, so both sides see every phrasing."""
    rng = random.Random(0)
    draws = [questions.draw(kind, rng).split for _ in range(2000)]
    assert 0.04 < draws.count("held_out") / len(draws) < 0.2


def test_arithmetic_is_right() -> None:
    """The answer is what the words of the question say to do with its two numbers."""
    for example in _sample("arithmetic"):
        a, b = (int(number) for number in re.findall(r"\d+", example.question))
        text = example.question.lower()
        operate = next(operate for words, operate in OPERATIONS if re.search(words, text))
        assert example.answer == str(operate(a, b)), example


def test_a_held_out_product_is_known_in_the_other_order() -> None:
    """Times tables are facts: the mirror of each held-out product is trained on."""
    for example in _sample("arithmetic", "held_out"):
        if re.search(OPERATIONS[-1][0], example.question.lower()):
            a, b = (int(number) for number in re.findall(r"\d+", example.question))
            assert a < b, example


def test_reversed_words_are_right() -> None:
    """Read backwards, the answer is one of the question's words."""
    for example in _sample("reverse"):
        back = "".join(reversed(example.answer))
        assert back in re.findall(r"\w+", example.question), example


def test_words_in_capitals_are_right() -> None:
    """The answer is all capitals and is one of the question's words."""
    for example in _sample("uppercase"):
        assert example.answer.isupper()
        words = [word.casefold() for word in re.findall(r"\w+", example.question)]
        assert example.answer.casefold() in words, example


def test_word_counts_are_right() -> None:
    """The answer is one more than the blanks in the text asked about."""
    for example in _sample("count"):
        assert example.answer == str(_asked_text(example.question).count(" ") + 1), example


def test_extracted_fields_are_right() -> None:
    """The answer is a JSON object of the field asked for, with its value in the record."""
    shapes = {
        "age": r"(\d+)",
        "name": r"(?:name is |called |name: )(\w+)|(?:[:.] |^)(\w+)(?:,| is \d| is a )",
        "city": r"(?:lives in |from |In |works in |city: )(\w+)",
        "job": r"(?: as a | is a )(\w+)(?: from|\.| ?$)|there is a (\w+)",
    }
    for example in _sample("extract"):
        ((field, value),) = json.loads(example.answer).items()
        instruction = re.search(rf"\b{field}\b(?: as|\?)", example.question)
        assert instruction is not None, example
        found = re.search(shapes[field], example.question)
        assert found is not None, example
        assert str(value) == next(filter(None, found.groups())), example
        assert isinstance(value, int) == (field == "age")


@pytest.mark.parametrize("kind", questions.CLOSED_KINDS)
def test_known_facts_are_right(kind: str) -> None:
    """Facts looked up elsewhere have the expected answer in every phrasing."""
    every = questions.questions(kind, "train", 1000) + questions.questions(kind, "held_out", 100)
    for asked, expected in KNOWN_ANSWERS[kind].items():
        answers = {e.answer for e in every if asked in e.question.lower()}
        assert answers, asked
        assert all(answer.startswith(expected) for answer in answers), (asked, answers)
