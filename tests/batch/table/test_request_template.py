"""Rows rendered as requests, and the message for each cell that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.table.cells import NoText
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.requests import read_body

COLUMNS = ("id", "text", "my tags", "stars", "dict")


def rendered(template: str, cell: Any, **given: Any) -> list[Any]:
    """Return the prompts of rows with this cell as `text`, or their errors."""
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
def test_cells_are_rendered_in_templates(template: str, cell: Any, expected: Any) -> None:
    """Text in a cell is never a template; a lone list or struct is a value of the body."""
    assert rendered(template, cell) == [expected]


def test_a_column_of_recordings_is_a_part_of_a_message() -> None:
    """Templates are in the strings of its fields, at any depth."""
    parts = [
        {"type": "audio_url", "audio_url": {"url": "{{ text }}"}},
        {"type": "text", "text": "Are {{ stars }} speaking?"},
    ]
    recipe = parse_recipe({"messages": [{"role": "user", "content": parts}]})
    cells = {"text": ["s3://mine/media/default/1.wav"], "stars": [3]}
    made = RequestTemplate(recipe, ("text", "stars"))
    [line] = [parse_line(RawLine(1, line)) for line in made.lines(cells, 1, 1)]
    message = read_body(ChatCompletionRequest, line.body).messages[0]
    assert [part.url for _, part in message.media()] == cells["text"]
    assert message.texts() == ["Are 3 speaking?"]


@pytest.mark.parametrize(
    ("template", "cell", "words"),
    [
        ("{{ text }}", None, "column `text` is null"),
        ("{{ text | upper }}", None, "column `text` is null"),
        ("a {{ text }}", float("nan"), "column `text` is null"),
        (
            "a {{ text }}",
            ["x"],
            'column `text` is a list: {{ text | join(", ") }} converts it to text',
        ),
        ("a {{ text | first }}", [["x"]], "is a list"),
        (
            "a {{ text }}",
            {"x": 1},
            "column `text` is a struct: {{ text | tojson }} converts it to text",
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
def test_a_cell_without_a_text_is_reported(template: str, cell: Any, words: str) -> None:
    """The error takes the place of the row's request."""
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
def test_ids_are_texts_or_integers(cell: Any, expected: str) -> None:
    """Other values may not be unique."""
    made = RequestTemplate(parse_recipe({"prompt": "x", "id": "text"}), COLUMNS)
    (line,) = made.lines({"text": [cell]}, 1, 1)
    fields = json.loads(line)
    assert expected in (fields["custom_id"] or fields["row_error"]["message"])


def test_only_used_columns_are_read() -> None:
    """All columns are read if a template may use any."""
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
            "names `txt`, which is not a column of the table: did you mean `text`",
        ),
        ({"prompt": "{{ zzz }}"}, "not a column of the table: it has id, text, my tags, stars"),
        ({"prompt": "{{ row['my tag'] }}"}, "did you mean `my tags`"),
        ({"prompt": "{{ my_tags }}"}, 'not a column of the table: write {{ row["my tags"] }}'),
        ({"prompt": "{{ my tags }}"}, "got 'tags': write {{ row[\"my tags\"] }}"),
        ({"prompt": "{{ my tags or 'x' }}"}, ': write {{ row["my tags"] }}'),
        ({"prompt": "{{ row }"}, "not valid Jinja: line 1: unexpected '}'"),
        ({"prompt": "x", "id": "ident"}, "the recipe names `ident`"),
        ({"prompt": "x", "keep": ["nope"]}, "the recipe names `nope`"),
        ({"prompt": "{{ text"}, "the template of `messages[0].content` is not valid Jinja: line 1"),
        ({"prompt": "{{ text | nope }}"}, "No filter named 'nope'"),
    ],
)
def test_a_recipe_for_another_table_is_reported(given: dict[str, Any], words: str) -> None:
    """The error comes before any row is read."""
    with pytest.raises(RecipeError) as caught:
        RequestTemplate(parse_recipe(given), COLUMNS)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prompt"}, "--prompt is not valid Jinja: line 1: expected token"),
        ({"prompt"}, ': write {{ row["my tags"] }}'),
        ({"system"}, ": write {{ row['my tags'] }}"),
        (set(), "the template of `messages[1].content` is not valid Jinja"),
    ],
)
def test_advice_is_for_a_flag_or_a_file(flags: set[str], words: str) -> None:
    """A template is in single quotes in a shell, and in double quotes in a file."""
    keys = {"system": "x", "prompt": "{{ my tags }}"}
    with pytest.raises(RecipeError) as caught:
        RequestTemplate(replace(parse_recipe(keys), flags=frozenset(flags)), COLUMNS)
    assert words in str(caught.value)
    keys = {"prompt": '{{ row["my tags"] }}', "id": "id"}
    made = RequestTemplate(replace(parse_recipe(keys), flags=frozenset(flags)), COLUMNS)
    (line,) = made.lines({"id": ["1"], "my tags": [None]}, 1, 1)
    quote = '"' if "prompt" in flags else "'"
    empty = quote * 2
    advice = f"{{{{ row[{quote}my tags{quote}] or {empty} }}}} in the template allows nulls"
    assert advice in json.loads(line)["row_error"]["message"]


