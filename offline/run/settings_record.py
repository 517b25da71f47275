"""Record of the settings of a run's rows, compared with the settings of kept rows.

It is written next to the output before the first row, and moved to the run card or the shard's mark
after the last one, so that runs with different settings cannot silently share an output.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.engine.config import EngineConfig
from tidemill.protocol.contract import EngineInfo

from ..console.errors import BadInput, Refused
from ..console.terminal import amount, log
from ..files.output import LocalFile
from ..files.paths import card_path
from ..files.recorded_run import RecordedRun
from ..files.retry import is_retry_started
from ..files.row_settings import (
    Differences,
    RowSettings,
    Settings,
    SettingsUse,
    differences,
    refusal,
    settings_path,
    settings_path_of,
    without_raised_limits,
)
from ..files.row_writer import OutputFiles
from ..files.shard_mark import ShardMark, mark_path
from .run_options import RunOptions
from .run_settings import is_of_recipe, settings_of, with_loaded_model


class SettingsRecord:
    """Settings of the rows of one run's output.

    `earlier` are those of the rows that the run may keep, None if unknown; `path` is the file next
    to the output, None for an output that cannot be resumed. `options` retry truncated rows if the
    interrupted retry did.
    """

    def __init__(
        self,
        options: RunOptions,
        settings: Settings,
        earlier: RowSettings | None,
        path: Path | None,
    ) -> None:
        self.rows = RowSettings((SettingsUse(settings),))
        self.options = options
        self.is_pending = path is not None and path.exists()
        self._settings = settings
        self._earlier = earlier
        self._path = path
        self._num_kept = 0
        self._is_retry = False

    def check(self) -> None:
        """Raise Refused for settings that differ from those of the kept rows."""
        before = None if self._earlier is None else self._earlier.latest
        if before is None or self.options.allow_other_settings:
            return
        found = differences(before, self._settings)
        if self.options.retry_truncated:
            found = without_raised_limits(found)
        if self.options.retry_failed:
            # Only the requests matter: those of the remaining rows must be the same.
            found = {name: pair for name, pair in found.items() if not is_of_recipe(name)}
        if found:
            raise Refused(_refusal(self.options, found))

    def check_calibration(self) -> None:
        """Raise Refused for a saved calibration of another model or other questions."""
        table = self.options.table
        if self.options.row_calibration:
            from .calibration_check import check_rows_calibration

            check_rows_calibration(self.options.row_calibration, self._settings)
        if table is not None and table.recipe.calibration is not None:
            from .calibration_check import check_settings  # late: few runs have one

            check_settings(table.recipe.calibration, self._settings)

    def check_loaded(self, info: EngineInfo) -> None:
        """Compare again with the loaded model, whose files may not have been local before."""
        self._settings = with_loaded_model(self._settings, info)
        if self._num_kept:
            self.check()
        self.check_calibration()

    def keep(self, num_kept: int, *, is_complete: bool) -> None:
        """Record the number of kept rows, and whether every line has one."""
        self._num_kept = num_kept
        self._is_retry = self.options.retry_failed or self.options.retry_truncated
        if num_kept and not is_complete and (self._earlier is None or not self._earlier.latest):
            log(
                f"note: the settings of the {num_kept:,} kept rows are unknown, so they cannot be "
                "compared with this run's settings"
            )
        if num_kept and is_complete and not self.options.retry_truncated:
            self.rows = self._earlier or RowSettings((SettingsUse(None),))
        else:
            self._continue()

    def start(self) -> None:
        """Write the settings next to the output; called before its first new row."""
        self._continue()
        if self._path is None:
            return
        rows = replace(self.rows, retries_truncated=self.options.retry_truncated)
        try:
            rows.save(self._path)
        except OSError as exc:
            log(
                f"note: {self._path} cannot be written ({exc.strerror}): a resume will not be able "
                "to compare its settings with this run's"
            )

    def finish(self, num_rows: int) -> None:
        """Record that all rows exist."""
        self.rows = self.rows.counted(num_rows)

    def settle(self, *, is_elsewhere: bool, may_be_retried: bool) -> None:
        """Remove the file of a finished run, unless a later command needs it.

        Without a card or a mark, only this file contains the settings for retries. It also stays if
        an older card contains the settings of replaced rows.
        """
        if self._path is None or not self._path.exists():
            return
        is_older_card_there = not is_elsewhere and card_settings(self.options) is not None
        try:
            if not is_elsewhere and (may_be_retried or is_older_card_there):
                self.rows.save(self._path)
            else:
                self._path.unlink()
        except OSError as exc:
            log(f"note: {self._path} cannot be updated ({exc.strerror})")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Mention a different recipe, if any, in errors about rows that do not match the input."""
        try:
            yield
        except BadInput as exc:
            raise self._explained(exc) from exc

    def _explained(self, exc: BadInput) -> BadInput:
        before = None if self._earlier is None else self._earlier.latest
        found = {} if before is None else differences(before, self._settings)
        if not (names := [name for name in found if is_of_recipe(name)]):
            return exc
        if (recipe_file := self._recipe_file_of_rows()) is not None:
            again = shlex.join(["tidemill", "retry", str(self.options.target)])
            return BadInput(
                f"the rows of {self.options.target} were made with a recipe file, whose "
                f"prompt --prompt cannot replace: edit {recipe_file} and run `{again}`"
            )
        return BadInput(
            f"the rows of {self.options.target} have another recipe ({', '.join(names)}), so "
            "they cannot be kept: pass that recipe, or start over with --force without --resume"
        )

    def _recipe_file_of_rows(self) -> Path | None:
        """Return the recipe file of the rows if this run replaces its prompt, otherwise None."""
        table = self.options.table
        if table is None or "prompt" not in (table.recipe.flags or ()):
            return None
        earlier = RecordedRun.find(str(table.output))
        had_flag = any(word.partition("=")[0] == "--prompt" for word in earlier.flags)
        return None if earlier.input is None or had_flag else table.recipe_file

    def _continue(self) -> None:
        if not self._num_kept:
            self.rows = RowSettings((SettingsUse(self._settings),))
            return
        earlier = self._earlier or RowSettings((SettingsUse(None),))
        self.rows = earlier.continued(self._settings, self._num_kept, is_retry=self._is_retry)


