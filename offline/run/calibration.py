"""Calibration of a run: its report, its file next to the output, and the check of a saved one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.batch.calibration.calibration import Calibration

from ..console.errors import BadInput, Refused
from ..console.terminal import log
from ..files.calibrated_rows import calibrate_rows, is_rows_file
from ..files.calibration_file import saved_calibration, write_plot
from ..files.new_file import open_new_file
from ..files.paths import card_path
from ..files.recorded_run import recorded_id
from ..files.row_settings import RowSettings, Settings
from .calibration_check import compare_settings, save_calibration
from .run_options import RunOptions


def calibrate_run(options: RunOptions, settings: Settings | None) -> None:
    """Calibrate the rows of a finished run of requests, and log the accuracy.

    Raises BadInput if they cannot be calibrated; the rows stay as they are.
    """
    output = options.target
    try:
        calibration, path = calibrate(output, output, options.row_calibration, settings=settings)
    except (BadInput, Refused) as exc:
        raise BadInput(
            f"{str(exc).rstrip('.')}. All rows are in {output}: calibrate them with `tidemill "
            "calibrate`"
        ) from exc
    log("\n".join(calibration.report_lines()))
    log("the rows are calibrated" + (f", and the calibration is {path}" if path else ""))


def calibrate(
    source: Path,
    target: Path,
    keys: Mapping[str, Any],
    id_column: str | None = None,
    settings: Settings | None = None,
) -> tuple[Calibration, Path | None]:
    """Calibrate an output, and save its calibration unless it is a saved one.

    `id_column` has the IDs of a gold file, by default that of the run, and `settings` are those of
    the rows, by default from the run card. Returns the calibration and
    the path of its new file. Raises Refused for a saved calibration of another model or other
    questions.
    """
    card = _card_of(source)
    settings = settings or (None if card is None else card[1])
    saved = saved_calibration(keys)
    if saved is not None:
        compare_settings(saved, settings, str(source))
    if is_rows_file(source):
        calibration = calibrate_rows(source, target, keys, saved, id_column)
    else:
        from ..files.calibrated_output import calibrate_output  # late: pyarrow is slow to load

        id_column = id_column or recorded_id(str(source))
        calibration = calibrate_output(source, target, keys, saved, id_column)
    calibration = write_plot(calibration, target)
    if target == source and card is not None:
        _update_card(card_path(source), card[0], calibration)
    path = None if saved is not None else save_calibration(calibration, settings, target)
    return calibration, path


def _card_of(output: Path) -> tuple[dict[str, Any], Settings | None] | None:
    """Return the run card of an output, and the settings of its latest rows; None without one."""
    try:
        card: Any = json.loads(card_path(output).read_bytes())
        rows = RowSettings.parse(card.get("made_with"))
    except (OSError, ValueError, AttributeError):
        return None
    return card, None if rows is None else rows.latest


def _update_card(path: Path, card: dict[str, Any], calibration: Calibration) -> None:
    """Replace the reports of a card's questions, in Markdown too if there is such a card.

    A card of requests does not have the questions: the reports are next to them.
    """
    from .run_card import as_json, as_markdown  # late: it loads the engine's contract

    for question in card.get("questions") or []:
        if (report := calibration.reports.get(question["name"])) is not None:
            question["calibration"] = report
    if not card.get("questions"):
        card["calibration"] = [*calibration.report]
    forms = [(path, as_json)]
    if (markdown := path.with_suffix(".md")).exists():
        forms.append((markdown, as_markdown))
    for name, form in forms:
        with open_new_file(str(name)) as file:
            file.write(form(card).encode())