def test_a_flag_with_an_unknown_column_is_named() -> None:
    """The name is suggested as it is: it is not in a template."""
    recipe = replace(parse_recipe({"prompt": "x", "id": "My Tags"}), flags=frozenset({"id"}))
    with pytest.raises(RecipeError, match=r"^--id names `My Tags`, .*: did you mean `my tags`"):
        RequestTemplate(recipe, COLUMNS)


def of_row(template: str, **cells: Any) -> str:
    """Return the prompt of a row with these cells, or the message of its error."""
    made = RequestTemplate(parse_recipe({"prompt": template}), list(cells))
    (line,) = made.lines({name: [cell] for name, cell in cells.items()}, 1, 1)
    try:
        return str(parse_line(RawLine(1, line)).body["messages"][0]["content"])
    except LineError as exc:
        return exc.message


METHODS = ("items", "keys", "values", "get", "pop", "copy", "update", "clear", "setdefault")


@pytest.mark.parametrize("name", METHODS)
def test_a_field_takes_precedence_over_a_method(name: str) -> None:
    """A row and a struct have fields; Python's mapping methods are only a fallback."""
    assert of_row(f"{{{{ row.{name} }}}}!", **{name: "cell"}) == "cell!"
    assert of_row(f"{{{{ row['{name}'] }}}}!", **{name: "cell"}) == "cell!"
    assert of_row(f"{{{{ s.{name} }}}}!", s={name: "field"}) == "field!"
    assert of_row(f"{{% for x in l %}}{{{{ x.{name} }}}}{{% endfor %}}", l=[{name: 7}]) == "7"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("template", ["{{ s.%s }}!", "{{ s['%s'] ~ '!' }}", "{{ s.%s | upper }}"])
def test_a_method_is_never_printed(template: str, name: str) -> None:
    """A struct without such a field gives an error with the name."""
    message = of_row(template % name, s={"x": 1})
    assert f"`{name}`" in message
    assert "method" in message or "has no" in message
    assert "built-in" not in message


def test_methods_that_read_can_be_called() -> None:
    """Templates loop over the fields of a struct."""
    template = "{% for name, value in s.items() %}{{ name }}={{ value }},{% endfor %}"
    assert of_row(template, s={"a": 1, "b": "x"}) == "a=1,b=x,"
    assert of_row("{{ text.upper() }}, {{ s.get('a') }}", text="x", s={"a": 2}) == "X, 2"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ l | map('upper') }}!", "prints a generator, which is not a text"),
        ("{{ 'a' ~ (l | map('upper')) }}", "prints a generator"),
        ("{{ range }}", "prints a function"),
        ("{{ range(3) }}", "prints a range"),
        ("{{ none }}", "prints null"),
        ("{{ l[:1] }}!", "prints a list"),
        ("{{ text.upper }}!", "`upper` is a method: use upper() to call it"),
        ("{{ row }}!", "{{ row | tojson }} prints it"),
        ("{{ l | upper }}", 'column `l` is a list: {{ l | join(", ") }} converts it to text'),
        ("{{ l ~ '' }}", "column `l` is a list"),
        ("{{ s.l | string }}", 'column `s` is a list at `s.l`: {{ s.l | join(", ") }}'),
        ("{{ s.n | upper }}", 'column `s` is null at `s.n`: {{ s.n or "" }}'),
        ("{{ s.l | join(', ') }}", "column `s` is null at `s.l[1]`"),
        ("{{ s.typo }}!", "`s` has no `typo`"),
        ("{{ s.nn }}!", "`s` has no `nn`: did you mean `n`?"),
    ],
)
def test_only_texts_and_numbers_are_printed(template: str, words: str) -> None:
    """Any value that Python would print in its own format fails the row with a message."""
    cells = {"text": "x", "l": ["a"], "s": {"n": None, "l": ["b", None]}}
    assert words in of_row(template, **cells)


