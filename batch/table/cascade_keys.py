"""Keys of a recipe about a second model, which decides rows of which the first is least sure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from ..escalation import EscalateBy
from ..file.decided_row import ESCALATION_ERROR
from ..model import is_share
from .errors import RecipeError
from .questions import TableQuestion
from .recipe_keys import CALIBRATION, CASCADE

THRESHOLDS: Final = CASCADE[1:3]
"""Keys of the threshold, one of which is required."""


MODEL_COLUMNS: Final = ("model", ESCALATION_ERROR)
"""Columns of a cascade's table: the model of each row, and why it is not the second one."""


def name_clash(questions: Sequence[TableQuestion]) -> str | None:
    """Return the error for a question with the name of such a column; None without one."""
    name = next((each.name for each in questions if each.name in MODEL_COLUMNS), None)
    if name is None:
        return None
    return f"the question `{name}` has the name of a column of every cascade: rename it"


def cascade_of(
    keys: Mapping[str, Any], questions: Sequence[TableQuestion], *, may_escalate: bool
) -> dict[str, Any]:
    """Return the fields of a recipe about its second model; raises RecipeError."""
    if not may_escalate:
        key = next(key for key in CASCADE if key in keys)
        raise RecipeError(
            f"`{key}` is not supported here, where one model runs: use `tidemill run`, or a "
            "deployment"
        )
    model = keys.get("escalate")
    thresholds = [name for name in THRESHOLDS if name in keys]
    if model is None:
        key = next(key for key in CASCADE if key in keys)
        raise RecipeError(f"`{key}` needs `escalate`, the model that decides those rows")
    if not (isinstance(model, str) and model):
        raise RecipeError("`escalate` must be a string, the name of a model")
    if len(thresholds) != 1 or not is_share(keys[thresholds[0]]):
        raise RecipeError(
            "`escalate` needs either `escalate_below` or `target_accuracy`, a number above 0 and "
            "at most 1, such as 0.8"
        )
    _check_answers(questions, keys, has_target="target_accuracy" in keys)
    by = keys.get("escalate_by", "decision")
    if by not in get_args(EscalateBy):
        raise RecipeError(f"`escalate_by` is {by!r}: it must be 'decision' or 'chat'")
    threshold = {thresholds[0]: float(keys[thresholds[0]])}
    return {"escalate": model, "escalate_by": by, "has_models": True, **threshold}


def check_cascade(
    questions: Sequence[TableQuestion], keys: Mapping[str, Any], target: float | None
) -> None:
    """Raise RecipeError for a recipe that is unsuitable for two models of a deployment."""
    _check_answers(questions, keys, has_target=target is not None)
    if target is not None and "gold" not in keys:
        raise RecipeError("`target_accuracy` needs `gold`, the column of the known answers: add it")


def _check_answers(
    questions: Sequence[TableQuestion], keys: Mapping[str, Any], *, has_target: bool
) -> None:
    """Raise RecipeError for questions or a calibration that are unsuitable for two models."""
    if not questions:
        raise RecipeError("`escalate` needs questions to decide: add `ask`")
    if (clash := name_clash(questions)) is not None:
        raise RecipeError(clash)
    odd = [name for name in CALIBRATION if name in keys and not (has_target and name == "gold")]
    if odd:
        only = " without `target_accuracy`" if odd[0] == "gold" else ""
        raise RecipeError(
            f"`escalate` cannot be combined with `{odd[0]}` in a deployment{only}: omit one"
        )
