"""Recorded run: the run that wrote an output, from its run card, for rerunning failed rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from ..arguments.dataset_id import is_dataset
from ..arguments.typed_flags import without_flag, without_replaced
from ..console.errors import Refused
from .paths import card_path, is_path
from .table_options import FORMATS_BY_SUFFIX, format_of

ROWS_SUFFIX: Final = ".rows.jsonl"
"""Ending of the rows from which a table of results is written."""

_SHARD: Final = re.compile(r"\.(\d+)-of-(\d+)$")
_INPUT_ENDINGS: Final = (".jsonl", ".ndjson", ".json")
_LIMITS: Final = ("--max-seconds", "--max-cost")
_OUTPUT: Final = ".output."


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as recorded in its card; without a card, `input` is None and `flags` are empty.

    `output` is the value of `-o`, and `shard` that of `--shard`.
    """

    output: str
    input: str | None = None
    flags: tuple[str, ...] = ()
    shard: str | None = None
    is_table: bool = False

    @classmethod
    def find(cls, rows: str) -> Self:
        """Return the run of an output, of its shard, or of the rows of a result table."""
        shard = _SHARD.search(rows)
        whole = rows if shard is None else rows[: shard.start()]
        table = whole.removesuffix(ROWS_SUFFIX)
        is_of_table = table != whole and format_of(table) is not None
        output = table if is_of_table else whole
        number = None if shard is None else f"{shard[1]}/{shard[2]}"
        card = card_of_output(Path(output if is_of_table else rows))
        if card is None:
            is_table = is_of_table or format_of(output) not in {None, "jsonl"}
            return cls(output, shard=number, is_table=is_table)
        flags = tuple(without_flag(card.get("flags") or [], "--shard"))
        is_table = card.get("recipe") is not None
        return cls(output, card["input"], flags, number, is_table)

    def command(self, rest: Sequence[str], input_file: str | None) -> list[str]:
        """Return the `run` command that retries its failed rows, with the flags in `rest`.

        Limits that may have stopped the run do not apply to the retry.
        """
        shard = [] if self.shard is None else ["--shard", self.shard]
        named = [] if input_file is None else ["-i", input_file]
        again = ["--resume", "--retry-failed"]
        flags = without_replaced(self.flags, rest)
        for limit in _LIMITS:
            flags = without_flag(flags, limit)
        return ["run", *named, "-o", self.output, *again, *flags, *shard, *rest]

    def find_input(self) -> str:
        """Return the file of the requests; raises Refused if there is none, or several."""
        if self.input is not None and (found := _existing(self.input, Path(self.output).parent)):
            return found
        return _input_next_to(self.output)


def recorded_id(output: str) -> str | None:
    """Return the column of custom IDs of a result table, from its run card; None if unknown."""
    recipe = (card_of_output(Path(output)) or {}).get("recipe")
    found = recipe.get("id") if isinstance(recipe, Mapping) else None
    return found if isinstance(found, str) else None


def card_of_output(output: Path) -> Mapping[str, Any] | None:
    """Return the card of an output; None without a readable one."""
    try:
        card: Any = json.loads(card_path(output).read_bytes())
        is_of_output = Path(card["output"]).name == output.name and isinstance(card["input"], str)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return card if is_of_output else None


def _existing(name: str, folder: Path) -> str | None:
    """Return an input at the path in the card, or next to the output."""
    if is_dataset(name) or not is_path(name):
        return name
    neighbour = folder / Path(name).name
    return next((str(path) for path in (Path(name), neighbour) if path.exists()), None)


def _input_next_to(output: str) -> str:
    """Return the input of an output by its name; raises Refused if there is none, or several."""
    stem, is_named, ending = output.removesuffix(".gz").rpartition(_OUTPUT)
    is_jsonl = f".{ending}" in _INPUT_ENDINGS
    endings = _INPUT_ENDINGS if is_jsonl else FORMATS_BY_SUFFIX
    names = [f"{stem}{suffix}{gz}" for suffix in endings for gz in ("", ".gz")] if is_named else []
    found = [name for name in names if Path(name).is_file()]
    if not found:
        hint = _output_next_to(output)
        more = "" if hint is None else f". To retry its failed rows: `tidemill retry {hint}`"
        raise Refused(f"the requests of {output} are not next to it: pass their file with -i{more}")
    if len(found) > 1:
        raise Refused(f"{' and '.join(found)} may be the requests of {output}: choose one with -i")
    return found[0]


def _output_next_to(name: str) -> str | None:
    """Return the output next to a file that is the input of its run; None without one."""
    path = Path(name)
    stem = path.name.removesuffix(".gz").removesuffix(path.suffix)
    for output in sorted(path.parent.glob(f"{stem}.output.*")):
        card = None if output.suffix == ".md" else card_of_output(output)
        if card is not None and Path(card["input"]).name == path.name:
            return str(output)
    return None
