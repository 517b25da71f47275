"""Rows rendered as requests, and the sentence for each cell that gives none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.table.cells import NoText
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.request_template import RequestTemplate

COLUMNS = ("id", "text", "my tags", "stars", "dict")


def rendered(template: str, cell: Any, **given: Any) -> list[Any]:
    """Return what a prompt becomes for rows with this cell as `text`, or the message of its row."""
    made = RequestTemplate(parse_recipe({"prompt": template, **given}), COLUMNS)
    cells = {"id": ["a"], "text": [cell], "my tags": [["x", "y"]], "stars": [3], "dict": ["1-2"]}
    found = []
    for line in made.lines(cells, 1, 7):
        try:
            found.append(parse_line(RawLine(7, line)).body["messages"][0]["content"])
        except LineError as exc:
            found.append(exc.message)
    return found


@pytest.mark.parametrize(
    ("template", "cell", "expected"),
    [
        ("Label: {{ text }} ({{ stars }})", 'a "b"\n', 'Label: a "b"\n (3)'),
        ("{{ text }}", "{{ stars }}", "{{ stars }}"),
        ("{{ text }}", 1.5, "1.5"),
        ("{{ text or 'none' }}", None, "none"),
        ("{{ text | default('none') }}", None, "none"),
        ("{% if text is none %}none{% endif %}", None, "none"),
        ("{% for tag in row['my tags'] %}{{ tag }},{% endfor %}", "", "x,y,"),
        ("{{ row['my tags'] | tojson }}", "", '["x", "y"]'),
        (
            "{{ text }}",
            [{"type": "text", "text": "x", "cut": None}],
            [{"type": "text", "text": "x"}],
        ),
        ("no column", "", "no column"),
        ("{{ dict }} {{ text }}", "", "1-2 "),
        ("{{ dict | upper }} {{ range(3) | join }}", "", "1-2 012"),
    ],
)
def test_cells_stand_in_templates(template: str, cell: Any, expected: Any) -> None:
    """Text in a cell is never a template; a lone list or struct is a value of the body."""
    assert rendered(template, cell) == [expected]


@pytest.mark.parametrize(
    ("template", "cell", "words"),
    [
        ("{{ text }}", None, "column `text` is null"),
        ("{{ text | upper }}", None, "column `text` is null"),
        ("a {{ text }}", float("nan"), "column `text` is null"),
        ("a {{ text }}", ["x"], "column `text` is a list: {{ text | join(', ') }} makes it a text"),
        ("a {{ text | first }}", [["x"]], "is a list"),
        (
            "a {{ text }}",
            {"x": 1},
            "column `text` is a struct: {{ text | tojson }} makes it a text",
        ),
        ("{{ text }}", NoText("bytes"), "column `text` is bytes"),
        ("{{ text | upper }}", NoText("bytes"), "column `text` is bytes"),
        ("{{ text }}", NoText("not UTF-8"), "column `text` is not UTF-8"),
        ("{{ text + 1 }}", "x", "the template of `messages[0].content` cannot be rendered"),
        ("{{ raise_exception('too short') }}", "x", "cannot be rendered: too short"),
        (
            "{% for _ in range(999) %}{% for _ in range(999) %}x{% endfor %}{% endfor %}",
            "x",
            "takes more than 250,000 steps",
        ),
    ],
)
def test_a_cell_that_gives_no_request_is_told(template: str, cell: Any, words: str) -> None:
    """In its row's place, so that it gets its error row there."""
    (message,) = rendered(template, cell)
    assert words in message


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("r1", "r1"),
        (12, "12"),
        (None, "is null"),
        ("", "is empty"),
        (True, "is a bool"),
        (1.0, "a float"),
    ],
)
def test_ids_are_texts_or_whole_numbers(cell: Any, expected: str) -> None:
    """Nothing else tells rows apart for sure."""
    made = RequestTemplate(parse_recipe({"prompt": "x", "id": "text"}), COLUMNS)
    (line,) = made.lines({"text": [cell]}, 1, 1)
    fields = json.loads(line)
    assert expected in (fields["custom_id"] or fields["row_error"]["message"])


def test_only_columns_that_are_named_are_read() -> None:
    """All of them where a template may name any."""
    made = [
        RequestTemplate(parse_recipe({"prompt": prompt, "id": "id"}), COLUMNS).columns
        for prompt in (
            "{{ text }}",
            "{{ row.stars }}",
            "{% for name in row %}{{ row[name] }}{% endfor %}",
        )
    ]
    assert made == [("id", "text"), ("id", "stars"), COLUMNS]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"prompt": "{{ txt }}"},
            "names `txt`, which is no column of the table: did you mean `text`",
        ),
        ({"prompt": "{{ zzz }}"}, "no column of the table: it has id, text, my tags, stars"),
        ({"prompt": "{{ row['my tag'] }}"}, "did you mean `my tags`"),
        ({"prompt": "x", "id": "ident"}, "the recipe names `ident`"),
        ({"prompt": "x", "keep": ["nope"]}, "the recipe names `nope`"),
        ({"prompt": "{{ text"}, "the template of `messages[0].content` is no Jinja: line 1"),
        ({"prompt": "{{ text | nope }}"}, "No filter named 'nope'"),
    ],
)
def test_a_recipe_for_another_table_is_told(given: dict[str, Any], words: str) -> None:
    """Before any row is read."""
    with pytest.raises(RecipeError) as caught:
        RequestTemplate(parse_recipe(given), COLUMNS)
    assert words in str(caught.value)
