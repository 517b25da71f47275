"""Training data of the demo reranker: questions with relevant and irrelevant documents."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .facts import CAPITALS, CITIES, JOBS, NAMES

Split = Literal["train", "held_out"]

COLOURS = "red blue green yellow black white brown grey orange purple".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
THINGS = (
    "bicycle boat car bridge lamp table chair door window roof carpet coat hat scarf kettle "
    "guitar piano camera clock suitcase umbrella ladder mill fence tent sofa stove mirror"
).split()
SHOPS = (
    "bakery library museum post office pharmacy swimming pool town hall cinema bank market"
).split()
HELD_OUT_SHARE = 5
"""One in this many subjects is never trained on."""


@dataclass(frozen=True, slots=True)
class _Relation:
    """A relation of subjects: templates for questions and documents, and possible answers."""

    subjects: Sequence[str]
    answers: Sequence[str]
    questions: Sequence[str]
    documents: Sequence[str]

    def answer(self, subject: str) -> str:
        """Return the only answer for a subject; for countries, the true one."""
        if self.answers:
            return self.answers[zlib.crc32(subject.encode()) % len(self.answers)]
        return CAPITALS[subject]


RELATIONS = (
    _Relation(
        tuple(CAPITALS),
        (),
        (
            "What is the capital of {s}?",
            "Which city is the capital of {s}?",
            "capital of {s}",
            "Name the capital city of {s}.",
        ),
        (
            "The capital of {s} is {a}.",
            "{a} is the capital of {s}.",
            "{s} has a government that sits in its capital, {a}.",
        ),
    ),
    _Relation(
        tuple(CAPITALS),
        ("wheat", "coffee", "steel", "fish", "cars", "wool", "copper", "fruit"),
        ("What does {s} export?", "Which goods are sold abroad by {s}?", "exports of {s}"),
        ("{s} sells {a} to the rest of the world.", "The most important export of {s} is {a}."),
    ),
    _Relation(
        NAMES,
        JOBS,
        ("What is the job of {s}?", "What does {s} do for a living?", "{s} profession"),
        ("{s} works as a {a}.", "For twenty years {s} has been a {a}."),
    ),
    _Relation(
        NAMES,
        CITIES,
        ("Where does {s} live?", "In which city is {s} at home?", "home town of {s}"),
        ("{s} has a flat in {a}.", "{s} lives in {a} with two cats."),
    ),
    _Relation(
        THINGS,
        COLOURS,
        ("What colour is the {s}?", "Which colour does the {s} have?", "colour of the {s}"),
        ("The {s} was painted {a}.", "They bought a {a} {s}."),
    ),
    _Relation(
        SHOPS,
        DAYS,
        ("When is the {s} closed?", "On which day is the {s} shut?", "closing day {s}"),
        ("The {s} does not open on {a}s.", "Nobody works at the {s} on {a}."),
    ),
)


def is_held_out(subject: str) -> bool:
    """Return whether nothing of `subject` is ever trained on."""
    return zlib.crc32(f"held out {subject}".encode()) % HELD_OUT_SHARE == 0


def _subject(rng: random.Random, subjects: Sequence[str], split: Split, other: str = "") -> str:
    while True:
        subject = rng.choice(subjects)
        if is_held_out(subject) == (split == "held_out") and subject != other:
            return subject


def _document(rng: random.Random, relation: _Relation, subject: str) -> str:
    return rng.choice(relation.documents).format(s=subject, a=relation.answer(subject))


def _question(rng: random.Random, split: Split) -> tuple[str, list[str]]:
    """Return a question, and one relevant and three irrelevant documents."""
    relation = rng.choice(RELATIONS)
    subject = _subject(rng, relation.subjects, split)
    right = _document(rng, relation, subject)
    others = [one for one in RELATIONS if one is not relation]
    same_subject = [one for one in others if one.subjects == relation.subjects]
    elsewhere = rng.choice(same_subject or others)
    about = subject if same_subject else _subject(rng, elsewhere.subjects, split)
    anything = rng.choice(others)
    wrong = [
        _document(rng, relation, _subject(rng, relation.subjects, split, other=subject)),
        _document(rng, elsewhere, about),
        _document(rng, anything, _subject(rng, anything.subjects, split, other=subject)),
    ]
    return rng.choice(relation.questions).format(s=subject), [right, *wrong]


def questions(split: Split, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Yield endless questions, each with four documents, the first of which is relevant."""
    rng = random.Random(seed)
    while True:
        yield _question(rng, split)
