"""Flags of a cascade: a second model answers the rows of which the first one is least sure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..console.errors import Refused

if TYPE_CHECKING:
    from tidemill.batch.escalation import EscalateBy


class _Group(Protocol):
    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action: ...


@dataclass(frozen=True, slots=True)
class CascadeOptions:
    """The second model of a cascade, and the rows that it answers.

    They have an answer whose confidence is lower than `below`, or than the lowest threshold with
    which the first model's answers reach `target_accuracy` on rows with gold answers. `by` is how
    it decides.
    """

    model: str
    below: float | None = None
    target_accuracy: float | None = None
    by: EscalateBy = "decision"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the flags with their values, without those that are not given."""
        given = {
            "--escalate": self.model,
            "--escalate-below": self.below,
            "--target-accuracy": self.target_accuracy,
            "--escalate-by": None if self.by == "decision" else self.by,
        }
        return {flag: value for flag, value in given.items() if value is not None}


def share(text: str) -> float:
    """Return the number, which must be above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0 and at most 1")
    return value


def add_cascade_flags(group: _Group) -> None:
    """Add the flags of a cascade."""
    add = group.add_argument
    add(
        "--escalate",
        metavar="MODEL",
        help="decide the rows of which --model is least sure again with this model, which is "
        "loaded afterwards",
    )
    add(
        "--escalate-below",
        type=share,
        metavar="P",
        help="escalate rows with an answer whose confidence is lower than P",
    )
    add(
        "--escalate-by",
        choices=("decision", "chat"),
        help="let that model decide as --model does (decision, the default), or by an answer that "
        "it generates after any reasoning (chat); then it may be the same model",
    )
    add(
        "--target-accuracy",
        type=share,
        metavar="P",
        help="escalate below the threshold at which the answers of --model reach this accuracy on "
        "the rows with --gold answers",
    )


def cascade_of(arguments: argparse.Namespace) -> CascadeOptions | None:
    """Return the cascade of the flags, None without one; raises Refused if they do not match."""
    model: str | None = arguments.escalate
    below, target = arguments.escalate_below, arguments.target_accuracy
    by: EscalateBy | None = arguments.escalate_by
    if model is None:
        given = {"--escalate-below": below, "--target-accuracy": target, "--escalate-by": by}
        flag = next((flag for flag, value in given.items() if value is not None), None)
        if flag is not None:
            raise Refused(f"{flag} requires --escalate MODEL, the model that decides those rows")
        return None
    if below is not None and target is not None:
        raise Refused("--escalate-below cannot be combined with --target-accuracy: omit one")
    if below is None and target is None:
        raise Refused(
            "--escalate requires a threshold: pass --escalate-below 0.8, or --target-accuracy 0.95 "
            "with --gold"
        )
    return CascadeOptions(model, below, target, by or "decision")
