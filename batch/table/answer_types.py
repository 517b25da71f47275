"""Answer types: columns for the fields of answers that follow a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pydantic_core import from_json, to_json

JSON_TEXT: Final = pa.field("json", pa.string()).with_metadata({"format": "json"})
"""Marks columns of values without a single Arrow type: they are stored as JSON."""

_TYPES: Final = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_MAX_DEPTH = 8
_REF = "#/"


def fields_of_schema(schema: Mapping[str, Any]) -> list[pa.Field]:
    """Return a field for each property of an object's schema; JSON text if its types vary."""
    root = _resolved(schema, schema, 0)
    properties = root.get("properties")
    if not isinstance(properties, Mapping):
        return []
    return [_field(name, inner, schema, 0) for name, inner in properties.items()]


def column_of_answers(answers: Sequence[Any], field: pa.Field) -> pa.Array:
    """Return a column of the values of one property; null if one is missing or does not fit."""
    values = [answer.get(field.name) if isinstance(answer, dict) else None for answer in answers]
    if is_json_text(field):
        texts = [None if value is None else to_json(value).decode() for value in values]
        return pa.array(texts, pa.string())
    if pa.types.is_nested(field.type):
        values = [value if _is_nested_as(value, field.type) else None for value in values]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return pa.array([_fitting(value, field.type) for value in values], field.type)


def parse_answer(text: Any) -> Any:
    """Parse an answer as JSON; returns None for a truncated one."""
    try:
        return from_json(text) if isinstance(text, str) else None
    except ValueError:
        return None


def is_json_text(field: pa.Field) -> bool:
    """Say whether the values of a field are printed as JSON."""
    return bool(field.metadata) and field.metadata.get(b"format") == b"json"


def _is_nested_as(value: Any, kind: pa.DataType) -> bool:
    """Say whether lists are where the type has lists; Arrow would convert a text to one."""
    if value is None or not pa.types.is_nested(kind):
        return True
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(_is_nested_as(one, kind.value_type) for one in value)
    return isinstance(value, dict) and all(
        _is_nested_as(value.get(field.name), field.type) for field in kind
    )


def _fitting(value: Any, kind: pa.DataType) -> Any:
    try:
        pa.array([value], kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None
    return value


def _field(name: str, schema: Any, root: Mapping[str, Any], depth: int) -> pa.Field:
    kind = _type(schema, root, depth)
    return JSON_TEXT.with_name(name) if kind is None else pa.field(name, kind)


def _type(schema: Any, root: Mapping[str, Any], depth: int) -> pa.DataType | None:
    """Return the type of a schema's values; None if they need JSON."""
    schema = _resolved(schema, root, depth)
    if depth > _MAX_DEPTH:
        return None
    kind = schema.get("type")
    if kind == "array":
        item = _type(schema.get("items"), root, depth + 1)
        return None if item is None else pa.list_(item)
    if kind == "object":
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return None
        inner = {name: _type(item, root, depth + 1) for name, item in properties.items()}
        return None if None in inner.values() else pa.struct(list(inner.items()))
    if kind is None and (values := schema.get("enum", [schema.get("const")])):
        kind = "string" if all(isinstance(value, str) for value in values) else None
    return _TYPES.get(kind) if isinstance(kind, str) else None


def _resolved(schema: Any, root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """Return a schema without references and without null among its types."""
    while isinstance(schema, Mapping) and depth <= _MAX_DEPTH:
        depth += 1
        reference, either = schema.get("$ref"), schema.get("anyOf")
        if isinstance(reference, str) and reference.startswith(_REF):
            schema = _at(root, reference)
        elif isinstance(either, list):
            others = [one for one in either if one != {"type": "null"}]
            schema = others[0] if len(others) == 1 else {}
        elif isinstance(kinds := schema.get("type"), list):
            kinds = [kind for kind in kinds if kind != "null"]
            return {**schema, "type": kinds[0] if len(kinds) == 1 else None}
        else:
            return schema
    return {}


def _at(root: Mapping[str, Any], reference: str) -> Any:
    value: Any = root
    for key in reference.removeprefix(_REF).split("/"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
