"""Request template: renders rows of a table as the lines of a batch file, in Jinja's sandbox.

A row that gives no request is rendered as a line with its error (`batch.file.lines.ROW_ERROR`).
The line becomes an error row in its place, as any malformed line does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import TemplateError
from pydantic_core import PydanticSerializationError, to_json

from ..column_spelling import ROW
from ..file.lines import ROW_ERROR
from ..file.rows import escape_separators
from .errors import RAISED_BY_INPUT, CellError, RecipeError, in_words, reason_of
from .recipe import Recipe, suggestion
from .template_names import (
    cells_of_row,
    check_constants,
    column_hint,
    names_in,
    rename_own,
    syntax_hint,
)
from .template_values import (
    CellFailed,
    Null,
    Path,
    TextSandbox,
    body_value,
    is_null,
    kind_of,
    row_variable,
    text_of,
    variable,
    with_single_quotes,
)

_MAX_NAMED = 20
_REQUEST_KEYS = {"custom_id", "url", "body"}
_MAX_NAME_CHARS = 100
_MAX_REASON_CHARS = 300

_Render = Callable[[Mapping[str, Any]], Any]


class RequestTemplate:
    """A recipe compiled for a table with these columns; raises RecipeError if they do not fit.

    `columns` are the ones that it reads, including the ID column; without `has_prompt_column` all
    requests are the same.
    """

    def __init__(self, recipe: Recipe, columns: Sequence[str]) -> None:
        self._is_in_file = recipe.flags is not None and "prompt" not in recipe.flags
        try:
            self._compile_recipe(recipe, columns)
        except RecipeError as exc:
            raise RecipeError(self._advice(str(exc))) from exc

    def _compile_recipe(self, recipe: Recipe, columns: Sequence[str]) -> None:
        self._url = recipe.url
        self._id = recipe.id
        self._params = recipe.body_params
        self._used: set[str] = set()
        self._all = dict.fromkeys(columns)
        self._sandbox = TextSandbox()
        self._flags = recipe.flags or frozenset()
        for key, names in (("id", (recipe.id,)), ("keep", recipe.keep or ())):
            for name in names:
                if name is not None:
                    self._check_column(name, f"--{key}" if key in self._flags else "the recipe")
        messages = recipe.fields.get("messages")
        self._num_messages = len(messages) if isinstance(messages, list) else 0
        self._fields = [(name, self._compile(value, name)) for name, value in recipe.fields.items()]
        if recipe.questions and "input" not in recipe.fields:
            if self._all.keys() >= _REQUEST_KEYS:
                raise RecipeError(
                    "its rows are requests of a batch file, which contain their own questions: "
                    "omit `ask`, or name the text to ask about in `prompt`"
                )
            self._fields.append(("input", self._compile_row(row_columns(recipe, columns))))
        self.has_prompt_column = bool(self._used)
        if recipe.id is not None:
            self._used.add(recipe.id)
        self.columns = tuple(name for name in columns if name in self._used)

    def lines(
        self, cells: Mapping[str, Sequence[Any]], num_rows: int, first_number: int
    ) -> Iterator[bytes]:
        """Yield a line for each row, newline included; `cells` are the values of `columns`."""
        numbers = range(first_number, first_number + num_rows)
        rows = zip(*(cells[name] for name in self.columns), strict=True)
        for number, values in zip(numbers, rows if self.columns else repeat(()), strict=False):
            row = dict(zip(self.columns, values, strict=True))
            custom_id = None
            try:
                custom_id = self._custom_id(row, number)
                body = {name: render(row) for name, render in self._fields}
                line = {"custom_id": custom_id, "url": self._url, "body": body | self._params}
                yield _print_line(line)
            except (CellError, *RAISED_BY_INPUT) as exc:
                yield _error_line(custom_id, exc, self._advice)

    def _advice(self, message: str) -> str:
        """Return a message with advice in the quotes that the template needs."""
        return with_single_quotes(message) if self._is_in_file else message

    def _custom_id(self, row: Mapping[str, Any], number: int) -> str:
        if self._id is None:
            return str(number)
        value = row[self._id]
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        what = "empty" if value == "" else kind_of(value)
        raise CellError(f"the ID column `{self._id}` is {what}", self._id)

    def _check_column(
        self, name: str, where: str, suggest: Callable[[str, Sequence[str]], str] = suggestion
    ) -> None:
        if name not in self._all:
            known = [*self._all]
            named = ", ".join(each[:_MAX_NAME_CHARS] for each in known[:_MAX_NAMED])
            hint = suggest(name, known) or f": it has {named}{', …' * (len(known) > _MAX_NAMED)}"
            shown = name[:_MAX_NAME_CHARS]
            raise RecipeError(f"{where} names `{shown}`, which is not a column of the table{hint}")

    def _compile_row(self, names: Sequence[str]) -> _Render:
        """Return a function that prints these cells of a row with their names, except nulls."""
        self._used.update(names)

        def rendered(row: Mapping[str, Any]) -> str:
            lines = [
                f"{name}: {_printed(value, name)}"
                for name in names
                if not is_null(value := row[name]) and value != ""
            ]
            if not lines:
                raise CellError("all cells of the row are empty", None)
            return "\n".join(lines)

        return rendered

    def _compile(self, value: Any, path: str) -> _Render:
        """Return a function that renders a value of the body whose strings are templates."""
        if isinstance(value, str):
            return self._compile_text(value, path)
        if isinstance(value, list):
            items = [self._compile(item, f"{path}[{place}]") for place, item in enumerate(value)]
            return lambda row: [item(row) for item in items]
        if isinstance(value, dict):
            inner = [(name, self._compile(item, f"{path}.{name}")) for name, item in value.items()]
            return lambda row: {name: item(row) for name, item in inner}
        return lambda _: value

    def _compile_text(self, source: str, path: str) -> _Render:
        where = self._place(path)
        try:
            with in_words(lambda reason: RecipeError(f"{where} cannot be compiled: {reason}")):
                return self._compile_template(source, where)
        except TemplateSyntaxError as exc:
            hint = syntax_hint(self._sandbox, source, [*self._all])
            message = f"{where} is not valid Jinja: line {exc.lineno}: {exc.message}{hint}"
            raise RecipeError(message) from exc
        except TemplateError as exc:
            raise RecipeError(f"{where} cannot be compiled: {exc.message}") from exc

    def _place(self, path: str) -> str:
        """Return the flag of a template, or its place in the recipe."""
        if "system" in self._flags and path == "messages[0].content":
            return "--system"
        prompt = f"messages[{self._num_messages - 1}].content"
        if "prompt" in self._flags and path in {"prompt", "input", prompt}:
            return "--prompt"
        return f"the template of `{path}`"

    def _compile_template(self, source: str, where: str) -> _Render:
        tree = self._sandbox.parse(source)
        check_constants(self._sandbox, source, self._all, where)
        pieces = _pieces(tree, self._all)
        if pieces is None:
            return self._compile_jinja(tree, where)
        self._used.update(column for _, column in pieces if column is not None)
        if len(pieces) == 1:
            text, column = pieces[0]
            return (lambda _: text) if column is None else (lambda row: _value(row[column], column))
        return lambda row: "".join(
            [
                text
                if column is None
                else value
                if type(value := row[column]) is str
                else text_of(value, column)
                for text, column in pieces
            ]
        )

    def _compile_jinja(self, tree: nodes.Template, where: str) -> _Render:
        tree, renamed = rename_own(tree, self._all, where)
        columns = {name: renamed.get(name, name) for name in names_in(tree, self._all)}
        has_row = ROW in columns and ROW not in self._all
        if has_row:
            del columns[ROW]
        columns = {name: column for name, column in columns.items() if self._use(column, where)}
        in_row = self._columns_in_row(tree, where) if has_row else ()
        render = self._sandbox.compile_template(tree)
        paths = {name: Path(name) for name in (*columns.values(), *in_row)}

        def rendered(row: Mapping[str, Any]) -> str:
            cells = {
                name: value if type(value := row[name]) is str else variable(value, path)
                for name, path in paths.items()
            }
            given = cells
            if renamed or has_row:
                given = {name: cells[column] for name, column in columns.items()}
            if has_row:
                given[ROW] = row_variable(cells, in_row)
            try:
                return render(**given)
            except CellFailed as exc:
                error = exc.error
                message = error.message if error.column else f"{where} failed: {error.message}"
                raise CellError(message, error.column) from exc
            except Exception as exc:  # a template may fail with any Python exception
                raise _failed(exc, cells, where) from exc

        return rendered

    def _use(self, name: str, where: str) -> bool:
        """Say whether a name in a template is a column; raises RecipeError for an unknown name."""
        if name in self._all:
            self._used.add(name)
            return True
        if name not in self._sandbox.globals:
            self._check_column(name, where, column_hint)
        return False

    def _columns_in_row(self, tree: nodes.Template, where: str) -> tuple[str, ...]:
        """Return the columns that a template reads from `row`; raises RecipeError for others."""
        cells = cells_of_row(tree)
        names = self._all if cells is None else cells
        for name in names:
            self._check_column(name, where)
        self._used.update(names)
        return tuple(dict.fromkeys(names))


def row_columns(recipe: Recipe, columns: Sequence[str]) -> list[str]:
    """Return the columns that questions are about without a prompt: all except IDs and gold."""
    gold = set() if recipe.calibration is None else {*recipe.calibration.gold.values()}
    return [name for name in columns if name != recipe.id and name not in gold]


def _printed(value: Any, column: str) -> str:
    """Return a cell that is not null as text; lists and structs as JSON."""
    if isinstance(value, (list, dict)):
        return to_json(body_value(value, column)).decode()
    return text_of(value, column)


def _pieces(tree: nodes.Template, columns: Collection[str]) -> list[tuple[str, str | None]] | None:
    """Return the texts and columns that a template prints; None if it does anything else."""
    pieces: list[tuple[str, str | None]] = []
    for output in tree.body:
        if not isinstance(output, nodes.Output):
            return None
        for node in output.nodes:
            if isinstance(node, nodes.TemplateData):
                pieces.append((node.data, None))
            elif isinstance(node, nodes.Name) and node.name in columns:
                pieces.append(("", node.name))
            else:
                return None
    return pieces or [("", None)]


def _value(value: Any, column: str) -> Any:
    """Return a cell as a value of the body: lists and structs unchanged, all else as text."""
    if isinstance(value, (list, dict)):
        return body_value(value, column)
    return text_of(value, column)


def _failed(exc: Exception, cells: Mapping[str, Any], where: str) -> CellError:
    """Return the error of a failed template; Python's messages would only name a null's type."""
    reason = str(exc)[:_MAX_REASON_CHARS]
    if isinstance(exc, (RecursionError, MemoryError)):
        reason = reason_of(exc)
    nulls = [name for name, cell in cells.items() if isinstance(cell, Null)]
    if nulls and not isinstance(exc, TemplateError) and Null.__name__ in reason:
        if len(nulls) == 1:
            return Path(nulls[0]).error("null")
        named = ", ".join(f"`{name}`" for name in nulls[:_MAX_NAMED])
        return CellError(f"{where} cannot be rendered: one of the columns {named} is null", None)
    return CellError(f"{where} cannot be rendered: {reason}", None)


def _error_line(custom_id: str | None, exc: Exception, advice: Callable[[str], str]) -> bytes:
    column, message = None, "a cell contains text that is not valid Unicode"
    if isinstance(exc, CellError):
        column, message = exc.column, advice(exc.message)
    elif not isinstance(exc, PydanticSerializationError):
        message = f"the row cannot be converted to a request: {reason_of(exc)}"
    return _print_line({"custom_id": custom_id, ROW_ERROR: {"message": message, "column": column}})


def _print_line(line: Mapping[str, Any]) -> bytes:
    return escape_separators(to_json(line)) + b"\n"
