"""Request template: renders rows of a table as the lines of a batch file, in Jinja's sandbox.

A row that gives no request is rendered as a line that says so (`batch.file.lines.ROW_ERROR`): it
gets its error row in its place, as any malformed line does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.exceptions import TemplateError
from pydantic_core import PydanticSerializationError, to_json

from tidemill.protocol.sandbox import Sandbox

from ..file.lines import ROW_ERROR
from ..file.rows import escape_separators
from .errors import CellError, RecipeError
from .recipe import Recipe, suggestion

ROW: Final = "row"
"""Variable that holds all cells of a row, for columns whose name is no word."""

_MAX_NAMED = 20
_MAX_REASON_CHARS = 300
_KINDS: Final[dict[type, str]] = {list: "a list", dict: "a struct", bytes: "bytes"}

_Render = Callable[[Mapping[str, Any]], Any]


class Null(StrictUndefined):
    """A null cell in a template: false, left to `default`, and an error where it is printed."""

    __slots__ = ()

    def __init__(self, column: str) -> None:
        super().__init__(hint=_null_message(column), name=column)

    def __bool__(self) -> bool:  # type: ignore[override]
        return False


class NotUtf8:
    """A cell whose bytes are no text."""


class RequestTemplate:
    """A recipe made ready for a table of these columns; raises RecipeError for one of another.

    `columns` are those that it reads.
    """

    def __init__(self, recipe: Recipe, columns: Sequence[str]) -> None:
        self._url = recipe.url
        self._id = recipe.id
        self._params = recipe.body_params
        self._used: set[str] = set()
        self._all = tuple(columns)
        self._sandbox = _text_sandbox()
        for name in (recipe.id, *(recipe.keep or ())):
            if name is not None:
                self._check_column(name, "the recipe")
        if recipe.id is not None:
            self._used.add(recipe.id)
        self._fields = [(name, self._compile(value, name)) for name, value in recipe.fields.items()]
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
            except (CellError, PydanticSerializationError) as exc:
                yield _error_line(custom_id, exc)

    def _custom_id(self, row: Mapping[str, Any], number: int) -> str:
        if self._id is None:
            return str(number)
        value = row[self._id]
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        what = _kind_of(value) if value != "" else "empty"
        raise CellError(f"column `{self._id}` is {what}, and `id` names it", self._id)

    def _check_column(self, name: str, where: str) -> None:
        if name not in self._all:
            named = ", ".join(self._all[:_MAX_NAMED]) + (", …" * (len(self._all) > _MAX_NAMED))
            hint = suggestion(name, self._all) or f": it has {named}"
            raise RecipeError(f"{where} names `{name}`, which is no column of the table{hint}")

    def _compile(self, value: Any, path: str) -> _Render:
        """Return what renders a value of the body whose strings are templates."""
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
        where = f"the template of `{path}`"
        try:
            tree = self._sandbox.parse(source)
            columns = self._columns_of(tree, where)
            pieces = _pieces(tree)
            if pieces is None:
                return self._compile_jinja(source, where, columns)
        except TemplateSyntaxError as exc:
            raise RecipeError(f"{where} is no Jinja: line {exc.lineno}: {exc.message}") from exc
        if len(pieces) == 1:
            text, column = pieces[0]
            return (lambda _: text) if column is None else (lambda row: _value(row, column))
        return lambda row: "".join(
            [text if column is None else _text(row, column) for text, column in pieces]
        )

    def _columns_of(self, tree: nodes.Template, where: str) -> tuple[str, ...]:
        """Return the columns that a template reads; raises RecipeError for one that is missing."""
        # Jinja counts names of its own, such as `range`, as declared; a column goes before them.
        own = {name.name for name in tree.find_all(nodes.Name) if name.name in self._all}
        found = dict.fromkeys(sorted(meta.find_undeclared_variables(tree) | own))
        if ROW in found and ROW not in self._all:
            del found[ROW]
            found |= dict.fromkeys(self._cells_of_row(tree, where))
        for name in found:
            if name in self._all:
                self._used.add(name)
            elif name not in self._sandbox.globals:
                self._check_column(name, where)
        return tuple(found)

    def _cells_of_row(self, tree: nodes.Template, where: str) -> Sequence[str]:
        """Return the names in `row["…"]`; all columns where `row` is used otherwise."""
        names = []
        cells: list[Any] = [*tree.find_all(nodes.Getitem), *tree.find_all(nodes.Getattr)]
        for item in cells:
            if isinstance(item.node, nodes.Name) and item.node.name == ROW:
                key = item.attr if isinstance(item, nodes.Getattr) else None
                if isinstance(item, nodes.Getitem) and isinstance(item.arg, nodes.Const):
                    key = item.arg.value
                if not isinstance(key, str):
                    return self._all
                self._check_column(key, where)
                names.append(key)
        uses = sum(name.name == ROW for name in tree.find_all(nodes.Name))
        return names if len(names) == uses else self._all

    def _compile_jinja(self, source: str, where: str, columns: Sequence[str]) -> _Render:
        render = self._sandbox.compile_template(source)

        def rendered(row: Mapping[str, Any]) -> str:
            cells = {name: _variable(row[name], name) for name in columns if name in row}
            try:
                return render(**{ROW: cells, **cells})
            except UndefinedError as exc:
                raise CellError(str(exc), _first(cells, Null)) from exc
            except _NotText as exc:
                name = _first(cells, exc.kind)
                raise CellError(_nested_message(name or "?", exc.kind), name) from exc
            except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as exc:
                if (name := _first(cells, Null)) is not None and not isinstance(exc, TemplateError):
                    raise CellError(_null_message(name), name) from exc
                reason = str(exc)[:_MAX_REASON_CHARS]
                raise CellError(f"{where} cannot be rendered: {reason}", None) from exc

        return rendered


class _NotText(TemplateError):
    """A template printed a value that has no text."""

    def __init__(self, kind: type) -> None:
        super().__init__("not a text")
        self.kind = kind


def _text_sandbox() -> Sandbox:
    """Return a sandbox in which nothing is printed that is no text or number."""
    sandbox = Sandbox()
    sandbox.undefined = StrictUndefined
    sandbox.finalize = _finalize
    sandbox.tests["none"] = lambda value: value is None or isinstance(value, Null)
    return sandbox


def _finalize(value: Any) -> Any:
    for kind in (list, dict):
        if isinstance(value, kind):
            raise _NotText(kind)
    return "" if value is None else value


def _variable(value: Any, column: str) -> Any:
    """Return a cell as a template's variable; raises CellError for bytes."""
    if isinstance(value, (bytes, NotUtf8)):
        raise CellError(_nested_message(column, type(value)), column)
    return Null(column) if _is_null(value) else value


