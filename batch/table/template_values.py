"""Template values: the cells of a row as a template's variables, and the sandbox for printing them.

Only texts, numbers, booleans and decimals are printed. Any other value, which Python would print
in its own format, fails the row with the place of the cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from math import isnan
from types import BuiltinMethodType, MethodType
from typing import Any, Final

from jinja2 import StrictUndefined, nodes
from jinja2.compiler import Frame
from jinja2.exceptions import TemplateRuntimeError

from tidemill.protocol.sandbox import Sandbox
from tidemill.protocol.sandbox_code import CountingCode

from ..column_spelling import ROW, quoted, spelling_of
from .errors import CellError
from .no_text import NoText
from .recipe import suggestion

_PRINTED: Final = (str, int, float, Decimal)
_READ_METHODS: Final = frozenset({"get", "items", "keys", "values"})
_KINDS: Final = {list: "a list", tuple: "a list", dict: "a struct", type(None): "null"}
_WAYS: Final = {
    "a list": ' | join(", ") }} converts it to text',
    "a struct": " | tojson }} converts it to text",
    "null": ' or "" }} in the template allows nulls',
}
_ADVICE: Final = re.compile(r"\{\{[^'\\{}`]*\}\}|`row\[[^'\\{}`]*`")
_PLAIN: Final = frozenset({str, int, bool, Decimal})
"""Types that are never null and contain no other values."""


class CellFailed(TemplateRuntimeError):
    """A cell value that a template cannot use."""

    def __init__(self, error: CellError) -> None:
        super().__init__(error.message)
        self.error = error


class Path:
    """Place of a value in a row: a column, and the path inside its cell."""

    __slots__ = ("_key", "_parent")

    def __init__(self, key: str | int, parent: Path | None = None) -> None:
        self._key = key
        self._parent = parent

    @property
    def column(self) -> str:
        """Name of the column."""
        return str(self._key) if self._parent is None else self._parent.column

    def __str__(self) -> str:
        if self._parent is None:
            return spelling_of(self.column)
        if isinstance(self._key, str) and self._key.isidentifier():
            return f"{self._parent}.{self._key}"
        return f"{self._parent}[{quoted(self._key)}]"

    def error(self, what: str, way: str = "") -> CellError:
        """Return the error of a template that prints this value, with advice."""
        at = "" if self._parent is None else f" at `{self}`"
        if what in _WAYS:
            way = f"{{{{ {self}{_WAYS[what]}"
        message = f"column `{self.column}` is {what}{at}{': ' * bool(way)}{way}"
        return CellError(message, self.column)


class _Unprinted:
    """A value that raises CellFailed when a template converts it to text."""

    __slots__ = ()
    path: Path | None
    what: str
    way = ""

    def __str__(self) -> str:
        if self.path is None:
            raise CellFailed(
                CellError(f"it prints `{ROW}`: {{{{ {ROW} | tojson }}}} prints it", None)
            )
        raise CellFailed(self.path.error(self.what, self.way))


class List(_Unprinted, list[Any]):
    """A list in a cell."""

    __slots__ = ("path",)
    what = "a list"

    def __init__(self, values: list[Any], path: Path) -> None:
        super().__init__(values)
        self.path = path


class Struct(_Unprinted, dict[str, Any]):
    """A struct in a cell, or all cells of a row; its fields are attributes."""

    __slots__ = ("path",)
    what = "a struct"

    def __init__(
        self, values: Mapping[str, Any] | Iterable[tuple[str, Any]], path: Path | None
    ) -> None:
        super().__init__(values)
        self.path = path


class Unreadable(_Unprinted):
    """A cell without a text, such as bytes."""

    def __init__(self, cell: NoText, path: Path) -> None:
        self.what, self.way = cell
        self.path = path


class Null(StrictUndefined):
    """A null cell in a template: false, replaced by `default`, and an error if printed."""

    __slots__ = ()

    def __init__(self, path: Path) -> None:
        def failed(_: str) -> CellFailed:
            return CellFailed(path.error("null"))

        super().__init__(name=path.column, exc=failed)  # type: ignore[arg-type]

    def __bool__(self) -> bool:  # type: ignore[override]
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return other is None or isinstance(other, Null)

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(None)


class Method:
    """A method of a value, which a template may call but not print."""

    __slots__ = ("_function",)

    def __init__(self, function: MethodType | BuiltinMethodType) -> None:
        self._function = function

    @property
    def __self__(self) -> object:
        return self._function.__self__

    @property
    def __name__(self) -> str:
        return self._function.__name__

    def __call__(self, *args: Any, **names: Any) -> Any:
        """Call the method."""
        return self._function(*args, **names)

    def __str__(self) -> str:
        name = self.__name__
        raise CellFailed(CellError(f"`{name}` is a method: use {name}() to call it", None))


class _TextCode(CountingCode):
    """Compiles a template so that `~` prints its operands like `{{ }}`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.join_text((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class TextSandbox(Sandbox):
    """A sandbox whose variables are cells; it prints only texts and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.code_generator_class = _TextCode
        self.undefined = StrictUndefined
        self.finalize = _printed
        self.tests["none"] = lambda value: value is None or isinstance(value, Null)
        self._print_json = self.filters["tojson"]
        self.filters["tojson"] = self._to_json

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a field of a struct, or an attribute of another value."""
        if not isinstance(obj, Struct):
            return _wrapped(super().getattr(obj, attribute))
        return obj[attribute] if attribute in obj else self._no_field(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return a field of a struct, an element of a list, or an attribute."""
        if not isinstance(obj, Struct):
            return _wrapped(super().getitem(obj, argument))
        is_field = isinstance(argument, str) and argument in obj
        return obj[argument] if is_field else self._no_field(obj, argument)

    def _no_field(self, obj: Struct, name: Any) -> Any:
        """Return a method that reads a struct, otherwise an undefined value."""
        if name in _READ_METHODS:
            return _wrapped(super().getattr(obj, name))
        message = f"`{obj.path or ROW}` has no `{name}`{suggestion(str(name), [*obj])}"
        error = CellError(message, obj.path.column if obj.path else None)
        return self.undefined(message, obj, name, lambda _: CellFailed(error))  # type: ignore[arg-type]

    def join_text(self, values: Iterable[Any]) -> str:
        """Return the text of `~`, which prints its operands."""
        return "".join([value if type(value) is str else str(_printed(value)) for value in values])

    def _to_json(self, value: Any, *args: Any, **names: Any) -> Any:
        try:
            text = self._print_json(value, *args, **names)
        except TypeError:
            text = "NaN"  # it contains a null or a decimal
        if "NaN" in text or "Infinity" in text:
            text = self._print_json(_json_value(value), *args, **names)
        return text


def variable(value: Any, path: Path) -> Any:
    """Return a cell, or a value inside one, for templates."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = {*map(type, value)}
        if not (kinds <= _PLAIN or (kinds == {float} and not isnan(sum(value)))):
            value = [variable(item, Path(place, path)) for place, item in enumerate(value)]
        return List(value, path)
    if isinstance(value, dict):
        return Struct(
            {name: variable(item, Path(name, path)) for name, item in value.items()}, path
        )
    if isinstance(value, NoText):
        return Unreadable(value, path)
    return Null(path) if is_null(value) else value


def row_variable(cells: Mapping[str, Any], names: Sequence[str]) -> Struct:
    """Return the variable `row` with some cells."""
    return Struct(((name, cells[name]) for name in names), None)


def text_of(value: Any, column: str) -> str:
    """Return the text that `{{ column }}` prints for a cell; raises CellError if it has none."""
    if isinstance(value, str):
        return value
    if isinstance(value, NoText):
        raise Path(column).error(*value)
    if is_null(value) or isinstance(value, (list, dict)):
        raise Path(column).error(kind_of(value))
    return str(value)


def body_value(value: Any, column: str) -> Any:
    """Return a cell as a value of the body, without null fields, which every struct has.

    Raises CellError for bytes inside it.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {name: body_value(item, column) for name, item in value.items() if not is_null(item)}
    if isinstance(value, list):
        return [body_value(item, column) for item in value]
    if isinstance(value, NoText):
        raise Path(column).error(f"{value.what} inside", value.way)
    return None if is_null(value) else value


def is_null(value: Any) -> bool:
    """Say whether a cell is null, or NaN, which pandas uses for null."""
    return value is None or value != value  # noqa: PLR0124 - NaN alone differs from itself


def kind_of(value: Any) -> str:
    """Return the kind of a cell in words."""
    if isinstance(value, NoText):
        return value.what
    return "null" if is_null(value) else _KINDS.get(type(value), f"a {type(value).__name__}")


def with_single_quotes(message: str) -> str:
    """Return a message whose advice on templates has single quotes, for a recipe file.

    Templates are in double quotes there. Names with a quote or a backslash stay as they are.
    """
    return _ADVICE.sub(lambda found: found[0].replace('"', "'"), message)


def _printed(value: Any) -> Any:
    """Return a value that a template prints; raises CellFailed for one without a text."""
    if isinstance(value, _PRINTED):
        return value
    if isinstance(value, (_Unprinted, StrictUndefined, Method)):
        return str(value)
    raise CellFailed(CellError(f"it prints {kind_of(value)}, which is not a text", None))


def _wrapped(found: Any) -> Any:
    return Method(found) if isinstance(found, (MethodType, BuiltinMethodType)) else found


def _json_value(value: Any) -> Any:
    """Return a value as JSON: a decimal as text; a null, NaN or infinity as null."""
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Null):
        return None
    if isinstance(value, (_Unprinted, StrictUndefined, Method)):
        return str(value)
    return value
