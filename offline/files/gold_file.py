"""Gold file: a table of correct answers, with a column of custom IDs and one per question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidemill.batch.calibration.answers import CalibrationError, Options
from tidemill.batch.calibration.report import MIN_GOLD_ROWS
from tidemill.batch.file.lines import FormatError
from tidemill.batch.table.calibration_plan import GoldAnswers
from tidemill.batch.table.errors import TableError

from ..console.errors import BadInput, Refused

if TYPE_CHECKING:
    from tidemill.batch.table.reader import Table

_MAX_ROWS: Final = 1_000_000
_MAX_NAMED: Final = 10


def gold_path(keys: Mapping[str, Any]) -> Path | None:
    """Return the file that the key `gold` names; None if it names columns."""
    gold = keys.get("gold")
    name = gold[0] if isinstance(gold, list) and len(gold) == 1 else gold
    is_file = isinstance(name, str) and Path(name).is_file()
    return Path(str(name)) if is_file else None


def read_gold(path: Path, id_column: str | None, questions: Sequence[Options]) -> GoldAnswers:
    """Return the answers in a file; raises Refused without IDs, and BadInput for invalid ones."""
    from tidemill.batch.table.reader import open_table  # late: pyarrow is slow to load

    if id_column is None:
        raise Refused(f"the gold file {path} requires --id: its rows are found by their ID")
    try:
        with path.open("rb") as file:
            table = open_table(file)
            names: list[str] = table.schema.names
            options = [each for each in questions if each.name in names]
            if id_column not in names or not options:
                raise BadInput(
                    f"{path} must have the column `{id_column}` and one for each question with "
                    f"gold answers ({', '.join(each.name for each in questions[:_MAX_NAMED])}): it "
                    f"has {', '.join(names[:_MAX_NAMED])}"
                )
            answers = _answers(table, id_column, options, path)
            for name, known in answers.items():
                if len(known) < MIN_GOLD_ROWS:
                    raise BadInput(
                        f"the gold file {path} has {len(known)} answers to `{name}`: at least "
                        f"{MIN_GOLD_ROWS} are required"
                    )
            return GoldAnswers(id_column, answers)
    except OSError as exc:
        raise BadInput(f"the gold file {path} cannot be read ({exc.strerror})") from exc
    except (TableError, FormatError) as exc:
        raise BadInput(f"the gold file {path} cannot be read. {exc}") from exc


def _answers(
    table: Table, id_column: str, options: Sequence[Options], path: Path
) -> dict[str, dict[str, int]]:
    from tidemill.batch.table.cells import cells_of

    answers: dict[str, dict[str, int]] = {each.name: {} for each in options}
    number = 1
    for batch in table.batches([id_column, *answers]):
        if number + batch.num_rows > _MAX_ROWS + 1:
            raise BadInput(f"{path} has more than {_MAX_ROWS:,} rows: use a sample of them")
        ids = list(map(str, cells_of(batch.column(id_column))))
        for each in options:
            cells = cells_of(batch.column(each.name))
            for row, (custom_id, cell) in enumerate(zip(ids, cells, strict=True), number):
                try:
                    index = each.index(cell)
                except CalibrationError as exc:
                    raise BadInput(f"{path}, row {row:,}: {exc}") from exc
                if index is None:
                    continue
                known = answers[each.name].setdefault(custom_id, index)
                if known != index:
                    raise BadInput(
                        f"{path}, row {row:,}: {custom_id!r} has the answer {each.texts[index]!r} "
                        f"to `{each.name}`, and {each.texts[known]!r} in an earlier row: remove one"
                    )
        number += batch.num_rows
    return answers