def _pieces(tree: nodes.Template) -> list[tuple[str, str | None]] | None:
    """Return the texts and columns that a template prints; None where it does anything else."""
    pieces: list[tuple[str, str | None]] = []
    for output in tree.body:
        if not isinstance(output, nodes.Output):
            return None
        for node in output.nodes:
            if isinstance(node, nodes.TemplateData):
                pieces.append((node.data, None))
            elif isinstance(node, nodes.Name) and node.name != ROW:
                pieces.append(("", node.name))
            else:
                return None
    return pieces or [("", None)]


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return a cell as a value of the body: lists and structs as they are, all else as text."""
    value = row[column]
    if isinstance(value, (list, dict)):
        return _without_nulls(value)
    return _text(row, column)


def _without_nulls(value: Any) -> Any:
    """Return a nested value without null fields of structs, which have no way to lack one."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if isinstance(value, str):
        return value
    if _is_null(value):
        raise CellError(_null_message(column), column)
    if isinstance(value, (list, dict, bytes, NotUtf8)):
        raise CellError(_nested_message(column, type(value)), column)
    return str(value)


def _is_null(value: Any) -> bool:
    """Say whether a cell is null, or NaN, which stands for it in tables from pandas."""
    return value is None or value != value  # noqa: PLR0124 - NaN alone differs from itself


def _null_message(column: str) -> str:
    return f"column `{column}` is null: {{{{ {column} or '' }}}} in the template takes nulls too"


def _nested_message(column: str, kind: type) -> str:
    if kind is NotUtf8:
        return f"column `{column}` is not UTF-8"
    ways: dict[type, str] = {
        list: f": {{{{ {column} | join(', ') }}}} makes it a text",
        dict: f": {{{{ {column} | tojson }}}} makes it a text",
        bytes: ": write the column as text",
    }
    return f"column `{column}` is {_KINDS[kind]}{ways.get(kind, '')}"


def _kind_of(value: Any) -> str:
    if _is_null(value):
        return "null"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _first(cells: Mapping[str, Any], kind: type) -> str | None:
    return next((name for name, value in cells.items() if isinstance(value, kind)), None)


def _error_line(custom_id: str | None, exc: CellError | PydanticSerializationError) -> bytes:
    column = exc.column if isinstance(exc, CellError) else None
    message = exc.message if isinstance(exc, CellError) else "a cell has text that is no Unicode"
    return _print_line({"custom_id": custom_id, ROW_ERROR: {"message": message, "column": column}})


def _print_line(line: Mapping[str, Any]) -> bytes:
    return escape_separators(to_json(line)) + b"\n"
