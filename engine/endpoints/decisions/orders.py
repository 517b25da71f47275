"""Orders of a question's options, and the mean of its answers in several of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random

from tidemill.protocol.decisions.questions import Answer, Decision

# As many orders as a few options have.
_NUM_ORDERS = (1, 1, 2, 6, 24, 120)


def orders(count: int, wanted: int, random: Random) -> Iterator[tuple[int, ...]]:
    """Yield distinct orders of `count` options: the given one alone, or `wanted` random ones.

    They are rotations of a random order, so that each option has as many different places as
    possible; once these are used up, rotations of another one. Fewer orders exist of few options.
    """
    if wanted == 1:
        yield tuple(range(count))
        return
    seen: set[tuple[int, ...]] = set()
    most = min(wanted, _NUM_ORDERS[count]) if count < len(_NUM_ORDERS) else wanted
    while len(seen) < most:
        base = list(range(count))
        random.shuffle(base)
        step = max(1, count // most)
        for start in range(0, count, step):
            order = (*base[start:], *base[:start])
            if order not in seen and len(seen) < most:
                seen.add(order)
                yield order


def decision_seed(decision: Decision) -> int:
    """Return the seed of the orders of the options: the request's, or a digest of its input."""
    if decision.seed is not None:
        return decision.seed
    state = repr(decision.state_parts).encode(errors="backslashreplace")
    return int.from_bytes(blake2b(state, digest_size=8).digest(), "little")


def mean_answer(answers: Sequence[Answer]) -> Answer:
    """Return the mean of a question's answers in several orders of its options."""
    if len(answers) == 1:
        return answers[0]
    count = len(answers)
    columns = zip(*(answer.probabilities for answer in answers), strict=True)
    mean = Answer(
        tuple(math.fsum(column) / count for column in columns),
        math.fsum(answer.label_mass or 0.0 for answer in answers) / count,
        sum(bool(answer.argmax_is_label) for answer in answers) * 2 > count,
    )
    agreeing = sum(answer.winner == mean.winner for answer in answers)
    return replace(mean, agreement=agreeing / count)


def mean_answers(numbered: Iterable[tuple[int, Answer]]) -> list[Answer]:
    """Return the mean answer of each question, from answers with the questions' numbers."""
    of_question: dict[int, list[Answer]] = defaultdict(list)
    for number, answer in numbered:
        of_question[number].append(answer)
    return [mean_answer(of_question[number]) for number in sorted(of_question)]
