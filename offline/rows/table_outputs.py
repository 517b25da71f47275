"""Result tables as rows of an output, so that `diff` can compare them like files.

The rows are written to a temporary file, because tables have no random access to rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidemill.batch.table.questions import question_columns_at_end

from ..console.errors import BadInput, Refused
from ..files.row_file import RowFile, plain_copy
from ..files.source import open_source, temporary_file
from .page.open_pages import table_rows

if TYPE_CHECKING:
    from .page.table_rows import TableRows

_BUFFER_BYTES: Final = 2**20


@contextmanager
def open_outputs(name: str, *, id_column: str | None, tmp_dir: Path | None) -> Iterator[RowFile]:
    """Open an output, a file of rows or a result table, as a file of rows.

    `id_column` contains a table's custom IDs. Raises BadInput for a table without results, and
    Refused if it does not have that column.
    """
    with ExitStack() as stack:
        source = stack.enter_context(open_source(name, tmp_dir=tmp_dir))
        table = table_rows(source, name, None)
        if table is None:
            yield RowFile(*stack.enter_context(plain_copy(source, tmp_dir)))
            return
        if not table.has_results:
            raise BadInput(
                f"{name} has no result columns: pass an output of `tidemill run`, such as "
                "reviews.output.csv"
            )
        file = temporary_file(stack, tmp_dir, _BUFFER_BYTES)
        try:
            file.writelines(_printed_rows(table, _id_column(table, id_column)))
            file.flush()
        except OSError as exc:
            raise BadInput(
                f"the rows of {name} cannot be copied to {tmp_dir or tempfile.gettempdir()} "
                f"({exc.strerror}): pass --output-tmp-dir to use another folder"
            ) from exc
        yield RowFile(file, source)


def _id_column(table: TableRows, given: str | None) -> str | None:
    """Return the column of custom IDs; None if rows are identified by number."""
    if given is not None and given not in table.kept_names:
        raise Refused(
            f"{table.name} has no column `{given}` for --id: it has {', '.join(table.kept_names)}"
        )
    return given or table.id_column


def _printed_rows(table: TableRows, id_column: str | None) -> Iterator[bytes]:
    for number, kept, results in table.cells():
        found = None if id_column is None else kept[id_column]
        custom_id = str(number) if found is None else str(found)
        row = {"custom_id": custom_id, **_outcome(results)}
        yield json.dumps(row, default=str).encode() + b"\n"


def _outcome(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response of a row, or its error without one."""
    usage, error = _parsed(results.get("usage")), results.get("error")
    if usage is None and error is not None:
        return {"response": None, "error": {"code": None, "message": str(error)}}
    body = {"usage": usage} | _answer(results)
    return {"response": {"status_code": 200, "body": body}, "error": None}


def _answer(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body fields with the answer, as its endpoint writes them."""
    # Late: it needs pyarrow, as tables do.
    from .page.table_rows import LABELED, MODERATED, POOLED, SPANS

    # The fields of a JSON schema, which follow the usage, may have any names.
    names = [*takewhile(lambda name: name != "usage", results)]
    if "embedding" in names:
        found = _parsed(results["embedding"]) or []
        vectors = found if found and isinstance(found[0], list) else [found]
        return {"data": [{"index": at, "embedding": each} for at, each in enumerate(vectors)]}
    if names in POOLED:
        cell = _parsed(results[names[0]]) or []
        return {"data": _pooled(cell, 1 if names == POOLED[0] else 2)}
    if "scores" in names:
        scores = _parsed(results["scores"]) or []
        return {"data": [{"index": at, "score": each} for at, each in enumerate(scores)]}
    if names in (LABELED, SPANS, MODERATED):
        return _classified(names, results)
    if "results" in names:
        return {"results": _parsed(results["results"]) or []}
    if questions := question_columns_at_end(names):
        return {"answers": [{"name": name, "choice": results[name]} for name, *_ in questions]}
    if "finish_reason" not in results:
        return {"text": results.get("text") or ""}
    reasons = _parsed(results["finish_reason"], only_lists=True)
    texts = results.get("text")
    if not isinstance(reasons, list):
        reasons, texts = [reasons], [texts]
    else:
        texts = _parsed(texts) or []
    calls = _parsed(results.get("tool_calls"))
    first = {"tool_calls": calls} if isinstance(calls, list) else {}
    return {
        "choices": [
            {"message": {"content": text, **first}, "finish_reason": reason}
            for text, reason in zip(texts, reasons, strict=False)
        ]
    }


def _pooled(cell: list[Any], depth: int) -> list[dict[str, Any]]:
    """Return the items of a cell of `/pooling`: lists of a depth, and one deeper for many texts."""
    first: Any = cell
    for _ in range(depth):
        first = first[0] if isinstance(first, list) and first else None
    texts = cell if isinstance(first, list) else [cell]
    return [{"index": at, "object": "pooling", "data": each} for at, each in enumerate(texts)]


def _classified(names: list[str], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a row of a classifier, by the names of its columns."""
    first, *others = names
    if not others:
        spans = _parsed(results[first]) or []
        texts = spans if spans and isinstance(spans[0], list) else [spans]
        return {"data": [{"index": at, "spans": each} for at, each in enumerate(texts)]}
    if first == "flagged":
        return {"results": _moderated(*(_parsed(results[name]) for name in names))}
    label = _parsed(results[first], only_lists=True)
    return {"data": _labeled(label, _parsed(results["probs"]) or [])}


def _labeled(label: Any, probs: list[Any]) -> list[dict[str, Any]]:
    """Return the labeled texts of a row; of several texts, `label` and `probs` are lists."""
    texts = zip(label, probs, strict=False) if isinstance(label, list) else [(label, probs)]
    return [
        {"index": at, "label": winner, "probs": [each["score"] for each in scores]}
        for at, (winner, scores) in enumerate(texts)
    ]


def _moderated(flagged: Any, categories: list[Any], scores: list[Any]) -> list[dict[str, Any]]:
    """Return the results of a row; of several texts, all three are lists with an item per text."""
    is_one = not isinstance(flagged, list)
    texts = (
        [(flagged, categories, scores)]
        if is_one
        else zip(flagged, categories, scores, strict=False)
    )
    return [
        {
            "flagged": is_flagged,
            "categories": dict.fromkeys(names or (), True),
            "category_scores": {each["category"]: each["score"] for each in found or ()},
        }
        for is_flagged, names, found in texts
    ]


def _parsed(cell: Any, *, only_lists: bool = False) -> Any:
    """Return the value of a CSV cell that contains JSON, and any other cell unchanged."""
    if not isinstance(cell, str) or (only_lists and not cell.startswith("[")):
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        return cell
