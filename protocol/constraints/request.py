"""Structured outputs: the fields of OpenAI, vLLM, SGLang and llama.cpp, parsed to one value.

The checks here need no model: a body has at most one constraint, its form and size are allowed,
and its JSON schema is supported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
)

from ..errors import RequestError
from ..fields import GenerationRequest, Text, few_fields
from ..validation import has_open_escape, short_repr
from .automata import check_grammar
from .look_ahead import LookAroundError, looks_around, plain_texts
from .schemas import SchemaRules, served_schema
from .sizes import TooLarge
from .structural_tags import served_tag

MAX_SOURCE_CHARS = 2**20
MAX_CHOICES = 10_000
_MAX_CACHED_CHARS = 32_768

# Whitespace allowed between the tokens of a JSON text: enough for any printer's layout, and
# bounded, so that a model cannot write endless whitespace.
JSON_WHITESPACE = r" |\r?\n[ \t]{0,40}"

Kind = Literal["json_schema", "regex", "choice", "lark", "grammar", "structural_tag"]


def json_layout(whitespace: str) -> dict[str, object]:
    """Return llguidance's options for a schema whose every `oneOf` is equivalent to an `anyOf`.

    The regex `whitespace` matches the text between tokens of the JSON; "" allows none.
    """
    layout = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {**layout, "coerce_one_of": True}


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """Constraint on an output: its `kind`, its `source`, and the request field `param` it is from.

    The source of `json_schema` is a schema as JSON; of `choice` a JSON list of texts; of `lark` a
    grammar in llguidance's Lark; of `grammar` that, or a grammar in GBNF, which other servers call
    EBNF; of `structural_tag` a tree of formats as JSON. The regex `whitespace` matches the text
    between the tokens of a JSON text, "" for none. `sent` is the schema as it was sent, `notes`
    lists its parts that have no effect.
    """

    kind: Kind
    source: str
    param: str
    whitespace: str = JSON_WHITESPACE
    sent: Any = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def is_same_form(self, other: OutputConstraint) -> bool:
        """Say whether both are the same constraint, even if their fields differ."""
        has_layout = self.kind in ("json_schema", "structural_tag")
        return (self.kind, self.source) == (other.kind, other.source) and (
            not has_layout or self.whitespace == other.whitespace
        )


AUTOMATON_FIELDS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "structural_tag",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "text",
        "tools",
        "stop_regex",
    }
)
"""Fields that need a compiled automaton: constraints, strict tool calls and stop regexes."""


def asks_for_automaton(body: Mapping[str, Any]) -> bool:
    """Say whether a body may need a grammar that takes long to compile, even for a small body."""
    if any(body.get(name) is not None for name in AUTOMATON_FIELDS - {"text"}):
        return True
    text = body.get("text")  # of a response; inputs of scores have other types
    return isinstance(text, dict) and text.get("format") is not None


def _format_type(name: str) -> str:
    if name not in ("text", "json_object", "json_schema", "structural_tag"):
        raise ValueError("must be 'text', 'json_object', 'json_schema' or 'structural_tag'")
    return name


class JsonSchemaFormat(BaseModel):
    """OpenAI's `json_schema`; its `name` and `description` have no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`; a `schema` with `json_object` is llama.cpp's extension.

    Any extra fields are those of a structural tag.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    type: Annotated[str, AfterValidator(_format_type)]
    json_schema: JsonSchemaFormat | None = None
    schema_: Any = Field(None, alias="schema")


Choices = Annotated[list[Text], Field(fail_fast=True)]