def open_record(
    options: RunOptions, config: EngineConfig, template: str | None, files: OutputFiles
) -> SettingsRecord:
    """Return the record of a run; raises Refused if its kept rows have other settings."""
    settings, output = settings_of(options, config, template), files.output
    path = None if output.spool_path is None else settings_path_of(output.spool_path)
    earlier = None
    if options.resume and isinstance(output, LocalFile) and _has_rows(output, files):
        earlier = _earlier_settings(options)
        if is_retry_started(output.path):
            options = _continuing_retry(options, earlier)
    record = SettingsRecord(options, settings, earlier, path)
    record.check()
    record.check_calibration()
    return record


def _continuing_retry(options: RunOptions, earlier: RowSettings | None) -> RunOptions:
    """Return the options of a resume that continues an interrupted retry."""
    if earlier is not None and earlier.retries_truncated:
        return replace(options, retry_truncated=True)
    if options.retry_truncated:
        raise Refused(
            "a retry of failed rows was interrupted: finish it with only --resume, then pass "
            "--resume --retry-truncated"
        )
    return options


def check_complete(options: RunOptions, config: EngineConfig, template: str | None) -> None:
    """Raise Refused for a complete table with other settings, or a missing file of its rows."""
    # Imported late: pyarrow is slow to load.
    from ..files.table_output import count_failed_rows
    from .table_run import rows_path

    table = options.target
    kind = "failed or truncated row" if options.retry_truncated else "failed row"
    is_retry = options.retry_failed or options.retry_truncated
    num_failed = count_failed_rows(table, or_truncated=options.retry_truncated) if is_retry else 0
    if num_failed:
        raise Refused(
            f"{table} has {amount(num_failed, kind)}, but the file of its rows "
            f"({rows_path(table)}) was removed, so they cannot be rerun: start over with "
            "--force without --resume"
        )
    rows = replace(options, output_file=str(rows_path(table)))
    earlier = _earlier_settings(rows)
    SettingsRecord(options, settings_of(options, config, template), earlier, None).check()


def _has_rows(output: LocalFile, files: OutputFiles) -> bool:
    errors = files.errors
    return (
        not output.is_empty
        or output.spool_path.exists()
        or is_retry_started(output.path)
        or (isinstance(errors, LocalFile) and not errors.is_empty)
    )


def _earlier_settings(options: RunOptions) -> RowSettings | None:
    """Return the settings of the rows of an output; None if they are not recorded."""
    output = Path(options.output_file)
    sources: tuple[Callable[[], RowSettings | None], ...] = (
        lambda: RowSettings.load(settings_path(output)),
        lambda: None if options.shard is None else _of_mark(output),
        lambda: card_settings(options),
    )
    return next((found for source in sources if (found := source()) is not None), None)


def _of_mark(output: Path) -> RowSettings | None:
    try:
        return RowSettings.parse(ShardMark.load(mark_path(output)).made_with)
    except (OSError, ValueError):
        return None


def card_settings(options: RunOptions) -> RowSettings | None:
    """Return the settings in the run card of an output; None without one."""
    target = options.target
    try:
        card: Any = json.loads(card_path(target).read_bytes())
        shard = None if options.shard is None else str(options.shard)
        # Shards of a table share the card's name.
        if (Path(card["output"]).name, card["shard"]) != (target.name, shard):
            return None
        return RowSettings.parse(card.get("made_with"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refusal(options: RunOptions, found: Differences) -> str:
    ways = []
    if not without_raised_limits(found):
        ways.append(
            "To rerun truncated and failed rows with the higher limit, pass --retry-truncated."
        )
    if not any(map(is_of_recipe, found)):
        ways.append(
            "To keep the rows and run the rest with new settings, pass --allow-other-settings."
        )
    return refusal(options.target, found, *ways)
