"""Argument types of a function by its JSON schema: the JSON value of a bare text between tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidemill.protocol.constraints.schema_facts import (
    ANYTHING,
    Facts,
    SchemaFacts,
    type_of,
)

from .json_text import loaded

_PYTHON = {"True": "true", "False": "false", "None": "null"}


class ArgumentTypes:
    """The types of a function's arguments by its schema, through references and unions too."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._facts = SchemaFacts(schema)
        self._members = self._facts.infer(schema).get("object", ANYTHING["object"])

    def json_of(self, text: str, key: str) -> str:
        """Return a text between tags as JSON: as a string where it may be one, else as it is."""
        allowed = self._facts.infer(self._members.member(key)) or ANYTHING
        if _is_string(text, allowed):
            return _json(text)
        spelt = _PYTHON.get(text, text)
        try:
            kind = type_of(loaded(spelt))
        except ValueError:
            return _json(text)
        strings = allowed.get("string")
        if strings is None:
            return spelt.strip()
        # Quotes belong to a text, unless it is one of known values.
        is_other = kind != "string" or strings.values is not None
        return spelt.strip() if kind in allowed and is_other else _json(text)


def _is_string(text: str, allowed: Facts) -> bool:
    strings = allowed.get("string")
    is_typed = len(allowed) < len(ANYTHING)
    if strings is None or (text == "null" and "null" in allowed and is_typed):
        return False
    if strings.values is not None:
        return text in strings.values
    # A text of a pattern or a format may be something else that is allowed, too.
    return strings.is_free


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
