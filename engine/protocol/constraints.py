"""What a body says its output must be, in the words of OpenAI, vLLM, SGLang and llama.cpp.

All of these come to one value, `Asked`. What is looked at here needs no model: that there is one
constraint and no more, its form and size, and that a JSON schema holds nothing that is not served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from engine.protocol.automata import check_grammar
from engine.protocol.errors import RequestError
from engine.protocol.fields import GenerationRequest, Text
from engine.protocol.schemas import SchemaRules, served_schema
from engine.protocol.sizes import TooLarge
from engine.protocol.structural_tags import served_tag
from engine.protocol.validation import has_open_escape

MAX_SOURCE_CHARS = 2**20
MAX_CHOICES = 10_000

# What may stand between the tokens of a JSON text: enough for any printer's layout, and not so much
# that a model which writes nothing else would go on without end.
JSON_WHITESPACE = r" |\r?\n[ \t]{0,40}"

Kind = Literal["json_schema", "regex", "choice", "lark", "grammar", "structural_tag"]


def json_layout(whitespace: str) -> dict[str, object]:
    """Return llguidance's options for a schema whose every `oneOf` was shown to be an `anyOf`.

    Between the tokens of its JSON stands what the regex matches, "" for nothing.
    """
    layout = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {**layout, "coerce_one_of": True}


@dataclass(frozen=True, slots=True)
class Asked:
    """What an output must be: of one `kind`, by a `source`, as the field `param` has said.

    The source of `json_schema` is a schema as JSON; of `choice` a JSON list of texts; of `lark` a
    grammar as llguidance's Lark; of `grammar` that, or a grammar as GBNF, which other servers call
    EBNF; of `structural_tag` a tree of formats as JSON. Between the tokens of a JSON text may stand
    what the regex `whitespace` matches, "" for nothing. `sent` is a schema as it was sent.
    """

    kind: Kind
    source: str
    param: str
    whitespace: str = JSON_WHITESPACE
    sent: Any = field(default=None, compare=False, repr=False)

    def is_same_form(self, other: Asked) -> bool:
        """Say whether both come to the same, whichever fields they are from."""
        has_layout = self.kind in ("json_schema", "structural_tag")
        return (self.kind, self.source) == (other.kind, other.source) and (
            not has_layout or self.whitespace == other.whitespace
        )


# Fields for which an automaton is compiled: constraints, calls that are held to their schemas, and
# regular expressions at which a text ends.
_COMPILED = (
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
    "tools",
    "stop_regex",
)


def asks_for_automaton(body: Mapping[str, Any]) -> bool:
    """Say whether a body may ask for something that takes long to compile, whatever its size."""
    return any(body.get(name) is not None for name in _COMPILED)


def _type_of_format(name: str) -> str:
    if name not in ("text", "json_object", "json_schema", "structural_tag"):
        raise ValueError("must be 'text', 'json_object', 'json_schema' or 'structural_tag'")
    return name


class JsonSchemaFormat(BaseModel):
    """OpenAI's description of a schema; `name` and `description` change nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)

    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`; a `schema` beside `json_object` is llama.cpp's.

    What else it holds is that of a structural tag.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    type: Annotated[str, AfterValidator(_type_of_format)]
    json_schema: JsonSchemaFormat | None = None
    schema_: Any = Field(None, alias="schema")


class StructuredOutputs(BaseModel):
    """VLLM's `structured_outputs`: one constraint, and what holds for JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Any = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Text | None = None


class ConstrainedRequest(GenerationRequest):
    """What chat and text completions ask of the form of their output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    structural_tag: Any = None
    json_schema: Any = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Text | None = None

    _asked: Asked | None = PrivateAttr(None)

    @property
    def asked(self) -> Asked | None:
        """What the output must be; None where it may be anything."""
        return self._asked

    @model_validator(mode="after")
    def _ask(self) -> Self:
        """Find the one constraint; refuse two of them, and one that is not served."""
        all_asked = [*_of_format(self.response_format), *_of_vllm(self.structured_outputs)]
        all_asked += [
            *_of("json_schema", self.guided_json, "guided_json"),
            *_of("regex", self.guided_regex, "guided_regex"),
            *_of("choice", self.guided_choice, "guided_choice"),
            *_of("grammar", self.guided_grammar, "guided_grammar"),
            *_of("structural_tag", self.structural_tag, "structural_tag"),
            *_of("json_schema", self.json_schema, "json_schema"),
            *_of("regex", self.regex, "regex"),
            *_of("grammar", self.ebnf, "ebnf"),
            *_of("grammar", self.grammar, "grammar"),
        ]
        for asked in all_asked:
            whitespace = self.guided_whitespace_pattern
            found = asked if whitespace is None else replace(asked, whitespace=whitespace)
            if self._asked is None:
                self._asked = found
            # Some clients send a form by its old name and by its new one, too.
            elif not self._asked.is_same_form(found):
                raise RequestError(
                    f"`{self._asked.param}` and `{found.param}` exclude each other: an output is"
                    " held to one of them.",
                    param=found.param,
                )
        return self


def _of_format(said: ResponseFormat | None) -> Iterator[Asked]:
    if said is None or said.type == "text":
        return
    if said.type == "json_object":
        schema = {"type": "object"} if said.schema_ is None else said.schema_
        param = "response_format" if said.schema_ is None else "response_format.schema"
        yield from _of("json_schema", schema, param)
        return
    if said.type == "structural_tag":
        yield from _of("structural_tag", said.model_extra, "response_format")
        return
    param = "response_format.json_schema"
    if said.json_schema is None or said.json_schema.schema_ is None:
        missing = param if said.json_schema is None else f"{param}.schema"
        raise RequestError(f"`{missing}` is required.", param=missing)
    rules = SchemaRules(is_strict=bool(said.json_schema.strict))
    yield from _of("json_schema", said.json_schema.schema_, f"{param}.schema", rules)


def _of_vllm(said: StructuredOutputs | None) -> Iterator[Asked]:
    if said is None:
        return
    rules = SchemaRules(closes_objects=bool(said.disable_additional_properties))
    whitespace = "" if said.disable_any_whitespace else said.whitespace_pattern or JSON_WHITESPACE
    any_object = {"type": "object"} if said.json_object else None
    for kind, source, name in (
        ("json_schema", said.json_, "json"),
        ("regex", said.regex, "regex"),
        ("choice", said.choice, "choice"),
        ("grammar", said.grammar, "grammar"),
        ("json_schema", any_object, "json_object"),
        ("structural_tag", said.structural_tag, "structural_tag"),
    ):
        for asked in _of(kind, source, f"structured_outputs.{name}", rules):  # type: ignore[arg-type]
            yield replace(asked, whitespace=whitespace)


def _of(
    kind: Kind, source: object, param: str, rules: SchemaRules | None = None
) -> Iterator[Asked]:
    """Yield what a field asks for, if it does; raises `RequestError` for what is not served."""
    if source is None:
        return
    if kind == "json_schema":
        text = _json(served_schema(_value(source, param), param, rules or SchemaRules()), param)
    elif kind == "structural_tag":
        text = _json(served_tag(_value(source, param), param), param)
    elif kind == "choice":
        assert isinstance(source, list)
        text = _choices(source, param)
    else:
        assert isinstance(source, str)
        text = source
        if kind == "regex" and has_open_escape(text):
            raise RequestError(f"`{param}` ends in a backslash that escapes nothing.", param=param)
    _check_size(text, param)
    if kind == "grammar":
        try:
            check_grammar(text)
        except TooLarge as exc:
            raise RequestError(
                f"`{param}`: {exc}.", param=param, code="invalid_constraint"
            ) from None
    yield Asked(kind, text, param, sent=source)


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_SOURCE_CHARS:
        raise RequestError(
            f"`{param}` has {len(text):,} characters; at most {MAX_SOURCE_CHARS:,} are served.",
            param=param,
        )


def _value(source: object, param: str) -> object:
    """Return a schema or a tag, which may be told as the JSON text of one."""
    if not isinstance(source, str):
        return source
    _check_size(source, param)
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"`{param}` is no JSON: {exc}.", param=param) from None


def _json(value: object, param: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise RequestError(f"`{param}` is nested too deeply.", param=param) from None
    except ValueError as exc:
        raise RequestError(f"`{param}` cannot be told as JSON: {exc}.", param=param) from None
    return text


def _choices(texts: list[str], param: str) -> str:
    if not texts or "" in texts:
        raise RequestError(f"`{param}` must hold texts, and none that is empty.", param=param)
    if len(texts) > MAX_CHOICES:
        raise RequestError(f"`{param}` must not hold more than {MAX_CHOICES:,}.", param=param)
    return _json(list(dict.fromkeys(texts)), param)
