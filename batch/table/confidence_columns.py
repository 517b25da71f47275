"""Confidence columns: for each answer its confidence, and the probabilities of few values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from tidemill.protocol.constraints.finite_values import MAX_VALUES, SchemaValues, value_text
from tidemill.protocol.constraints.request import ConstrainedRequest
from tidemill.protocol.constraints.schema_facts import pointer_part
from tidemill.protocol.fields import GenerationRequest

from .recipe import Recipe

_WHOLE = ""
_CALLS: Final = "/tool_calls"
_CONSTRAINTS: Final = (
    ConstrainedRequest.model_fields.keys() - GenerationRequest.model_fields.keys() - {"confidence"}
)


@dataclass(frozen=True, slots=True)
class ConfidenceColumn:
    """One column: a `field`, and the JSON pointer of the answers' value that it is about.

    `names` are those of a struct's fields by the texts of values; None for the confidence itself.
    The column of tool calls is JSON: all values under its pointer.
    """

    field: pa.Field
    pointer: str
    names: Mapping[str, str] | None = None

    def array(self, bodies: Sequence[Mapping[str, Any] | None]) -> pa.Array:
        """Return the column of responses: null where there is none."""
        each = [self._values_of(body) for body in bodies]
        if pa.types.is_list(self.field.type):
            return pa.array([values or None for values in each], self.field.type)
        return pa.array([values[0] if values else None for values in each], self.field.type)

    def _values_of(self, body: Mapping[str, Any] | None) -> list[Any]:
        choices = (body or {}).get("choices") or []
        each = [one.get("confidence") or {} for one in choices]
        if self.pointer == _CALLS:
            return [_json_of_calls(one) for one in each]
        return [self._value(one.get(self.pointer)) for one in each]

    def _value(self, entry: Mapping[str, Any] | None) -> Any:
        if entry is None or self.names is None:
            return entry and entry["confidence"]
        if "probabilities" not in entry:
            return None
        unknown = {
            value_text(value) for group in entry.get("undecided", ()) for value in group["values"]
        }
        return {
            self.names[text]: None if text in unknown else one["probability"]
            for one in entry["probabilities"]
            if (text := value_text(one["value"])) in self.names
        }


def confidence_columns(recipe: Recipe) -> list[ConfidenceColumn]:
    """Return the columns of a recipe whose answers have a confidence; else none.

    They are about the properties of its schema, or, without one, about the whole answer, and about
    tool calls.
    """
    if recipe.params.get("confidence") is not True:
        return []
    return [*_text_columns(recipe), *_call_columns(recipe)]


def _call_columns(recipe: Recipe) -> Iterator[ConfidenceColumn]:
    if recipe.params.get("tools"):
        kind = pa.string() if recipe.num_choices == 1 else pa.list_(pa.string())
        yield ConfidenceColumn(pa.field("tool_calls_confidence", kind), _CALLS)


def _text_columns(recipe: Recipe) -> list[ConfidenceColumn]:
    if recipe.params.get("tools") and _CONSTRAINTS.isdisjoint(recipe.params):
        return []
    schema = recipe.answer_schema
    values = SchemaValues(schema)
    properties = values.properties(schema) if schema else {}
    if not properties:
        return [*_columns_of("text", _WHOLE, _choices(recipe), recipe.num_choices)]
    return [
        column
        for name, inner in properties.items()
        for column in _columns_of(name, f"/{pointer_part(name)}", values.finite(inner), 1)
    ]


def _json_of_calls(confidence: Mapping[str, Any]) -> str | None:
    """Return the confidence of tool calls; None without any."""
    calls = {name: field for name, field in confidence.items() if name.startswith(f"{_CALLS}/")}
    return json.dumps(calls, ensure_ascii=False) if calls else None


def _columns_of(
    name: str, pointer: str, values: Sequence[Any] | None, num_choices: int
) -> Iterator[ConfidenceColumn]:
    number = pa.float64() if num_choices == 1 else pa.list_(pa.float64())
    yield ConfidenceColumn(pa.field(f"{name}_confidence", number), pointer)
    if values is not None and len(values) > 1 and num_choices == 1:
        names = _names_of(values)
        shares = pa.struct([(one, pa.float64()) for one in names.values()])
        yield ConfidenceColumn(pa.field(f"{name}_probabilities", shares), pointer, names)


def _names_of(values: Sequence[Any]) -> dict[str, str]:
    """Return the names of values by their texts: strings without quotes if that is unambiguous."""
    texts = [value_text(value) for value in values]
    names = [value if isinstance(value, str) else value_text(value) for value in values]
    return dict(zip(texts, names if len({*names}) == len(names) else texts, strict=True))


def _choices(recipe: Recipe) -> Sequence[Any] | None:
    """Return the choices that a recipe lists for its answers; None without any."""
    outputs = recipe.params.get("structured_outputs")
    found = outputs.get("choice") if isinstance(outputs, Mapping) else None
    found = recipe.params.get("guided_choice") if found is None else found
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        return None
    found = list(dict.fromkeys(found))
    return found if len(found) <= MAX_VALUES else None
