"""Rows of a cascade: the selection of the escalated ones, and the merge of both models' rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Self

from tidemill.batch.calibration.threshold import GoldRow, find_threshold
from tidemill.batch.file.decided_row import DecidedRow
from tidemill.batch.file.escalated_line import escalated_line
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import row_id_of
from tidemill.batch.table.gold_rows import Gold, are_right, gold_answers_of, gold_row_of

from ..console.error_summary import ErrorSummary
from ..console.errors import InputChanged
from ..files.cascade_files import CascadeFiles, Selection
from ..files.decided_rows import read_decided
from ..files.new_file import open_new_file
from .inputs import open_input
from .run_options import RunOptions

if TYPE_CHECKING:
    from tidemill.batch.table.recipe import Recipe

    from ..files.table_input import TableInput


@dataclass(slots=True)
class Outcome:
    """Rows of one model, with the tokens of their requests and their answers on gold rows.

    `right` and `gold` count answers by question.
    """

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    right: dict[str, int] = field(default_factory=dict)
    gold: dict[str, int] = field(default_factory=dict)

    def add(self, row: DecidedRow, gold: Gold, recipe: Recipe | None) -> None:
        """Count a row."""
        self.rows += 1
        if row.body is None:
            self.failed += 1
            return
        usage = row.body.get("usage") or {}
        self.prompt_tokens += usage.get("input_tokens") or 0
        self.cached_tokens += (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
        self.completion_tokens += usage.get("output_tokens") or 0
        questions = () if recipe is None else recipe.questions
        for name, is_right in are_right(row, gold, questions).items():
            self.gold[name] = self.gold.get(name, 0) + 1
            self.right[name] = self.right.get(name, 0) + is_right

    def as_json(self) -> dict[str, Any]:
        """Return the counts, with the accuracy by question."""
        accuracy = {
            name: {"gold_rows": count, "accuracy": self.right[name] / count}
            for name, count in self.gold.items()
        }
        return {
            "rows": self.rows,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "accuracy": accuracy,
        }


@dataclass(slots=True)
class Outcomes:
    """Outcomes of the first model for all rows and for the escalated ones, and of the others.

    `not_escalated` has the second model's errors, instead of which the first one's answer is kept.
    """

    first: Outcome = field(default_factory=Outcome)
    first_escalated: Outcome = field(default_factory=Outcome)
    second: Outcome = field(default_factory=Outcome)
    cascade: Outcome = field(default_factory=Outcome)
    not_escalated: ErrorSummary = field(default_factory=ErrorSummary)
    questions: list[dict[str, Any]] = field(default_factory=list)


class OpenTable:
    """A table with gold answers, open during the whole cascade; `table` is None for other files."""

    def __init__(self, table: TableInput | None) -> None:
        self.table = table
        self.recipe = None if table is None else table.recipe

    @classmethod
    def of(cls, options: RunOptions, stack: ExitStack) -> Self:
        """Open the table of a run; raises BadInput."""
        if options.table is None:
            return cls(None)
        from ..files.table_requests import open_table_input  # late: pyarrow is slow to load

        table = open_table_input(
            options.input_file,
            options.table.recipe,
            tmp_dir=options.output_tmp_dir,
            dataset=options.table.dataset,
            stack=stack,
        )
        return cls(table)

    def changed(self) -> str | None:
        """Return a description of the change of a file since it was opened; None without one."""
        sources = () if self.table is None else self.table.sources
        return next(filter(None, (source.changed() for source in sources)), None)

    def gold(self) -> Iterator[Gold]:
        """Yield the gold answers of each row, without end if there are none."""
        plan = None if self.recipe is None else self.recipe.calibration
        if self.table is None or self.recipe is None or plan is None:
            yield from repeat({})
            return
        yield from gold_answers_of(self.table, plan, self.recipe.questions)


def select(options: RunOptions, files: CascadeFiles, opened: OpenTable) -> Selection:
    """Write the requests of the rows of which the first model is least sure.

    Blank lines keep the requests' line numbers, and so the IDs of their rows. The file has the
    input's time, so that a resumed run writes the same rows. Raises InputChanged.
    """
    assert options.cascade is not None
    threshold, gold = options.cascade.below, None
    is_chat = options.cascade.by == "chat"
    num_rows = num_escalated = last = 0
    with ExitStack() as stack:
        if options.cascade.target_accuracy is not None:
            found = find_threshold([*_gold_rows(files, opened)], options.cascade.target_accuracy)
            threshold, gold = found.value, asdict(found)
        requests = open_input(options, stack)
        out = stack.enter_context(open_new_file(str(files.requests)))
        rows = stack.enter_context(closing(read_decided(files.first)))
        for raw in requests.lines():
            row = next(rows, None)
            if row is None or row.row_id != row_id_of(raw.digest):
                raise _changed(requests.name)
            num_rows += 1
            if row.is_escalated(raw, threshold):
                num_escalated += 1
                line = escalated_line(raw, options.cascade.by) if is_chat else raw
                out.write(b"\n" * (raw.number - last - 1) + line.data + b"\n")
                last = raw.number
    created = requests.source.created
    os.utime(files.requests, (created, created))
    return Selection(threshold, num_rows, num_escalated, gold)


def _changed(name: str) -> InputChanged:
    return InputChanged(f"{name} changed during the run: start over with --force")


def _gold_rows(files: CascadeFiles, opened: OpenTable) -> Iterator[GoldRow]:
    """Yield the rows that the first model answered and whose answers are known."""
    with closing(read_decided(files.first)) as rows:
        for row, gold in zip(rows, opened.gold(), strict=False):
            if row.body is not None and gold and opened.recipe is not None:
                yield gold_row_of(row, gold, opened.recipe.questions)


def merge(
    options: RunOptions, files: CascadeFiles, selection: Selection, opened: OpenTable
) -> Outcomes:
    """Write the output: the second model's rows for the escalated requests, the first's for others.

    An answer of the first model is kept if the second one failed. The output is replaced when it is
    complete. Raises InputChanged for rows of other requests than the input's.
    """
    outcomes = Outcomes()
    target = options.target if options.table is None else files.merged
    with open_new_file(str(target)) as out:
        for row in _merged(options, files, selection, outcomes, opened):
            out.write(row.data)
        if (outcomes.first.rows, outcomes.second.rows) != selection.num_rows_by_model:
            raise _changed(options.input_file)
    if opened.table is not None and options.table is not None:
        from ..files.table_output import write_table

        table = replace(opened.table, recipe=opened.table.recipe.uncalibrated)
        columns = write_table(
            table, files.merged, options.table.output, options.table.output_format
        )
        outcomes.questions = columns.summaries()
    return outcomes


def _merged(
    options: RunOptions,
    files: CascadeFiles,
    selection: Selection,
    outcomes: Outcomes,
    opened: OpenTable,
) -> Iterator[DecidedRow]:
    """Yield one row for each request, and count the rows of both models."""
    assert options.cascade is not None
    model, recipe = options.cascade.model, opened.recipe
    seconds = read_decided(files.second) if selection.num_escalated else iter(())
    second = next(seconds, None)
    with ExitStack() as stack:
        lines = _chat_lines(options, stack) if options.cascade.by == "chat" else repeat(None)
        for row, line, gold in zip(read_decided(files.first), lines, opened.gold(), strict=False):
            outcomes.first.add(row, gold, recipe)
            result = row
            if line is not None and row.row_id != row_id_of(line.digest):
                raise _changed(options.input_file)
            if (
                second is not None
                and line is not None
                and row.is_escalated(line, selection.threshold)
            ):
                second = second.of_line(escalated_line(line, "chat"), line)
            if second is not None and second.row_id == row.row_id:
                outcomes.first_escalated.add(row, gold, recipe)
                outcomes.second.add(second, gold, recipe)
                result = row.or_second(second.with_model(model), model)
                if result.body is not None and second.body is None:
                    outcomes.not_escalated.add(str(second.error["message"]), outcomes.first.rows)
                second = next(seconds, None)
            outcomes.cascade.add(result, gold, recipe)
            yield result


def _chat_lines(options: RunOptions, stack: ExitStack) -> Iterator[RawLine]:
    """Yield the requests, whose rows have other IDs after a chat."""
    return open_input(options, stack).lines()
