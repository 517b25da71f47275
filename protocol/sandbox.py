"""Jinja sandbox for chat templates with a bound on every rendering.

Jinja's own sandbox isolates the interpreter, but lets a template nest loops, call macros of
macros and double a text without limit. Here each loop iteration and each call is a step, and so is
each kibibyte of text; a rendering has a limited number of steps. They are steps, not seconds, so
that a line renders or fails alike on any machine. Results whose length follows from the arguments
are measured before they are created (`template_sizes`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import wraps
from itertools import islice
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from .sandbox_code import (
    CHARS_PER_STEP,
    COMPARED,
    COPIED,
    MADE,
    READ,
    TURN,
    CountingCode,
    Generation,
)
from .template_sizes import FILTERS, METHODS, Size, field_size, formatted, weight_of

MAX_STEPS = 250_000
MAX_TEXT_CHARS = 64 * 2**20

_CHARS_READ_PER_STEP = 2**14
_ITEMS_PER_STEP = 64
_MAX_ITEMS = 2**21
_MAX_FIELD_CHARS = 256
_MAX_POWER_BITS = 4096
_MAX_PRODUCT_BITS = 2**16
# Filters with results of any length that no model's template needs.
_REMOVED = ("pprint", "urlize", "xmlattr")
_REMOVED_METHODS = frozenset({"encode", "maketrans", "to_bytes", "translate"})


class TemplateEndless(TemplateError):
    """A rendering exceeded its limit of steps or of text."""


class _StepsLeft(threading.local):
    """Steps left of this thread's rendering."""

    steps = 0


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates and renders them; several threads may render at the same time."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        self.code_generator_class = CountingCode
        self.filters["tojson"] = _to_json
        for name in _REMOVED:
            del self.filters[name]
        for name, size in FILTERS.items():
            self.filters[name] = _measured(self.filters[name], size)
        self.filters["format"] = self._format
        self.filters["join"] = self._join
        self.filters["list"] = _list
        self.filters |= {
            TURN: self.charge_turn,
            READ: self.charge_operand,
            COMPARED: self.charge_whole,
            MADE: self.charge_result,
            COPIED: self.charge_copy,
        }
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]  # makes any amount of text in one step
        # Jinja's own ones give a template a class, and Python's internal names.
        self.globals["dict"] = _new_dict
        self.globals["namespace"] = _Names
        self._left = _StepsLeft()

    def compile_template(self, source: str | nodes.Template) -> Callable[..., str]:
        """Return a function that renders a template with its variables."""
        template = self.from_string(source)

        def render(**variables: Any) -> str:
            self._left.steps = MAX_STEPS
            pieces, size = [], 0
            for piece in template.generate(variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
            return "".join(pieces)

        return render

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Say whether a template may read an attribute: not a method without a size limit."""
        return attr not in _REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, callee: Any, /, *args: Any, **names: Any) -> Any:
        """Call a function for a template; costs a step, and the size of its arguments."""
        self.spend(1 + len(args) // _ITEMS_PER_STEP)
        given = _given(names) if names else names
        owner = getattr(callee, "__self__", None)
        if isinstance(owner, (str, int, list, tuple)):
            self.charge_operand(owner)
            name = getattr(callee, "__name__", "")
            if name == "join" and len(args) == 1:
                args = (args[0] if isinstance(args[0], str) else _list(args[0]),)
            if (size := METHODS.get(name)) is not None:
                _check_size(size(owner, *args, **given))
        for value in (*args, *given.values()):
            self.charge_whole(value)
        return self.charge_result(super().call(context, callee, *args, **names))

    def call_filter(
        self, name: str, value: Any, args: Sequence[Any] | None = None, *more: Any, **names: Any
    ) -> Any:
        """Apply a filter of `map` to an item; costs a step, and the size of the result."""
        self.spend(1)
        return self.charge_result(super().call_filter(name, value, args, *more, **names))

    def call_test(
        self, name: str, value: Any, args: Sequence[Any] | None = None, *more: Any, **names: Any
    ) -> bool:
        """Apply a test of `select` to an item; costs a step, and the size of what it reads."""
        self.spend(1)
        if args:
            self.charge_operand(value)
            for argument in args:
                self.charge_operand(argument)
        return bool(super().call_test(name, value, args, *more, **names))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator unless its result would be too large."""
        if operator != "+":
            _check_operator(operator, left, right)
        return self.charge_result(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a method `format` whose fields are measured; None for another value."""
        if super().wrap_str_format(value) is None:
            return None
        text, form = value.__self__, _Formatter(self)
        if value.__name__ == "format":
            return lambda *args, **names: form.vformat(text, args, names)
        return lambda names: form.vformat(text, (), names)

    def spend(self, steps: int) -> None:
        """Subtract steps from the rendering's remaining ones."""
        left = self._left
        left.steps -= steps
        if left.steps < 0:
            raise TemplateEndless(f"it takes more than {MAX_STEPS:,} steps and may never end")

    def charge_turn(self, steps: int) -> bool:
        """Charge a loop iteration, and return True for a loop with a condition."""
        self.spend(steps)
        return True

    def charge_operand(self, value: Any) -> Any:
        """Return a filter's argument after charging the steps to read it."""
        if isinstance(value, str):
            self.spend(len(value) // _CHARS_READ_PER_STEP)
        elif isinstance(value, (list, tuple, dict, range)):
            self.spend(len(value) // _ITEMS_PER_STEP)
        return value

    def charge_whole(self, value: Any) -> Any:
        """Return a value after charging the steps to read it with its contents."""
        if isinstance(value, (list, tuple, dict)):
            weight = weight_of(value, MAX_TEXT_CHARS)
            _check_size(weight)
            self.spend(int(weight) // _CHARS_READ_PER_STEP)
        return self.charge_operand(value)

    def charge_copy(self, value: Any) -> Any:
        """Return a part of a value after charging the steps to copy it."""
        if isinstance(value, str):
            _check_size(len(value))
            self.spend(len(value) // CHARS_PER_STEP)
        elif isinstance(value, (list, tuple)):
            _check_items(len(value))
            self.spend(len(value) // _ITEMS_PER_STEP)
        return value

    def charge_result(self, value: Any) -> Any:
        """Return a template's value after charging its size, including its contents."""
        if type(value) is str and len(value) < CHARS_PER_STEP:
            return value
        if isinstance(value, (list, tuple, dict)):
            self.charge_whole(value)
        return self.charge_copy(value)

    def _format(self, text: Any, /, *args: Any, **names: Any) -> str:
        """Return `text % args`, as Jinja's filter `format` does."""
        if args and names:
            raise TemplateError("`format` takes named or positional arguments, not both")
        values = names or args
        _check_size(formatted(str(text), values, MAX_TEXT_CHARS))
        return str(text) % values

    def _join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        """Return the joined texts of a list, as Jinja's filter `join` does."""
        separator, size, texts = str(d), 0, []
        read = None if attribute is None else make_attrgetter(self, attribute)
        for number, item in enumerate(value):
            texts.append(str(item if read is None else read(item)))
            size += len(texts[-1]) + len(separator) * (number > 0)
            _check_size(size)
            _check_items(number)
        return separator.join(texts)


class _Formatter(SandboxedFormatter):
    """Formats the fields of a text, and charges the size of each first."""

    _env: Sandbox

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Return the text of a field."""
        _check_size(field_size(format_spec))
        return self._env.charge_result(super().format_field(value, format_spec))


class _Names(Namespace):
    """A template's `namespace(…)`, whose names must not begin with an underscore."""

    def __init__(*args: Any, **names: Any) -> None:  # a name may be `self`
        self, *given = args
        for name in (taken := dict(*given, **names)):
            _check_name(name)
        Namespace.__init__(self, taken)

    def __repr__(self) -> str:
        """Return no values: one that is in many namespaces would be printed many times."""
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def strftime_at(created: int) -> Callable[[str], str]:
    """Return a rendering's `strftime_now`: its date is that of `created`, not today's."""
    now = datetime.fromtimestamp(created, UTC)

    def strftime(form: str) -> str:
        _check_size(len(form) * _MAX_FIELD_CHARS)
        return now.strftime(form)

    return strftime


def _measured(function: Callable[..., Any], size: Size) -> Callable[..., Any]:
    """Return a filter that refuses arguments with a result that is too long."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def apply(*args: Any, **names: Any) -> Any:
        _check_size(size(*args[first:], **names))
        return function(*args, **names)

    return apply


def _list(value: Any) -> list[Any]:
    """Return the items of a value, as Jinja's filter `list` does."""
    items = list(islice(value, _MAX_ITEMS + 1))
    _check_items(len(items))
    return items


def _given(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's named arguments, without those that Jinja adds."""
    return {name: value for name, value in names.items() if name[:1] != "_"}


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateEndless for operands whose result would be too large."""
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str) and isinstance(times, int):
                _check_size(len(many) * times)
            elif isinstance(many, (list, tuple)) and isinstance(times, int):
                _check_items(len(many) * times)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            _check_size(0 if bits <= _MAX_PRODUCT_BITS else None)
    elif operator == "%" and isinstance(left, str):
        _check_size(formatted(left, right, MAX_TEXT_CHARS))
    elif operator == "**" and isinstance(right, int) and not isinstance(left, float):
        bits = left.bit_length() if isinstance(left, int) else 1
        _check_size(0 if bits * abs(right) <= _MAX_POWER_BITS else None)


def _check_size(size: float | None) -> None:
    if size is None or size > MAX_TEXT_CHARS:
        raise TemplateEndless(f"it makes a value of more than {MAX_TEXT_CHARS:,} characters")


def _check_items(number: int) -> None:
    if number > _MAX_ITEMS:
        raise TemplateEndless(f"it makes a list of more than {_MAX_ITEMS:,} items")


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace does not support the name {name!r}")


def _new_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Print plain JSON: Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
