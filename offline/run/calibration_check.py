"""Settings of a calibration: saved with it, and compared with those of other rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tidemill.batch.calibration.calibration import Calibration
from tidemill.batch.table.calibration_plan import CalibrationPlan

from ..arguments.defaults import MAX_TOKENS, TEMPERATURE
from ..console.errors import Refused
from ..console.terminal import log
from ..files.calibrated_rows import check_keys
from ..files.calibration_file import calibration_path, saved_calibration
from ..files.new_file import open_new_file
from ..files.row_settings import Settings, describe, differences

NOT_OF_ANSWERS: Final = frozenset(
    {"--dialect", "--id", "--served-model-name", MAX_TOKENS, TEMPERATURE}
)


def check_rows_calibration(keys: Mapping[str, Any], settings: Settings) -> None:
    """Raise Refused if rows of requests with these settings cannot be calibrated by these keys."""
    saved = saved_calibration(keys)
    check_keys(keys, saved)
    if saved is not None:
        compare_settings(saved, settings, "this command")


def check_settings(plan: CalibrationPlan, settings: Settings) -> None:
    """Raise Refused if a run's saved calibration belongs to another model or other questions."""
    if plan.saved is not None:
        compare_settings(plan.saved, settings, "this command")


def compare_settings(saved: Calibration, settings: Settings | None, name: str) -> None:
    """Raise Refused if a calibration has other settings than some rows."""
    if not saved.settings or settings is None:
        log("note: the calibration's model is not compared, because one run card is missing")
        return
    found = {
        flag: pair
        for flag, pair in differences(saved.settings, settings).items()
        if flag not in NOT_OF_ANSWERS
    }
    if found:
        head = f"the calibration has other settings than {name}:"
        advice = (
            "Use the same model and questions, or fit a new calibration with --gold or --calibrate "
            "batch."
        )
        raise Refused("\n".join((head, *describe(found, "there", "here"), advice)))


def save_calibration(calibration: Calibration, settings: Settings | None, output: Path) -> Path:
    """Write a calibration with the settings of its rows next to the output; return its path."""
    path = calibration_path(output)
    kept = {flag: value for flag, value in (settings or {}).items() if flag not in NOT_OF_ANSWERS}
    with open_new_file(str(path)) as file:
        file.write(replace(calibration, settings=kept).print().encode())
    return path
