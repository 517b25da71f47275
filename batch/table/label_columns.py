"""Columns of classified rows: the label of a text, its number, and the numbers of all labels.

Rows of token classifiers have one column of labeled spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

_SCORE: Final = pa.struct([("label", pa.string()), ("score", pa.float64())])
_FIELDS: Final = (*_SCORE, pa.field("probs", pa.list_(_SCORE)))
_PLACE: Final = [("start", pa.int64()), ("end", pa.int64()), ("text", pa.string())]
_SPANS: Final = (pa.field("spans", pa.list_(pa.struct([*_SCORE, *_PLACE]))),)


def label_fields(*, has_many: bool, has_spans: bool) -> list[pa.Field]:
    """Return the columns; with `has_many`, lists with an item per text of a request."""
    fields = _SPANS if has_spans else _FIELDS
    return [field.with_type(pa.list_(field.type)) if has_many else field for field in fields]


def label_columns(
    bodies: Sequence[Mapping[str, Any] | None], *, has_many: bool, has_spans: bool
) -> dict[str, pa.Array]:
    """Return the columns of `label_fields` by their names, null for a failed row."""
    rows = [None if body is None else _labeled(body) for body in bodies]
    return {
        field.name: pa.array([_cell(row, field.name, has_many) for row in rows], field.type)
        for field in label_fields(has_many=has_many, has_spans=has_spans)
    }


def _labeled(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of each text of a body."""
    labeled = []
    for item in body["data"]:
        if "spans" in item:
            labeled.append({"spans": item["spans"]})
            continue
        pairs = zip(body["labels"], item["probs"], strict=True)
        probs = [{"label": label, "score": score} for label, score in pairs]
        labeled.append({"label": item["label"], "score": max(item["probs"]), "probs": probs})
    return labeled


def _cell(row: list[dict[str, Any]] | None, name: str, has_many: bool) -> Any:  # noqa: FBT001
    if row is None:
        return None
    return [text[name] for text in row] if has_many else row[0][name]
