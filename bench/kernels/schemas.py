"""JSON schemas drawn at random, with every supported keyword; each seed has its own.

Every text of a schema is bounded, so that a row ends within a few hundred tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_WORDS = "name id size date kind part note unit rate code city year flag item text".split()


def drawn_schema(seed: int) -> Schema:
    """Return the schema of a seed: an object, its parts up to three deep."""
    draw = random.Random(seed)
    schema = _object(draw, 2)
    if draw.random() < 0.2:
        schema["$defs"] = {"shared": _any(draw, 0)}
        schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        schema["required"].append("shared")
    return schema


def _any(draw: random.Random, depth: int) -> Schema:
    flat: list[Callable[[random.Random], Schema]] = [_string, _number, _enum, _format, _pattern]
    deep: list[Callable[[random.Random, int], Schema]] = [_object, _array, _union]
    if depth and draw.random() < 0.5:
        return draw.choice(deep)(draw, depth - 1)
    return draw.choice(flat)(draw)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.8],
        "additionalProperties": False,
    }
    if draw.random() < 0.1:
        schema["patternProperties"] = {"^x[0-9]$": _number(draw)}
    return schema


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(draw, depth)}
    if draw.random() < 0.2:
        parts = [_any(draw, 0) for _ in range(draw.randint(1, 2))]
        return {**schema, "prefixItems": parts, "items": False, "minItems": len(parts)}
    return {**schema, "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _union(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.3:
        return {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]}
    if draw.random() < 0.3:
        return {"allOf": [{"type": "string", "maxLength": 8}, {"minLength": 2}]}
    return {"anyOf": [_any(draw, depth), {"type": ["boolean", "null"]}]}


def _string(draw: random.Random) -> Schema:
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(1, 12)}


def _number(draw: random.Random) -> Schema:
    low = draw.randint(-1000, 1000)
    kind = draw.choice(["integer", "number"])
    schema: Schema = {"type": kind, "minimum": low, "exclusiveMaximum": low + draw.randint(2, 5000)}
    if kind == "integer" and draw.random() < 0.2:
        schema["multipleOf"] = draw.choice([2, 5])
        schema["exclusiveMaximum"] = low + 100
    return schema


def _enum(draw: random.Random) -> Schema:
    values: list[Any] = ["red", "grün", 'a "b"', 7, -1.5, None, True, [1], {"a": "b"}]
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(["date", "time", "date-time", "uuid", "ipv4"])}


def _pattern(draw: random.Random) -> Schema:
    return {
        "type": "string",
        "pattern": draw.choice(["^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^a+b?$"]),
    }
