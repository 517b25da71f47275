"""GBNF grammars: their meaning, checked by a parser without masks, and their errors."""

from __future__ import annotations

from itertools import product

import pytest
from lark import Lark, UnexpectedInput

from tests.engine.structured_output.constrained import constraint_of, lets_through
from tidemill.engine.structured_output.gbnf import MAX_NESTING, GrammarError, is_gbnf, lark_of

ARITHMETIC = """
# llama.cpp's example, from its documentation
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*   # left to right
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
# The same language with overlapping lexemes, in another parser's syntax.
SAME = r"""
start: (expr "=" ws term "\n")+
expr: term (/[-+*\/]/ term)*
term: ident | num | "(" ws expr ")" ws
ident: /[a-z]/ /[a-z0-9_]/* ws
num: /[0-9]/+ ws
ws: /[ \t\n]/*
"""


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= w " " w\nw ::= [a-z ]+', ["a b", "a b c d"], ["ab", "a "]),
        ('root ::= "a" | "b" |\n  "c" # end', ["a", "b", "c"], ["d", ""]),
        (r'root ::= "\x41\u00e9\n\t\"\\\U0001F642"', ['Aé\n\t"\\🙂'], ["Aé"]),
        (r"root ::= [\]\-^a] [^\]x-z] .", ["]a\n", "-é🙂", "^ z"], ["b  ", "a] ", "ay."]),
        (r"root ::= [-a] [a-] [a\-c]", ["--a", "aac", "-a-"], ["aab"]),
        (
            'root ::= ("a" | b){2,3} "c"{2} d{0,1} e{1,}\nb ::= "b"\nd ::= "d"\ne ::= "e"',
            ["abcce", "abaccdee"],
            ["acce", "abce", "abcc"],
        ),
        ('root ::= "x"? ("y" | )* [z]*', ["", "x", "yyzz", "xyz"], ["zx"]),
        ('root ::= item-1 item_2\nitem-1 ::= "1"\nitem_2::="2"', ["12"], ["1", "21"]),
        ('root ::= "(" root ")" | root root | "a"', ["a", "(a)a", "((aa))"], ["(a", ""]),
        ('Root ::= "r"\nroot ::= Root Root', ["rr"], ["r"]),
    ],
    ids=range(10),
)
def test_a_rule_matches_exactly_its_texts(source: str, good: list[str], bad: list[str]) -> None:
    """The division of a text among the rule's parts does not matter."""
    wanted = constraint_of("grammar", source)
    assert [text for text in good if not lets_through(wanted, text)] == []
    assert [text for text in bad if lets_through(wanted, text)] == []


def test_short_texts_are_allowed_exactly_if_another_parser_accepts_them() -> None:
    """The texts have up to four characters from overlapping parts; some are longer."""
    parser = Lark(SAME, parser="earley", lexer="dynamic_complete")
    wanted = constraint_of("grammar", ARITHMETIC)
    texts = ["".join(chars) for n in range(5) for chars in product("a1=\n(", repeat=n)]
    texts += [
        "a+1=a\n",
        "a =1 \n",
        "(a)=1\n",
        "(a=1)\n",
        "a=1\na=1\n",
        "a==1\n",
        "a=1+1\n",
        "a=(a+1)\n",
    ]
    for text in texts:
        try:
            parser.parse(text)
        except UnexpectedInput:
            is_one = False
        else:
            is_one = True
        assert lets_through(wanted, text) == is_one, text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('x ::= "a"', "rule `root`"),
        ("root ::= y", "rule `y` is not defined; line 1, column 10"),
        ('root ::= "a"\nroot ::= "b"', "is defined twice; line 2, column 1"),
        ('root ::= "a', "line 1, column 10"),
        ('root ::= "a\nb"', "line 1, column 10"),
        ("root ::= [a", "line 1, column 10"),
        ("root ::= []", "class is empty"),
        ("root ::= [z-a]", "ends before it begins"),
        ('root ::= ("a"', "expected `)`"),
        ('root ::= "a" )', "expected a rule"),
        ('root ::= "a"**', "repetition is repeated"),
        ('root ::= "a"{2}?', "repetition is repeated"),
        (r'root ::= "\q"', "not a valid escape"),
        (r'root ::= "\ud800"', "not a valid code point"),
        (r'root ::= "\uzzzz"', "not a valid code point"),
        (r'root ::= "\UFFFFFFFF"', "not a valid code point"),
        ('root ::= (= "a")', "column 11"),
        ('root ::= "a" ; x ::= "b"', "column 14"),
        ('root ::= "a"{9999999999}', "column 13"),
        (
            "root ::= " + "(" * (MAX_NESTING + 1) + '"a"' + ")" * (MAX_NESTING + 1),
            "nested more than",
        ),
    ],
    ids=range(20),
)
def test_errors_name_their_place(source: str, words: str) -> None:
    """The place is a line and a column."""
    with pytest.raises(GrammarError) as caught:
        lark_of(source)
    assert words in str(caught.value)


def test_long_sources_are_read_in_linear_time() -> None:
    """No part is read repeatedly."""
    for source in ("#" * 300_000, "\n" * 300_000, '"' + "a" * 300_000, "a" * 300_000):
        with pytest.raises(GrammarError):
            lark_of(source)
    assert lark_of('root ::= "' + "a" * 300_000 + '"')
    assert lark_of("root ::= [" + "a" * 200_000 + "]" + "\n# x\n" * 100_000)


def test_the_assignment_operator_reveals_the_syntax() -> None:
    """Lark uses another operator."""
    assert is_gbnf("root ::= x")
    assert not is_gbnf("start: x")
