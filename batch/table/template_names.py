"""Template names: the columns that a template reads, including those with a name of Jinja's.

A column takes precedence over Jinja's own name. If it cannot, the template is refused, and the
message shows how to write the column, as `row["true"]`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Final

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.meta import TrackingCodeGenerator

from ..column_spelling import ROW, expression_of, spelling_of
from .errors import RecipeError
from .recipe import nearest, suggestion

_CONSTANTS: Final = frozenset({"true", "false", "none", "True", "False", "None"})
_RENAMED: Final = ("self", "super")
"""Names that Jinja defines in each template that uses them."""
_OF_MACROS: Final = frozenset({"caller", "kwargs", "varargs"})
_LOOP: Final = "loop"
_PRINTED: Final = re.compile(r"\{\{([^{}|\"']*)")
"""The text after `{{`, up to a filter or a quote."""
_MAX_HINTS: Final = 20
_BEFORE_NAMES: Final = (".", "|", "is", "is not")
"""Tokens before a name that is not a value: before attributes, filters and tests."""


def check_constants(
    environment: Environment, source: str, columns: Collection[str], where: str
) -> None:
    """Raise RecipeError for a Jinja constant that is also a column."""
    names = _CONSTANTS.intersection(columns)
    if not names:
        return
    tokens = [
        (kind, text)
        for _, kind, text in environment.lex(source)
        if kind not in {"whitespace", "comment"}
    ]
    before = ""
    for (kind, text), (_, after) in pairwise([*tokens, ("", "")]):
        if kind == "name" and text in names and before not in _BEFORE_NAMES and after != "=":
            raise _reserved(text, where, columns, "is a Jinja constant")
        before = f"{before} {text}" if (before, text) == ("is", "not") else text


def column_hint(name: str, columns: Sequence[str]) -> str:
    """Return how to write the column with a name like this one; empty without one."""
    found = nearest(name, columns)
    if found is None or spelling_of(found) == found or ROW in columns:
        return suggestion(name, columns)
    return f": write {expression_of(found)}"


def syntax_hint(environment: Environment, source: str, columns: Sequence[str]) -> str:
    """Return how to write a column whose name Jinja cannot parse."""
    for found in islice(_PRINTED.finditer(source), _MAX_HINTS):
        text = found[1].strip("-+ \t\n").partition(" or ")[0].rstrip(" -+")
        if text and not text.isidentifier() and (hint := column_hint(text, columns)):
            return hint
    try:
        tokens = [(kind, text) for _, kind, text in environment.lex(source)]
    except TemplateSyntaxError:
        return ""
    is_named = "not" in columns and ("name", "not") in tokens
    return f" (the column is {expression_of('not')})" if is_named else ""


def rename_own(
    tree: nodes.Template, columns: Collection[str], where: str
) -> tuple[nodes.Template, dict[str, str]]:
    """Rename the columns whose names Jinja defines itself; return them by their new names.

    Raises RecipeError for a name that is ambiguous.
    """
    _check_loops(tree, columns, where)
    for macro in tree.find_all((nodes.Macro, nodes.CallBlock)):
        for name in macro.find_all(nodes.Name):
            if name.name in _OF_MACROS.intersection(columns):
                raise _reserved(name.name, where, columns, "is Jinja's own in a macro")
    renamed = {}
    for name in tree.find_all(nodes.Name):
        if name.name in _RENAMED and name.name in columns and name.ctx == "load":
            free = f"_{name.name}"
            while free in columns:
                free = f"_{free}"
            renamed[free] = name.name
            name.name = free
    return tree, renamed


def names_in(tree: nodes.Template, columns: Collection[str]) -> dict[str, None]:
    """Return the names that a template does not define itself, columns first."""
    # Jinja treats its own names, such as `range`, as declared; a column takes precedence.
    own = {name.name for name in tree.find_all(nodes.Name) if name.name in columns}
    assert tree.environment is not None
    names = _UndeclaredNames(tree.environment)
    names.visit(tree)
    return dict.fromkeys(sorted(names.undeclared_identifiers | own))


def cells_of_row(tree: nodes.Template) -> Sequence[str] | None:
    """Return the names in `row["…"]`; None where `row` is used otherwise."""
    names = []
    cells: list[Any] = [*tree.find_all(nodes.Getitem), *tree.find_all(nodes.Getattr)]
    for item in cells:
        if isinstance(item.node, nodes.Name) and item.node.name == ROW:
            key = item.attr if isinstance(item, nodes.Getattr) else None
            if isinstance(item, nodes.Getitem) and isinstance(item.arg, nodes.Const):
                key = item.arg.value
            if not isinstance(key, str):
                return None
            names.append(key)
    uses = sum(name.name == ROW for name in tree.find_all(nodes.Name))
    return names if len(names) == uses else None


class _UndeclaredNames(TrackingCodeGenerator):
    """Collects names without computing constants, which Jinja's generator does without limit."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.optimizer = None

    def _output_child_to_const(self, *_: Any, **__: Any) -> str:
        raise nodes.Impossible


def _check_loops(tree: nodes.Template, columns: Collection[str], where: str) -> None:
    """Raise RecipeError for a `loop` inside a loop that may mean the column."""
    if _LOOP not in columns:
        return
    for block in tree.find_all(nodes.For):
        for parent in _nodes_below(block):
            is_own = isinstance(parent, (nodes.Getattr, nodes.Getitem, nodes.Call))
            for child in parent.iter_child_nodes():
                if isinstance(child, nodes.Name) and child.name == _LOOP and not is_own:
                    raise _reserved(_LOOP, where, columns, "is Jinja's own inside a `for`")


def _nodes_below(node: nodes.Node) -> Iterator[nodes.Node]:
    for child in node.iter_child_nodes():
        yield child
        yield from _nodes_below(child)


def _reserved(name: str, where: str, columns: Collection[str], reason: str) -> RecipeError:
    advice = f"write {expression_of(name)} for the column"
    if ROW in columns:
        advice = "rename the column"
    return RecipeError(f"{where} has `{name}`, which {reason} and also a column: {advice}")
