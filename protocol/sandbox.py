"""Jinja sandbox for chat templates, in which no rendering runs without end.

Jinja's own sandbox keeps a template from the interpreter, but lets it nest loops, call macros of
macros and double a text without limit. Here each iteration of a loop and each call is a step, and
so is each kibibyte of text; a rendering has a limited number of steps. Steps, not seconds: a line
renders alike on any machine, or fails alike.
"""

# ruff: noqa: N802 - a visitor's methods are named after Jinja's nodes

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 250_000
MAX_TEXT_CHARS = 64 * 2**20

_CHARS_PER_STEP = 1024
_CHARS_READ_PER_STEP = 2**14
_MAX_POWER_BITS = 4096


class TemplateEndless(TemplateError):
    """A rendering exceeded its limit of steps or of text."""


class _StepsLeft(threading.local):
    """Steps left of this thread's rendering."""

    steps = 0


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates and renders them; any number of threads may render, each by itself."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.code_generator_class = CountingCode
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]  # makes any amount of text in one step
        # Jinja's own give a template a class, and names that Python keeps to itself.
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

    def call(self, context: Context, callee: Any, /, *args: Any, **names: Any) -> Any:
        """Call a function for a template; costs a step, and the size of its arguments."""
        self.spend(1)
        owner = getattr(callee, "__self__", None)
        for value in (owner, *args, *names.values()):
            self.charge_operand(value, is_size=isinstance(owner, (str, bytes, int, list, tuple)))
        return self.charge_result(super().call(context, callee, *args, **names))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator unless its result would be too large."""
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                    _check_size(len(many) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(0 if left.bit_length() * right <= _MAX_POWER_BITS else None)
        return self.charge_result(super().call_binop(context, operator, left, right))

    def spend(self, steps: int) -> None:
        """Subtract steps from those that the rendering has left."""
        left = self._left
        left.steps -= steps
        if left.steps < 0:
            raise TemplateEndless(f"it takes more than {MAX_STEPS:,} steps and may never end")

    def charge_operand(self, value: Any, *, is_size: bool = True) -> Any:
        """Return an argument of a filter or a call: text costs steps, sizes are limited."""
        if isinstance(value, (str, list, tuple, dict)):
            self.spend(len(value) // _CHARS_READ_PER_STEP)
        elif is_size and isinstance(value, int):
            _check_size(abs(value))
        return value

    def charge_result(self, value: Any) -> Any:
        """Return a template's value, once its size is charged."""
        if isinstance(value, (str, list, tuple)):
            _check_size(len(value))
            self.spend(len(value) // _CHARS_PER_STEP)
        return value


class CountingCode(CodeGenerator):
    """Compiles a template with the counting put in."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Write the code of a template."""
        super().visit_Template(_Counting().visit(node), frame)


class _Counting(NodeTransformer):
    """Puts a call into each loop, and around each expression that may make a text larger."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        turn = nodes.Call(nodes.EnvironmentAttribute("spend"), [nodes.Const(0)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _weighed(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is not None:
            is_no_size = nodes.Keyword("is_size", nodes.Const(False))  # noqa: FBT003 - a template's
            node.node = _asked_of("charge_operand", node.node, is_no_size)
        node.args = [_asked_of("charge_operand", value) for value in node.args]
        for pair in node.kwargs:
            pair.value = _asked_of("charge_operand", pair.value)
        return _weighed(node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:
        return self._visit_all_but_filter(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> list[nodes.Node]:
        target = node.target
        value: nodes.Expr
        if isinstance(target, nodes.NSRef):
            value = nodes.Getattr(nodes.Name(target.name, "load"), target.attr, "load")
        else:
            assert isinstance(target, nodes.Name)
            value = nodes.Name(target.name, "load")
        paid = nodes.ExprStmt(_weighed(value)).set_lineno(node.lineno)
        return [self._visit_all_but_filter(node), paid]

    def _visit_all_but_filter(self, node: nodes.FilterBlock | nodes.AssignBlock) -> nodes.Node:
        """Visit a block without its filter, which has no value; the result is charged later."""
        kept, node.filter = node.filter, None
        self.generic_visit(node)
        node.filter = kept
        return node


class _Names(Namespace):
    """A template's `namespace(…)`, whose names do not begin with an underscore."""

    def __init__(*args: Any, **names: Any) -> None:  # a name may be `self`
        self, *given = args
        for name in (taken := dict(*given, **names)):
            _check_name(name)
        Namespace.__init__(self, taken)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def strftime_at(created: int) -> Callable[[str], str]:
    """Return `strftime_now` of a rendering: the date is that of `created`, not of today."""
    now = datetime.fromtimestamp(created, UTC)
    return now.strftime


def _weighed(value: nodes.Expr) -> nodes.Call:
    return _asked_of("charge_result", value)


def _asked_of(name: str, value: nodes.Expr, *named: nodes.Keyword) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [value], list(named), None, None)


def _check_size(size: int | None) -> None:
    if size is None or size > MAX_TEXT_CHARS:
        raise TemplateEndless(f"it makes a value of more than {MAX_TEXT_CHARS:,} characters")


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name like {name!r}")


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
