"""Constraints as masks of tokens: the allowed texts, and how an output ends."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from tests.engine.scripted_model import sentencepiece_tokenizer, text_model_of
from tests.engine.structured_output.constrained import (
    GRAMMARS,
    MODEL,
    allowed,
    constraint_of,
    grammars_of,
    ids_of,
    lets_through,
)
from tidemill.engine.structured_output import grammar
from tidemill.engine.structured_output import grammar_backend as module
from tidemill.engine.structured_output.compiler import Compiled, compiled
from tidemill.engine.structured_output.grammar_backend import GrammarBackend
from tidemill.engine.structured_output.vocabulary import grammar_vocabulary
from tidemill.engine.text.text_model import TextModel
from tidemill.protocol.constraints.request import Kind
from tidemill.protocol.constraints.schemas import SchemaRules, served_schema
from tidemill.protocol.errors import RequestError

LIST = {"type": "array", "items": {"enum": ["a", "é\n", 3, None]}, "minItems": 1}


@pytest.fixture(scope="module")
def sentencepiece() -> TextModel:
    """Return the text side of a model with a vocabulary like Llama 2's."""
    return text_model_of(sentencepiece_tokenizer())


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        (
            "json_schema",
            LIST,
            ['["a"]', '["a", 3,\n  null]'],
            ["[]", '["a"] ', '["b"]', '["a",  3]'],
        ),
        ("json_schema", {}, ["1", '{"a": [true]}', '"x"'], ["", "tru", "{a: 1}"]),
        ("regex", r"a+(b|é)\d?", ["ab", "aaé7"], ["b", "ab77", "aé "]),
        ("regex", "", [""], ["a"]),
        ("choice", ["Paris", "Pa", 'é"\\\n'], ["Paris", "Pa", 'é"\\\n'], ["P", "Par", "Paris "]),
        ("lark", 'start: "a" x\nx: /[0-9]/ | "(" x ")"', ["a1", "a((2))"], ["a", "a((2)"]),
        ("grammar", 'start: "::" ', ["::"], [":"]),
        ("grammar", 'root ::= "a" x\nx ::= [0-9] | "(" x ")"', ["a1", "a((2))"], ["a((2)"]),
    ],
    ids=range(8),
)
def test_matching_texts_are_allowed_and_others_are_not(
    kind: Kind, source: Any, good: list[str], bad: list[str], sentencepiece: TextModel
) -> None:
    """It holds for vocabularies of either kind."""
    for model in (MODEL, sentencepiece):
        wanted = constraint_of(kind, source)
        assert [text for text in good if not lets_through(wanted, text, model)] == []
        assert [text for text in bad if lets_through(wanted, text, model)] == []


def test_whitespace_is_bounded_by_default() -> None:
    """A request can set another pattern, or none at all."""
    pair = {"type": "array", "items": {"type": "integer"}}
    for text in ("[1,2]", "[1, 2]", "[\n  1,\r\n\t2\n]"):
        assert lets_through(constraint_of("json_schema", pair), text)
    for text in ("[1,  2]", "[1,\n\n2]", "[1, \n2]", " [1]", "[1] ", "[\n" + " " * 41 + "1]"):
        assert not lets_through(constraint_of("json_schema", pair), text)
    assert lets_through(constraint_of("json_schema", pair, ""), "[1,2]")
    assert not lets_through(constraint_of("json_schema", pair, ""), "[1, 2]")
    assert lets_through(constraint_of("json_schema", pair, "_{2}"), "[1,__2]")


def test_special_tokens_are_not_allowed_as_text() -> None:
    """Required text that looks like a special token is generated as other tokens."""
    wanted = constraint_of("choice", ["<|im_start|>"])
    watch = GRAMMARS.constraint(wanted).start_state()
    special = MODEL.tokenizer.special_id("<|im_start|>")
    assert special is not None
    written = []
    while not MODEL.eos_token_ids & set(allowed(watch)):
        token_id = max(allowed(watch), key=lambda i: len(MODEL.tokenizer.piece(i)))
        assert not MODEL.tokenizer.is_special(token_id)
        written.append(token_id)
        watch.push(token_id)
    assert MODEL.tokenizer.text(written, skip_special_tokens=False) == "<|im_start|>"


