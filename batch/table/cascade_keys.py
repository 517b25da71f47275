"""Keys of a recipe about a second model, which decides rows of which the first is least sure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..model import is_share
from .errors import RecipeError
from .questions import TableQuestion
from .recipe_keys import CALIBRATION, CASCADE


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
    if "target_accuracy" in keys:
        raise RecipeError(
            "`target_accuracy` is not supported in recipes: use `escalate_below`, or pass "
            "--target-accuracy to `tidemill run`"
        )
    model, below = keys.get("escalate"), keys.get("escalate_below")
    if model is None:
        raise RecipeError("`escalate_below` needs `escalate`, the model that decides those rows")
    if not (isinstance(model, str) and model):
        raise RecipeError("`escalate` must be a string, the name of a model")
    if not is_share(below):
        raise RecipeError(
            "`escalate` needs `escalate_below`, a number above 0 and at most 1, such as 0.8"
        )
    odd = next((name for name in CALIBRATION if name in keys), None)
    check_cascade(questions, odd)
    return {"escalate": model, "escalate_below": float(below), "has_models": True}


def check_cascade(questions: Sequence[TableQuestion], calibration: str | None) -> None:
    """Raise RecipeError for a recipe that is unsuitable for two models.

    `calibration` is a key with which it calibrates the answers, if it does.
    """
    if not questions:
        raise RecipeError("`escalate` needs questions to decide: add `ask`")
    if any(question.name == "model" for question in questions):
        raise RecipeError(
            "the question `model` has the name of the column with the model of each row: rename it"
        )
    if calibration is not None:
        raise RecipeError(
            f"`escalate` cannot be combined with `{calibration}` in a deployment: omit one"
        )