def test_the_failing_cell_is_named() -> None:
    """Another null in the same row is not blamed."""
    cells: dict[str, Any] = {"a": None, "b": None, "c": ["x"], "d": ["y"], "e": {"f": 1}, "g": {}}
    for template, column in (
        ("{{ a or '' }}{{ b | upper }}", "b"),
        ("{{ a | default('') }}{{ 1 + b }}", "b"),
        ("{{ 'x'.replace('x', b) }}{{ a or '' }}", "`a`, `b`"),
        ("{{ c | length }}{{ d }}", "d"),
        ("{{ c | length }}{{ g }}{{ e.f }}", "g"),
    ):
        assert f"column `{column}`" in of_row(template, **cells) or f"columns {column}" in of_row(
            template, **cells
        )


def test_null_cells_are_null_in_json() -> None:
    """Null, NaN and infinity are null; a decimal is a text."""
    cell = {"n": None, "x": float("nan"), "y": float("inf"), "d": Decimal("1.50"), "l": [None]}
    expected = {"n": None, "x": None, "y": None, "d": "1.50", "l": [None]}
    assert json.loads(of_row("{{ c | tojson }} ", c=cell)) == expected
    assert json.loads(of_row("{{ row | tojson }}", c=cell, n=None)) == {"c": expected, "n": None}
    assert of_row("{{ n | tojson }}", n=None) == "null"
    assert of_row("{{ 'none' if n == none else n }}", n=None) == "none"
    assert "column `b` is bytes" in of_row("{{ b | tojson }}", b=NoText("bytes"))


JINJA_NAMES = (
    *("self", "super", "loop", "range", "dict", "namespace", "cycler", "joiner", "caller"),
    *("varargs", "kwargs", "raise_exception", "in", "is", "and", "or", "if", "else", "not"),
    *("true", "false", "none", "True", "False", "None", "row", "environment", "context", "block"),
)


@pytest.mark.parametrize("name", JINJA_NAMES)
@pytest.mark.parametrize(
    "template", ["{{ %s }}", "a {{ %s }}", "{{ %s | upper }}", "{{ %s ~ '' }}"]
)
def test_a_jinja_name_is_the_column_or_refused(template: str, name: str) -> None:
    """The message shows how to write the column."""
    try:
        found = of_row(template % name, **{name: "cell"})
    except RecipeError as exc:
        spelled = str(exc).partition("{{ ")[2].partition(" }}")[0]
        assert spelled == f'row["{name}"]'
        found = of_row(template % spelled, **{name: "cell"})
    assert found.lower().removeprefix("a ") == "cell"


def test_jinja_names_work_without_such_a_column() -> None:
    """Other columns change nothing, and neither do tests, filters and options."""
    assert of_row("{{ text is none }}, {{ true }}", text=None) == "True, True"
    assert (
        of_row("{% if text is not none %}{{ row['none'] }}{% endif %}", text="x", none="n") == "n"
    )
    loop = "{% for x in l %}{{ loop.index }}{{ x }}{% endfor %}"
    assert of_row(loop, l=["a", "b"], loop="c") == "1a2b"
    with pytest.raises(RecipeError, match=r"`loop`, which is Jinja's own inside a `for`"):
        of_row("{% for x in l %}{{ loop }}{% endfor %}", l=["a"], loop="c")
    with pytest.raises(RecipeError, match="rename the column"):
        of_row("{{ true }}", true="x", row="y")


def test_advice_for_a_null_names_the_column_as_templates_do() -> None:
    """The advice can be pasted for a column whose name is not a word."""
    for name in ("my column", "true", "it's"):
        prompt = "x{{ row[" + json.dumps(name) + "] }}"
        made = RequestTemplate(parse_recipe({"prompt": prompt}), [name])
        (line,) = made.lines({name: [None]}, 1, 1)
        message = json.loads(line)["row_error"]["message"]
        advice = "{{ " + message.partition("{{ ")[2].partition(" }}")[0] + " }}"
        assert of_row(f"a{advice}", **{name: None}) == "a"