def test_required_text_uses_the_tokens_of_the_model() -> None:
    """The tokens are those of the model's tokenizer, however long the text is."""
    text = "The capital of France is Paris. " * 20 + "é"
    watch = GRAMMARS.constraint(constraint_of("choice", [text])).start_state()
    written: list[int] = []
    is_whole = False
    while not is_whole:
        (only,) = allowed(watch)
        written.append(only)
        is_whole = watch.push(only)
    assert written == ids_of(text)


def test_a_complete_output_ends_unless_it_may_continue() -> None:
    """The end token ends either."""
    (end,) = MODEL.eos_token_ids
    (yes,) = ids_of("a")
    assert (
        GRAMMARS.constraint(constraint_of("choice", ["a"]))
        .start_state()
        .fill(np.zeros(10, np.uint32))
    )
    watch = GRAMMARS.constraint(constraint_of("choice", ["a"])).start_state()
    allowed(watch)
    assert watch.push(yes)
    assert allowed(watch) == [end]
    watch = GRAMMARS.constraint(constraint_of("regex", "a+")).start_state()
    allowed(watch)
    assert not watch.push(yes)
    assert set(allowed(watch)) >= {yes, end}
    assert watch.push(end)


def test_a_model_without_an_end_token_ends_when_nothing_may_follow() -> None:
    """A token that is not part of any text stands in for it and ends the text."""
    grammars = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size, frozenset())
    watch = grammars.constraint(constraint_of("regex", "a+")).start_state()
    allowed(watch)
    watch.push(ids_of("a")[0])
    (stand_in,) = [i for i in allowed(watch) if set(MODEL.tokenizer.piece(i)) != {ord("a")}]
    assert MODEL.tokenizer.is_special(stand_in)
    assert watch.push(stand_in)


def test_padding_of_the_vocabulary_is_never_allowed() -> None:
    """Models pad their logits."""
    padded = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size + 70, MODEL.eos_token_ids)
    mask = np.zeros(-(-(MODEL.vocab_size + 70) // 32), np.uint32)
    padded.constraint(constraint_of("regex", "(?s:.)*")).start_state().fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[: MODEL.vocab_size].any()
    assert not bits[MODEL.vocab_size :].any()


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "no text matches it"),
        ("regex", r"(a)\1", "back-references are not supported"),
        ("regex", "a" * 10_001, "10,000"),
        ("regex", "(" * 5_000 + "a" + ")" * 5_000, ""),
        ("regex", "[^\\s\\S]", ""),
        ("lark", "start: nothing", "nothing"),
        ("grammar", "start: " + "(" * 100 + '"a"' + ")" * 100, "nested"),
        ("grammar", "x: /a/", "start"),
        ("grammar", 'root ::= "a', "line 1, column 10"),
        ("grammar", "root ::= root", ""),
        (
            "grammar",
            "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5_000)) + 'r5000: "a"',
            "5,002 rules",
        ),
        ("grammar", "start: T\nT: " + '"a"? ' * 20_000, "100,0"),
        ("json_schema", {"$ref": "#"}, ""),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ""),
        ("json_schema", {"$ref": "#/$defs/b", "$defs": {"a": {}}}, "b"),
        ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ("json_schema", {"type": "string", "pattern": "(?!a)b"}, "look-around"),
        ("json_schema", {"enum": []}, "empty"),
        (
            "json_schema",
            {"properties": {"a": {"items": [{"pattern": "[b-"}]}}, "required": ["a"]},
            "supported constraint: `/properties/a/items/0/pattern` is '[b-': unclosed",
        ),
        (
            "json_schema",
            {"patternProperties": {"a^b": {}}},
            "`/patternProperties/a^b` is 'a^b': `^`",
        ),
        ("regex", r"a\bc", r"'a\\bc' is not supported: the word boundary `\b`"),
    ],
    ids=range(22),
)
def test_an_unsatisfiable_constraint_is_refused_immediately(
    kind: Kind, source: Any, words: str
) -> None:
    """It happens before generation; the error has the library's message without its internals."""
    with pytest.raises(RequestError) as caught:
        GRAMMARS.constraint(constraint_of(kind, source))
    assert (caught.value.param, caught.value.code) == ("field", "invalid_constraint")
    assert words in caught.value.message
    assert "<state>" not in caught.value.message


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(a+)+(a|aa)*(.*a.*){20}b"),
        ("regex", "a?" * 25 + "a" * 25),
        ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(900)) + 'r900: "a"'),
        ("grammar", 'root ::= root root | "a" | root root root'),
        (
            "json_schema",
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(900)},
                    "d900": {"type": "string"},
                },
            },
        ),
        ("choice", [f"choice number {i}" for i in range(10_000)]),
    ],
    ids=range(6),
)
def test_large_or_elsewhere_slow_constraints_are_accepted(kind: Kind, source: Any) -> None:
    """No expression backtracks, and a chain of rules does not crash a process."""
    watch = GRAMMARS.constraint(constraint_of(kind, source)).start_state()
    assert allowed(watch)
    assert watch.push(allowed(watch)[0]) in (True, False)