class StructuredOutputs(BaseModel):
    """VLLM's `structured_outputs`: one constraint, and options for JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Any = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Text | None = None


class ConstrainedRequest(GenerationRequest):
    """Fields of chat and text completions that constrain the form of the output.

    A request with any of `CONSTRAINT_FIELDS` calls `parse_constraint` when it is validated.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(few_fields)] | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    structural_tag: Any = None
    json_schema: Any = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Text | None = None
    # Tidemill's own.
    confidence: bool | None = None

    _constraint: OutputConstraint | None = PrivateAttr(None)

    @property
    def output_constraint(self) -> OutputConstraint | None:
        """Constraint on the output; None if there is none."""
        return self._constraint

    @property
    def is_constrained(self) -> bool:
        """Say whether a constraint governs the output, or a part of it."""
        return self._constraint is not None

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on parts of the constraint that have no effect."""
        return () if self._constraint is None else self._constraint.notes

    def parse_constraint(self) -> None:
        """Parse the constraint; refuse a second one or an unsupported one."""
        constraints = [
            *_from_response_format(self.response_format),
            *_from_structured_outputs(self.structured_outputs),
        ]
        constraints += [
            *_parse_field("json_schema", self.guided_json, "guided_json"),
            *_parse_field("regex", self.guided_regex, "guided_regex"),
            *_parse_field("choice", self.guided_choice, "guided_choice"),
            *_parse_field("grammar", self.guided_grammar, "guided_grammar"),
            *_parse_field("structural_tag", self.structural_tag, "structural_tag"),
            *_parse_field("json_schema", self.json_schema, "json_schema"),
            *_parse_field("regex", self.regex, "regex"),
            *_parse_field("grammar", self.ebnf, "ebnf"),
            *_parse_field("grammar", self.grammar, "grammar"),
        ]
        for constraint in constraints:
            whitespace = self.guided_whitespace_pattern
            found = constraint if whitespace is None else replace(constraint, whitespace=whitespace)
            if self._constraint is None:
                self._constraint = found
            # Some clients send one constraint under both its old and its new name.
            elif not self._constraint.is_same_form(found):
                raise RequestError(
                    f"`{self._constraint.param}` and `{found.param}` cannot be used together: an"
                    " output has only one constraint.",
                    param=found.param,
                )
        if self.confidence and not self.is_constrained:
            raise RequestError(
                "`confidence` requires a constrained output: add a schema, regular expression, list"
                " of choices or grammar, such as `response_format`, or tools that are `strict` or"
                " required by `tool_choice`.",
                param="confidence",
            )


CONSTRAINT_FIELDS = ConstrainedRequest.model_fields.keys() - GenerationRequest.model_fields.keys()


def _from_response_format(fields: ResponseFormat | None) -> Iterator[OutputConstraint]:
    if fields is None or fields.type == "text":
        return
    if fields.type == "json_object":
        schema = {"type": "object"} if fields.schema_ is None else fields.schema_
        param = "response_format" if fields.schema_ is None else "response_format.schema"
        yield from _parse_field("json_schema", schema, param)
        return
    if fields.type == "structural_tag":
        yield from _parse_field("structural_tag", fields.model_extra, "response_format")
        return
    param = "response_format.json_schema"
    if fields.json_schema is None or fields.json_schema.schema_ is None:
        missing = param if fields.json_schema is None else f"{param}.schema"
        raise RequestError(f"`{missing}` is required.", param=missing)
    rules = SchemaRules(is_strict=bool(fields.json_schema.strict))
    yield from _parse_field("json_schema", fields.json_schema.schema_, f"{param}.schema", rules)


def _from_structured_outputs(fields: StructuredOutputs | None) -> Iterator[OutputConstraint]:
    if fields is None:
        return
    whitespace = (
        "" if fields.disable_any_whitespace else fields.whitespace_pattern or JSON_WHITESPACE
    )
    any_object = {"type": "object"} if fields.json_object else None
    for kind, source, name in (
        ("json_schema", fields.json_, "json"),
        ("regex", fields.regex, "regex"),
        ("choice", fields.choice, "choice"),
        ("grammar", fields.grammar, "grammar"),
        ("json_schema", any_object, "json_object"),
        ("structural_tag", fields.structural_tag, "structural_tag"),
    ):
        for constraint in _parse_field(kind, source, f"structured_outputs.{name}"):  # type: ignore[arg-type]
            yield replace(constraint, whitespace=whitespace)


def _parse_field(
    kind: Kind, source: object, param: str, rules: SchemaRules | None = None
) -> Iterator[OutputConstraint]:
    """Yield a field's constraint, if it has one; raises `RequestError` if it is not supported."""
    if source is None:
        return
    notes: tuple[str, ...] = ()
    if kind == "json_schema":
        text, notes = _schema_text(source, param, rules or SchemaRules())
    elif kind == "structural_tag":
        text = _json(served_tag(_value(source, param), param), param)
    elif kind == "choice":
        assert isinstance(source, list)
        text = _choices(source, param)
    else:
        assert isinstance(source, str)
        text = source
        if kind == "regex":
            _check_regex(text, param)
    _check_size(text, param)
    if kind == "grammar":
        try:
            check_grammar(text)
        except TooLarge as exc:
            raise RequestError(
                f"`{param}`: {exc}.", param=param, code="invalid_constraint"
            ) from None
    yield OutputConstraint(kind, text, param, sent=source, notes=notes)


def _check_regex(pattern: str, param: str) -> None:
    if has_open_escape(pattern):
        raise RequestError(f"`{param}` ends in an unescaped backslash.", param=param)
    _check_size(pattern, param)
    try:
        if looks_around(pattern):
            plain_texts(pattern)
    except LookAroundError as exc:
        raise RequestError(
            f"`{param}` is {short_repr(pattern)}: {exc}.", param=param, code="invalid_constraint"
        ) from None


def _schema_text(source: object, param: str, rules: SchemaRules) -> tuple[str, tuple[str, ...]]:
    """Return the enforced schema as JSON, and notes on it.

    The schema that rows of a file share is parsed only once.
    """
    text: str | None
    try:
        text = source if isinstance(source, str) else json.dumps(source)
    except (TypeError, ValueError, RecursionError):
        text = None
    if text is None or len(text) > _MAX_CACHED_CHARS:
        return _parsed_schema_text(source, param, rules)
    return _cached_schema_text(text, param, rules)


@lru_cache(maxsize=128)
def _cached_schema_text(text: str, param: str, rules: SchemaRules) -> tuple[str, tuple[str, ...]]:
    return _parsed_schema_text(text, param, rules)


def _parsed_schema_text(
    source: object, param: str, rules: SchemaRules
) -> tuple[str, tuple[str, ...]]:
    notes: list[str] = []
    text = _json(served_schema(_value(source, param), param, rules, notes), param)
    return text, tuple(notes)


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_SOURCE_CHARS:
        raise RequestError(
            f"`{param}` has {len(text):,} characters; the limit is {MAX_SOURCE_CHARS:,}.",
            param=param,
        )


def _value(source: object, param: str) -> object:
    """Return a schema or a tag, which may have been sent as its JSON text."""
    if not isinstance(source, str):
        return source
    _check_size(source, param)
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"`{param}` is not valid JSON: {exc}.", param=param) from None


def _json(value: object, param: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise RequestError(f"`{param}` is nested too deeply.", param=param) from None
    except ValueError as exc:
        raise RequestError(f"`{param}` cannot be written as JSON: {exc}.", param=param) from None
    return text


def _choices(texts: list[str], param: str) -> str:
    if not texts or "" in texts:
        raise RequestError(f"`{param}` must contain only non-empty strings.", param=param)
    if len(texts) > MAX_CHOICES:
        raise RequestError(f"`{param}` must not have more than {MAX_CHOICES:,} items.", param=param)
    return _json(list(dict.fromkeys(texts)), param)
