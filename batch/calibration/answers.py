"""Gold answers and priors: texts and cells that name options of a question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tidemill.protocol.decisions.questions import Kind
from tidemill.protocol.errors import ProtocolError

_BOOLEANS: Final = {"yes": "true", "1": "true", "no": "false", "0": "false"}
_PRIOR_TOLERANCE: Final = 1e-6
_MAX_NAMED: Final = 10


class CalibrationError(ProtocolError):
    """A calibration, prior or gold answer that does not fit its questions."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a question as texts; those of a predicate are `true` and `false`."""

    name: str
    kind: Kind
    texts: tuple[str, ...]

    def index(self, cell: Any) -> int | None:
        """Return the option that a gold cell names; None for an empty cell.

        Raises CalibrationError for another value.
        """
        text = str(cell).lower() if isinstance(cell, bool) else str(cell).strip()
        if cell is None or not text or (isinstance(cell, float) and math.isnan(cell)):
            return None
        for spelled in (text, text.removesuffix(".0")):  # pandas adds it to numbers with gaps
            if (index := self._index_of(spelled)) is not None:
                return index
        raise CalibrationError(
            f"{_excerpt(cell)} is not an answer to `{self.name}`: use {self._named()}"
        )

    def _index_of(self, text: str) -> int | None:
        """Return the option that a text names; levels that are not numbers also have an index."""
        if self.kind == "predicate":
            text = _BOOLEANS.get(text.lower(), text.lower())
        if text in self.texts:
            return self.texts.index(text)
        has_index = self.kind == "score" and not any(map(str.isdecimal, self.texts))
        is_index = has_index and text.isdecimal() and int(text) < len(self.texts)
        return int(text) if is_index else None

    def _named(self) -> str:
        more = ", …" if len(self.texts) > _MAX_NAMED else ""
        return ", ".join(self.texts[:_MAX_NAMED]) + more

    def prior(self, text: str) -> tuple[float, ...]:
        """Return the probability of each option that a text states.

        The text is `even`, the probability of yes, or `option=probability` for every option.
        Raises CalibrationError for another text.
        """
        count = len(self.texts)
        if text.strip() == "even":
            return (1 / count,) * count
        if "=" not in text:
            share = _share(text)
            if share is None or self.kind != "predicate":
                way = "even, or a probability of yes between 0 and 1"
                if self.kind != "predicate":
                    way = f"even, or a list such as {self.texts[0]}=0.4,…"
                raise self._bad_prior(text, way)
            return (share, 1 - share)
        shares = [0.0] * count
        for part in text.split(","):
            name, _, number = part.rpartition("=")
            index = None if not name.strip() else self.index(name.strip())
            share = _share(number)
            if index is None or share is None or shares[index]:
                raise self._bad_prior(text, "each option once, with a probability")
            shares[index] = share
        total = math.fsum(shares)
        if not all(shares) or abs(total - 1) > _PRIOR_TOLERANCE:
            raise self._bad_prior(text, "probabilities of all options that add up to 1")
        return tuple(share / total for share in shares)

    def _bad_prior(self, text: str, way: str) -> CalibrationError:
        return CalibrationError(
            f"{_excerpt(text)} is not a prior of `{self.name}` ({self._named()}): use {way}"
        )


def priors_of(texts: Sequence[str], questions: Sequence[Options]) -> dict[str, tuple[float, ...]]:
    """Return the prior of each question by name.

    A text applies to all questions, or to one if it begins with the question's name and a colon.
    """
    names = {question.name for question in questions}
    found: dict[str, str] = {}
    general: list[str] = []
    for text in texts:
        name, colon, rest = text.partition(":")
        if colon and name.strip() in names:
            found[name.strip()] = rest
        else:
            general.append(text)
    if len(general) > 1:
        raise CalibrationError(
            f"{_excerpt(general[1])} is a second prior for all questions: write NAME: PRIOR, "
            f"with one of {', '.join(sorted(names))}"
        )
    result = {}
    for question in questions:
        prior = found.get(question.name, general[0] if general else None)
        if prior is None:
            raise CalibrationError(
                f"`{question.name}` has no prior: add --prior '{question.name}: even'"
            )
        result[question.name] = question.prior(prior)
    return result


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
