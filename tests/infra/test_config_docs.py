"""docs/reference/configuration.md has every key of the configuration and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

from infra.config import Config, Model
from infra.config.table import Table
from tests.infra.reading import Deployment, Template

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


def documented(text: str) -> list[str]:
    """Return the keys of the first table in a text, as `table.key`, in the order of the page."""
    rows = re.search(r"^\| key \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows is not None
    found = []
    for row in rows[1].splitlines():
        cell = row.split("|")[1]
        table = re.match(r" `\[(\w+)\]", cell)
        prefix = f"{table[1]}." if table else ""
        keys = [key.split("] ")[-1] for key in re.findall(r"`([^`]+)`", cell)]
        found += [key.strip("[]") if key.endswith("]") else f"{prefix}{key}" for key in keys]
    return found


def fields(model: type[Table], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a model and of the tables in it; lists of tables are keys themselves."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        choices = annotation.__args__ if isinstance(annotation, UnionType) else (annotation,)
        if tables := [each for each in choices if is_table(each)]:
            yield from fields(tables[0], f"{name}.")
        else:
            yield f"{prefix}{name}"


def is_table(annotation: object) -> bool:
    """Say whether a type is a table of the configuration."""
    return isinstance(annotation, type) and issubclass(annotation, Table)


def test_the_tables_have_every_key_once() -> None:
    """They list the keys of a deployment, then those of each of its models."""
    whole, models = PAGE.read_text(encoding="utf-8").split("and for each `[[models]]`:\n")
    assert sorted(documented(whole)) == sorted({*fields(Config)} - {"models"})
    assert sorted(documented(models)) == sorted(fields(Model))


def test_what_idles_is_counted_as_it_is(templates: dict[str, Template]) -> None:
    """The page's costs are those of infra/config.toml, with its one model."""
    found, page = Deployment(templates), PAGE.read_text(encoding="utf-8")
    alarms = len(found.resources("AWS::CloudWatch::Alarm"))
    assert f"| alarms, {alarms - 4} and 4 for each model, at 0.10" in page
    words = {3: "three", 4: "four", 5: "five"}
    polled = words[len(found.resources("AWS::Lambda::EventSourceMapping"))]
    assert f"| polling of {polled} queues by Lambda" in page
