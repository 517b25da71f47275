"""Columns of classified rows: the label of a text, its number, and the numbers of all labels.

Rows of token classifiers have one column of labeled spans. Those of moderations say whether a text
is flagged, and have its categories and the scores of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

_SCORE: Final = pa.struct([("label", pa.string()), ("score", pa.float64())])
_FIELDS: Final = (*_SCORE, pa.field("probs", pa.list_(_SCORE)))
_PLACE: Final = [("start", pa.int64()), ("end", pa.int64()), ("text", pa.string())]
_SPANS: Final = (pa.field("spans", pa.list_(pa.struct([*_SCORE, *_PLACE]))),)
_CATEGORY_SCORE: Final = pa.struct([("category", pa.string()), ("score", pa.float64())])
_MODERATED: Final = (
    pa.field("flagged", pa.bool_()),
    pa.field("categories", pa.list_(pa.string())),
    pa.field("category_scores", pa.list_(_CATEGORY_SCORE)),
)


def label_fields(*, has_many: bool, has_spans: bool) -> list[pa.Field]:
    """Return the columns; with `has_many`, lists with an item per text of a request."""
    return _of_texts(_SPANS if has_spans else _FIELDS, has_many=has_many)


def moderation_fields(*, has_many: bool) -> list[pa.Field]:
    """Return the columns of moderations; with `has_many`, lists with an item per text."""
    return _of_texts(_MODERATED, has_many=has_many)


def label_columns(
    bodies: Sequence[Mapping[str, Any] | None], *, has_many: bool, has_spans: bool
) -> dict[str, pa.Array]:
    """Return the columns of `label_fields` by their names, null for a failed row."""
    rows = [None if body is None else _labeled(body) for body in bodies]
    return _arrays(rows, label_fields(has_many=has_many, has_spans=has_spans), has_many=has_many)


def moderation_columns(
    bodies: Sequence[Mapping[str, Any] | None], *, has_many: bool
) -> dict[str, pa.Array]:
    """Return the columns of `moderation_fields` by their names, null for a failed row."""
    rows = [None if body is None else [*map(_moderated, body["results"])] for body in bodies]
    return _arrays(rows, moderation_fields(has_many=has_many), has_many=has_many)


def _of_texts(fields: Sequence[pa.Field], *, has_many: bool) -> list[pa.Field]:
    return [field.with_type(pa.list_(field.type)) if has_many else field for field in fields]


def _arrays(
    rows: Sequence[list[dict[str, Any]] | None], fields: Sequence[pa.Field], *, has_many: bool
) -> dict[str, pa.Array]:
    return {
        field.name: pa.array([_cell(row, field.name, has_many) for row in rows], field.type)
        for field in fields
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


def _moderated(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a text."""
    scores = result["category_scores"].items()
    return {
        "flagged": result["flagged"],
        "categories": [name for name, is_flagged in result["categories"].items() if is_flagged],
        "category_scores": [{"category": name, "score": score} for name, score in scores],
    }


def _cell(row: list[dict[str, Any]] | None, name: str, has_many: bool) -> Any:  # noqa: FBT001
    if row is None:
        return None
    return [text[name] for text in row] if has_many else row[0][name]
