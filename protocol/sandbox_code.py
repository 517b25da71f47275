"""Compilation of templates with the counting of `sandbox`."""

# ruff: noqa: N802 - a visitor's methods are named after Jinja's nodes

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

CHARS_PER_STEP = 1024
_FEW = 4
# Filters that compare the items of a list with each other.
_COMPARING = frozenset({"groupby", "max", "min", "sort", "unique"})
_COMPARING_TESTS = frozenset({"eq", "equalto", "ne", "in", "lt", "le", "gt", "ge"})
# Filter names that no template can contain; their code is called directly.
TURN, READ, COMPARED, MADE, COPIED = "a turn", "a read", "a comparison", "a result", "a copy"
_OWN = frozenset({TURN, READ, COMPARED, MADE, COPIED})


class Generation(Extension):
    """`{% generation %}` marks an assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body in a separate scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class CountingCode(CodeGenerator):
    """Compiles a template with counting calls."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Write the code of a template."""
        super().visit_Template(_Counting().visit(node), frame)


class _Counting(NodeTransformer):
    """Inserts a call into each loop, and around each expression that may lengthen a text."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        turn = _call_filter(TURN, nodes.Const(1))
        if node.test is not None:  # an iteration without the body
            node.test = nodes.And(turn, node.test)
        if node.recursive:
            _charge_texts(node)
        node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        if len(node.nodes) > _FEW:
            node.nodes = [_charged(COPIED, operand) for operand in node.nodes]
        return _call_filter(COPIED, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._visit_container(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._visit_container(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._visit_container(node, [pair.value for pair in node.items])

    def _visit_container(self, node: nodes.Expr, values: Sequence[nodes.Expr]) -> nodes.Node:
        self.generic_visit(node)
        is_plain = all(isinstance(value, nodes.Const) for value in values)
        return node if is_plain else _call_filter(COMPARED, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        is_copy = isinstance(node.arg, nodes.Slice) and node.ctx == "load"
        return _call_filter(COPIED, node) if is_copy else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Charge the compared values, unless one side is a constant that bounds the comparison."""
        self.generic_visit(node)
        others = [operand.expr for operand in node.ops]
        is_short = any(isinstance(each, nodes.Const) for each in (node.expr, *others[:1]))
        for operand in node.ops:
            if operand.op in {"in", "notin"} or not is_short:
                operand.expr = _charged(COMPARED, operand.expr)
        if not is_short and node.ops[0].op not in {"in", "notin"}:
            node.expr = _charged(COMPARED, node.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.name in _COMPARING_TESTS:
            node.node = _charged(COMPARED, node.node)
            node.args = [_charged(COMPARED, value) for value in node.args]
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is not None:
            node.node = _charged(COMPARED if node.name in _COMPARING else READ, node.node)
        node.args = [_charged(READ, value) for value in node.args]
        for pair in node.kwargs:
            pair.value = _charged(READ, pair.value)
        return _call_filter(MADE, node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._visit_block(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._visit_block(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._visit_block(node)

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
        paid = nodes.ExprStmt(_call_filter(MADE, value)).set_lineno(node.lineno)
        return [self._visit_all_but_filter(node), paid]

    def _visit_all_but_filter(self, node: nodes.FilterBlock | nodes.AssignBlock) -> nodes.Node:
        """Visit a block without its filter, which has no value; the result is charged later."""
        block_filter, node.filter = node.filter, None
        self._visit_block(node)
        node.filter = block_filter
        return node

    def _visit_block(self, node: nodes.Node) -> nodes.Node:
        """Visit a block whose texts are joined at its end, and charge each text before."""
        self.generic_visit(node)
        _charge_texts(node)
        return node


def _call_filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


def _charged(name: str, value: nodes.Expr) -> nodes.Expr:
    """Return a value that is charged if it may be long."""
    is_charged = isinstance(value, nodes.Filter) and value.name in _OWN
    return value if is_charged or isinstance(value, nodes.Const) else _call_filter(name, value)


def _charge_texts(block: nodes.Node) -> None:
    """Charge each text of a block whose texts are joined at its end."""
    for output in block.find_all(nodes.Output):
        output.nodes = [_charged_text(text) for text in output.nodes]


def _charged_text(value: nodes.Expr) -> nodes.Expr:
    """Return a text in a block that is charged whenever it is printed, unless it is short."""
    if isinstance(value, nodes.TemplateData) and len(value.data) < CHARS_PER_STEP:
        return value
    is_charged = isinstance(value, nodes.Filter) and value.name in _OWN
    return value if is_charged else _call_filter(COPIED, value)
