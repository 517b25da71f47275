"""Calibration file: the calibration of an output, next to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tidemill.batch.calibration.answers import CalibrationError
from tidemill.batch.calibration.calibration import Calibration
from tidemill.batch.calibration.reliability_plot import reliability_svg
from tidemill.batch.table.calibration_plan import options_of
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import Recipe, calibrated_recipe

from ..console.errors import Refused
from .gold_file import gold_path, read_gold
from .new_file import open_new_file

_SUFFIX: Final = ".calibration.json"


def calibration_path(output: Path) -> Path:
    """Return the path of the calibration that was fitted on an output."""
    return output.with_name(output.name.removesuffix(output.suffix) + _SUFFIX)


def plot_path(output: Path) -> Path:
    """Return the path of the reliability plot of an output."""
    return calibration_path(output).with_suffix(".svg")


def write_plot(calibration: Calibration, output: Path) -> Calibration:
    """Write the reliability plot of an output, and return the calibration whose reports name it.

    Without measured questions, an older plot is removed.
    """
    path, svg = plot_path(output), reliability_svg(calibration.report)
    if svg is None:
        path.unlink(missing_ok=True)
        return calibration
    with open_new_file(str(path)) as file:
        file.write(svg.encode())
    reports = (
        {**each, "plot": path.name} if "after" in each else each for each in calibration.report
    )
    return replace(calibration, report=tuple(reports))


def calibrated(recipe: Recipe, keys: Mapping[str, Any], folder: Path) -> Recipe:
    """Return a recipe calibrated by its keys, and the files that they name.

    The file of a saved calibration is next to the recipe in `folder`, unless a flag names it.
    Raises Refused for invalid keys, and BadInput for an invalid gold file.
    """
    is_flag = "calibration" in (recipe.flags or ())
    calibration = saved_calibration(keys, Path() if is_flag else folder)
    path = gold_path(keys)
    gold = (
        None if path is None else read_gold(path, recipe.id, [*map(options_of, recipe.questions)])
    )
    try:
        return calibrated_recipe(recipe, keys, calibration, gold)
    except RecipeError as exc:
        raise Refused(f"the calibration is not valid: {exc}") from exc


def saved_calibration(keys: Mapping[str, Any], folder: Path = Path()) -> Calibration | None:
    """Return the calibration in the file that the key `calibration` names; None without one.

    Raises Refused for any other file.
    """
    name = keys.get("calibration")
    if not isinstance(name, str):
        return None
    path = folder / name
    try:
        return Calibration.parse(path.read_bytes())
    except OSError as exc:
        raise Refused(f"the calibration {path} cannot be read ({exc.strerror})") from exc
    except CalibrationError as exc:
        raise Refused(f"{path} cannot be used: {exc}") from exc