def test_a_schema_of_maximum_depth_and_references_does_not_crash() -> None:
    """Each link of the chain is nested in many lists, more than a usual stack could traverse."""

    def nested(inner: dict[str, Any], depth: int) -> dict[str, Any]:
        for _ in range(depth):
            inner = {"items": inner}
        return inner

    chain = {f"d{i}": nested({"$ref": f"#/$defs/d{i + 1}"}, 45) for i in range(900)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d900": {"type": "string"}}}
    served = served_schema(schema, "field", SchemaRules())
    with pytest.raises(RequestError, match="too large"):
        GRAMMARS.constraint(constraint_of("json_schema", served))


def test_a_constraint_that_cannot_continue_fails_its_row() -> None:
    """The causes are a token that was not allowed and a grammar whose step costs too much."""
    endless = GRAMMARS.constraint(constraint_of("regex", "(a{1000}){1000}")).start_state()
    (first, *_) = allowed(endless)
    with pytest.raises(RequestError, match="too many"):
        endless.push(first)
    watch = GRAMMARS.constraint(constraint_of("choice", ["abc"])).start_state()
    allowed(watch)
    with pytest.raises(RequestError, match="allows nothing more after 1 tokens") as caught:
        watch.push(ids_of("x")[0])
    assert caught.value.code == "constraint_cannot_be_held"
    with pytest.raises(RequestError, match="allows nothing more"):
        allowed(watch)


def test_a_row_is_independent_of_budgets_that_others_used() -> None:
    """If the copies of a grammar fail, a fresh one continues at the same place."""
    constraint = GRAMMARS.constraint(constraint_of("regex", "[ab]{3}"))
    watch = constraint.start_state()
    first, second = ids_of("a") + ids_of("b")
    allowed(watch)
    watch.push(first)
    expected = allowed(watch)
    assert watch._matcher is not None
    watch._matcher.consume_token(ids_of("x")[0])  # which ends it permanently
    assert watch._matcher.is_error()
    assert allowed(watch) == expected
    assert not watch.push(second)


def test_equal_constraints_are_equal_values() -> None:
    """Requests with equal constraints are therefore computed once."""
    one, same = (GRAMMARS.constraint(constraint_of("regex", "a+")) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    other = GRAMMARS.constraint(constraint_of("regex", "a*"))
    later = GRAMMARS.constraint(constraint_of("regex", "a+"), begins_after="x")
    assert len({one, same, other, later}) == 3


def test_thousands_of_schemas_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is memory, estimated from compilation times; evicted ones are compiled again."""
    seconds = 0.0

    def timed(tokens: LLTokenizer, grammar: str) -> Compiled:
        return Compiled(compiled(tokens, grammar).matcher, seconds)

    monkeypatch.setattr(grammar, "compiled", timed)
    monkeypatch.setattr(module, "_MAX_CACHE_BYTES", 40 * module._BYTES_EACH)
    grammars = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids)
    first = grammars.constraint(constraint_of("regex", "a0+"))
    for number in range(1, 60):
        grammars.constraint(constraint_of("regex", f"a{number}+"))
    assert len(grammars._cache) == 39
    assert first.grammar not in grammars._cache
    assert allowed(first.start_state()) == ids_of("a")
    seconds = 9 * module._BYTES_EACH / module._BYTES_A_SECOND
    for number in range(9):
        grammars.constraint(constraint_of("regex", f"b{number}+"))
    assert len(grammars._cache) == 3
    assert grammars._num_cache_bytes == sum(entry.num_bytes for entry in grammars._cache.values())


def test_concurrent_requests_compile_a_constraint_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request compiles and the others wait for it; the same applies to errors."""
    grammars_compiled: list[str] = []
    first, barrier = threading.Event(), threading.Barrier(8)

    def counted(tokens: LLTokenizer, grammar: str) -> Compiled:
        grammars_compiled.append(grammar)
        first.wait(120)
        return compiled(tokens, grammar)

    monkeypatch.setattr(grammar, "compiled", counted)
    grammars = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids)

    def ask(source: str) -> str:
        barrier.wait(120)
        try:
            return grammars.constraint(constraint_of("regex", source)).grammar
        except RequestError as exc:
            return exc.message

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, "ab+" if number % 2 else "[a") for number in range(8)]
        first.set()
        results = {answer.result() for answer in answers}
    assert len(grammars_compiled) == len(results) == 2
    with pytest.raises(RequestError, match="unclosed character class"):
        grammars.constraint(constraint_of("regex", "[a"))
    assert len(grammars_compiled) == 2


def test_other_failures_are_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a lack of memory, for example, the next request tries again."""
    grammars = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids)

    def fail(*_: object) -> Compiled:
        raise MemoryError

    monkeypatch.setattr(grammar, "compiled", fail)
    with pytest.raises(MemoryError):
        grammars.constraint(constraint_of("regex", "ab+"))
    monkeypatch.setattr(grammar, "compiled", compiled)
    assert allowed(grammars.constraint(constraint_of("regex", "ab+")).start_state()) == ids_of("a")
    assert grammars._num_cache_bytes == sum(entry.num_bytes for entry in grammars._cache.values())


def test_a_compilation_that_takes_too_long_names_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """It covers constraints whose cost the protocol cannot predict."""

    def endless(*_: object) -> Compiled:
        raise TimeoutError

    monkeypatch.setattr(grammar, "compiled", endless)
    grammars = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids)
    with pytest.raises(RequestError, match="more than 10 seconds to compile") as caught:
        grammars.constraint(constraint_of("regex", "ab+"))
    assert (caught.value.param, caught.value.code) == ("field", "invalid_constraint")


def test_threads_compile_and_fill_concurrently() -> None:
    """The same schemas requested by many threads at once give the same masks."""
    grammars = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids)
    schemas = [{**LIST, "minItems": 1 + number % 5} for number in range(40)]

    def first_steps(schema: dict[str, Any]) -> list[list[int]]:
        watch = grammars.constraint(constraint_of("json_schema", schema)).start_state()
        steps = []
        for token_id in ids_of('["a", 3'):
            steps.append(allowed(watch))
            watch.push(token_id)
        return [*steps, allowed(watch)]

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(first_steps, schemas))
    assert together == [first_steps(schema) for schema in schemas]


def test_the_vocabulary_is_created_on_first_use() -> None:
    """Most files ask for no constraint."""
    grammars = GrammarBackend(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids)
    assert grammars._vocabulary is None
    grammars.constraint(constraint_of("regex", "a"))
    assert grammars._vocabulary is not None


def test_required_texts_become_tokens_with_exactly_their_bytes(sentencepiece: TextModel) -> None:
    """If the tokenizer would add a space or parse markup, other tokens are used."""
    known = grammar_vocabulary(sentencepiece.tokenizer, sentencepiece.vocab_size, frozenset())
    wrapped: Any = sys.modules["tidemill.engine.structured_output.vocabulary"]._Wrapped(
        sentencepiece.tokenizer, sentencepiece.vocab_size
    )
    wrapped.llguidance_tokenizer = known.llguidance_tokenizer
    for text in ("ab", " ab", "</s>", "é a"):
        pieces = [sentencepiece.tokenizer.piece(i) for i in wrapped(text)]
        assert text.encode().startswith(b"".join(pieces))
        assert pieces
        assert not any(map(sentencepiece.tokenizer.is_special, wrapped(text)))


@pytest.mark.parametrize(
    ("before", "text", "good"),
    [
        ("</think>", "I think so.</think>[1]", True),
        ("</think>", "</think>\n\n[1]", False),
        ("</think>", "[1]", False),
        ("</think>", "a</think>a", False),
        ("</think>", "a</think>[1]</think>", False),
        ("</think>", "a</thin</think>[1]", True),
    ],
)
def test_a_grammar_applies_after_the_text_that_triggers_it(
    before: str, text: str, *, good: bool
) -> None:
    """Before that text, anything except an end is allowed; after it, only matching text."""
    wanted = constraint_of("json_schema", {"type": "array", "items": {"type": "integer"}})
    assert lets_through(wanted, text, begins_after=before) == good


def test_no_token_spans_the_end_of_the_beginning(sentencepiece: TextModel) -> None:
    """Such tokens are masked only where they would span it; whitespace alone may follow."""
    grammars = grammars_of(sentencepiece)
    watch = grammars.constraint(constraint_of("regex", "a"), begins_after="b ").start_state()
    pieces = {sentencepiece.tokenizer.piece(i): i for i in range(sentencepiece.vocab_size)}
    assert pieces[b" a"] in allowed(watch, sentencepiece)
    watch.push(pieces[b"b"])
    now = allowed(watch, sentencepiece)
    assert pieces[b" a"] not in now
    assert pieces[b" ab"] not in now
    assert {pieces[b" "], pieces[b"a"]} <= set(now)
    watch.push(pieces[b" "])
    assert allowed(watch, sentencepiece) == [pieces[b"a"]]


def test_random_texts_under_a_schema_are_valid_json() -> None:
    """A validator without masks checks every text that is drawn from the allowed tokens."""
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": -5, "exclusiveMaximum": 100},
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["x", "y", 1.5, None]},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
        },
        "required": ["id", "kind"],
        "additionalProperties": False,
        "$defs": {
            "part": {
                "type": "object",
                "patternProperties": {"^p[0-9]$": {"type": "null"}},
                "additionalProperties": False,
                "maxProperties": 2,
            }
        },
    }
    rng = np.random.default_rng(5)
    validator = Draft202012Validator(schema)
    constraint = GRAMMARS.constraint(constraint_of("json_schema", schema))
    for _ in range(30):
        watch, written = constraint.start_state(), []
        for _ in range(400):
            may = allowed(watch)
            ends = MODEL.eos_token_ids & set(may)
            if ends and (len(ends) == len(may) or rng.random() < 0.3):
                break
            # Numbers and strings would otherwise never end.
            closing = [i for i in may if MODEL.tokenizer.piece(i) in (b'"', b"}", b"]", b",")]
            pick = closing if closing and rng.random() < 0.4 else sorted(set(may) - ends)
            written.append(int(rng.choice(pick)))
            watch.push(written[-1])
        else:
            continue
        validator.validate(json.loads(MODEL.tokenizer.text(written)))
