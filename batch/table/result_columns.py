"""Result columns: results as columns next to the retained columns of the table."""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
from pyarrow import compute
from pydantic_core import from_json, to_json

from tidemill.protocol.reasoning_fields import reasoning_of
from tidemill.protocol.routes import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    GENERATIVE_SCORING,
    MODERATIONS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)

from ..calibration.report import brief_report
from ..file.answers import chat_of_response
from ..file.decided_row import ESCALATION_ERROR
from ..file.rows import row_error_message
from .answer_types import JSON_TEXT, column_of_answers, fields_of_schema, is_json_text, parse_answer
from .cascade_keys import MODEL_COLUMNS
from .confidence_columns import confidence_columns
from .errors import RecipeError
from .label_columns import label_columns, label_fields, moderation_columns, moderation_fields
from .question_columns import all_question_fields, question_columns
from .question_counts import QuestionCounts
from .questions import CALIBRATED, Probabilities, check_free_columns, probabilities_of
from .recipe import Recipe, VectorType

if TYPE_CHECKING:
    from ..calibration.calibration import Calibration

PREFIX: Final = "output_"
"""Prefix of a result column's name if a retained column already has it."""

USAGE: Final = pa.struct(
    [(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
)
_SECONDS: Final = pa.struct([("seconds", pa.int64())])
_SCORES: Final = pa.field("scores", pa.list_(pa.float64()))
_RANKED: Final = pa.list_(pa.struct([("index", pa.int64()), ("relevance_score", pa.float64())]))
_NUMBERS: Final = {
    SCORE: _SCORES,
    GENERATIVE_SCORING: _SCORES,
    RERANK: pa.field("results", _RANKED),
}
_OF_TOKENS: Final = pa.list_(pa.list_(pa.float32()))
POOLED: Final = {
    "embed_sparse": pa.field(
        "sparse_embedding",
        pa.list_(pa.struct([("index", pa.int32()), ("value", pa.float32())])),
    ),
    "token_embed": pa.field("token_embeddings", _OF_TOKENS),
    "token_classify": pa.field("token_scores", _OF_TOKENS),
}
"""The column of each task of `/pooling`."""
_POOLED_ITEM = b'"object":"pooling"'
_VECTOR_TYPES: Final = {"float32": pa.float32(), "float16": pa.float16(), "int8": pa.int8()}
_BLOCK_BYTES = 2**18
_FLOAT_BYTES = 4
_INT8_SCALE = 127.0
_VECTOR_START = b'"embedding":"'
_NUM_CLASSES = b'"num_classes":'
_SPANS = b'"spans":['
_MODERATED = b'"category_scores":{'
_REASONING = (b'"reasoning":"', b'"reasoning_content":"', b'"type":"reasoning"')
_TOOL_CALLS = (b'"tool_calls":[', b'"type":"function_call"', b'"type":"custom_tool_call"')
_WRITING: Final = frozenset({CHAT_COMPLETIONS, COMPLETIONS, RESPONSES})
_HEARING: Final = frozenset({TRANSCRIPTIONS, TRANSLATIONS})
_CUT_OFF = "cut off at the token limit (finish_reason `length`): raise"
_NOT_AN_OBJECT = "The answer is not a JSON object of the schema."


@dataclass(frozen=True, slots=True)
class ResultFacts:
    """Facts about all rows that determine the column types.

    With `has_many` a request has several texts, with `has_spans` a token classifier labeled them.
    `num_floats` is the length of a vector, 0 without
    vectors. If a row has no vector the column is a list of any length: pyarrow 25 does not read
    Parquet's fixed-length lists with nulls.
    """

    has_reasoning: bool = False
    has_tool_calls: bool = False
    num_floats: int = 0
    has_many: bool = False
    has_missing_vectors: bool = False
    has_spans: bool = False

    @property
    def vector_size(self) -> int:
        """Length of the list type of a vector; -1 for a list of any length."""
        is_null = self.has_missing_vectors and not self.has_many
        return -1 if is_null or not self.num_floats else self.num_floats

    @classmethod
    def of_rows(cls, rows: Iterable[bytes], recipe: Recipe, *, labels_spans: bool = False) -> Self:
        """Read all rows once; if all have failed, their model `labels_spans` or does not."""
        if recipe.route in {CLASSIFY, POOLING}:
            most_labels, most_spans, most_pooled = _most_items(rows)
            labels_spans |= recipe.wants_spans
            has_spans = most_spans > 0 or (not most_labels and labels_spans)
            has_many = max(most_labels, most_spans, most_pooled) > 1
            return cls(has_many=has_many, has_spans=has_spans)
        if recipe.route is MODERATIONS:
            return cls(has_many=max((row.count(_MODERATED) for row in rows), default=0) > 1)
        if recipe.route is not EMBEDDINGS:
            has_reasoning = has_tool_calls = False
            for block in _blocks(rows):
                has_reasoning = has_reasoning or _has_any(block, _REASONING)
                has_tool_calls = has_tool_calls or _has_any(block, _TOOL_CALLS)
            return cls(has_reasoning=has_reasoning, has_tool_calls=has_tool_calls)
        facts = cls()
        for row in rows:
            if not facts.num_floats and (found := _without_vectors(row)[1]):
                facts = replace(facts, num_floats=len(a2b_base64(found[0])) // _FLOAT_BYTES)
            num_vectors = row.count(_VECTOR_START)
            if num_vectors > 1 and not facts.has_many:
                facts = replace(facts, has_many=True)
            if not num_vectors and not facts.has_missing_vectors:
                facts = replace(facts, has_missing_vectors=True)
        return facts


def _blocks(rows: Iterable[bytes]) -> Iterator[bytes]:
    """Yield rows joined, of bounded size unless one row exceeds it."""
    some, size = [], 0
    for row in rows:
        some.append(row)
        if (size := size + len(row)) >= _BLOCK_BYTES:
            yield b"".join(some)
            some, size = [], 0
    yield b"".join(some)


def _most_items(rows: Iterable[bytes]) -> tuple[int, int, int]:
    """Return the most labeled texts of a row, those with spans, and pooled ones."""
    most = (0, 0, 0)
    for row in rows:
        counts = map(row.count, (_NUM_CLASSES, _SPANS, _POOLED_ITEM))
        most = (max(most[0], next(counts)), max(most[1], next(counts)), max(most[2], next(counts)))
    return most


def kept_columns(recipe: Recipe, schema: pa.Schema) -> pa.Schema:
    """Return the columns of a table that its output also has."""
    keep = recipe.keep
    return schema if keep is None else pa.schema([schema.field(name) for name in keep])


ALL_COLUMNS: Final = ResultFacts(has_reasoning=True, has_tool_calls=True)
"""Placeholder for rows that do not exist yet, to check names."""


class ResultColumns:
    """Columns of a recipe's results; raises RecipeError for conflicting names or a URL without any.

    `schema` has the columns `kept` first; `counts` are those of the questions in all batches.
    Without a `calibration`, the answers of a recipe that calibrates are uncalibrated.
    """

    def __init__(
        self,
        recipe: Recipe,
        kept: pa.Schema,
        facts: ResultFacts,
        calibration: Calibration | None = None,
    ) -> None:
        self._recipe = recipe
        self.calibration = calibration
        self._facts = facts
        self._answers = fields_of_schema(recipe.answer_schema)
        self.counts = [QuestionCounts(question) for question in recipe.questions]
        self._fields = self._result_fields()
        self.kept = tuple(kept.names)
        self._confidences = confidence_columns(recipe)
        fields, taken = list(kept), set(kept.names)
        check_free_columns(recipe.questions, taken)
        more = [column.field for column in self._confidences]
        for field in (*self._fields, *self._answers, *more):
            name = _free_name(field.name, taken)
            if name is None:
                raise RecipeError(
                    f"the results need a column `{field.name}` or `{PREFIX}{field.name}`, and the "
                    "table has both: remove one from `keep`"
                )
            taken.add(name)
            fields.append(field.with_name(name))
        self.schema = pa.schema(fields)

    def batch(self, kept: Sequence[pa.Array], rows: Sequence[bytes]) -> pa.RecordBatch:
        """Return retained columns with the columns of their results, one row each."""
        vectors: list[list[bytes]] = []
        if self._facts.num_floats:
            found = [_without_vectors(row) for row in rows]
            rows, vectors = [row for row, _ in found], [texts for _, texts in found]
        parsed = [from_json(row, cache_strings="keys") for row in rows]
        bodies = [_body(row) for row in parsed]
        if self._recipe.route is RESPONSES:
            bodies = [None if body is None else chat_of_response(body) for body in bodies]
        columns = self._columns(bodies, vectors)
        errors = [
            row_error_message(row) or self._fault_of(body)
            if body is None or row.get("error") or body.get("error")
            else self._fault_of(body)
            for row, body in zip(parsed, bodies, strict=True)
        ]
        columns["error"] = pa.array(errors, pa.string())
        found = [columns[field.name] for field in self._fields]
        if self._answers:
            answers = [parse_answer(_first_text(body)) for body in bodies]
            found += [column_of_answers(answers, field) for field in self._answers]
        found += [column.array(bodies) for column in self._confidences]
        return pa.RecordBatch.from_arrays([*kept, *found], schema=self.schema)

    def summaries(self, *, is_brief: bool = False) -> list[dict[str, Any]]:
        """Return the counts of each question, with the report of its calibration."""
        reports = {} if self.calibration is None else self.calibration.reports
        if is_brief:
            reports = {name: brief_report(report) for name, report in reports.items()}
        return [
            counts.summary()
            | ({"calibration": reports[name]} if (name := counts.question.name) in reports else {})
            for counts in self.counts
        ]

    def _result_fields(self) -> list[pa.Field]:
        recipe = self._recipe
        fields = self._choice_fields() if recipe.route in _WRITING else self._other_fields()
        if not fields:
            raise RecipeError(
                f"{recipe.route.name} does not support tables: send its requests in a JSONL file"
            )
        fields += [pa.field("usage", self._usage_type), pa.field("error", pa.string())]
        more = MODEL_COLUMNS if recipe.has_models else ()
        return [*fields, *(pa.field(name, pa.string()) for name in more)]

    def _choice_fields(self) -> list[pa.Field]:
        recipe, facts = self._recipe, self._facts
        text = pa.list_(pa.string()) if recipe.num_choices > 1 else pa.string()
        fields = [pa.field("text", text)]
        if facts.has_reasoning:
            fields.append(pa.field("reasoning", text))
        if facts.has_tool_calls:
            fields.append(JSON_TEXT.with_name("tool_calls"))
        if recipe.wants_logprobs:
            fields.append(JSON_TEXT.with_name("logprobs"))
        return [*fields, pa.field("finish_reason", text)]

    def _other_fields(self) -> list[pa.Field]:
        """Return the columns of answers that are not choices, none if tables do not support any."""
        recipe, facts = self._recipe, self._facts
        if recipe.route is EMBEDDINGS:
            vector = pa.list_(_VECTOR_TYPES[recipe.vectors], facts.vector_size)
            return [pa.field("embedding", pa.list_(vector) if facts.has_many else vector)]
        if recipe.route in {POOLING, *_NUMBERS}:
            return [self._number_field()]
        if recipe.route is CLASSIFY:
            return label_fields(has_many=facts.has_many, has_spans=facts.has_spans)
        if recipe.route is MODERATIONS:
            return moderation_fields(has_many=facts.has_many)
        if recipe.route is DECISIONS:
            return all_question_fields(recipe.questions)
        return _transcript_fields(recipe.params) if recipe.route in _HEARING else []

    @property
    def _usage_type(self) -> pa.DataType:
        return _SECONDS if self._recipe.route in _HEARING else USAGE

    def _number_field(self) -> pa.Field:
        recipe = self._recipe
        if recipe.route is not POOLING:
            return _NUMBERS[recipe.route]
        field = POOLED[recipe.params["task"]]
        return field.with_type(pa.list_(field.type)) if self._facts.has_many else field

    def _columns(
        self, bodies: Sequence[Mapping[str, Any] | None], vectors: Sequence[list[bytes]]
    ) -> dict[str, pa.Array]:
        columns = {"usage": pa.array([_usage(body) for body in bodies], self._usage_type)}
        if self._recipe.has_models:
            models = [body and body.get("model") for body in bodies]
            reasons = [(body or {}).get(ESCALATION_ERROR, {}).get("message") for body in bodies]
            columns["model"] = pa.array(models, pa.string())
            columns[ESCALATION_ERROR] = pa.array(reasons, pa.string())
        if self._recipe.route in _WRITING:
            return columns | self._choice_columns(bodies)
        return columns | self._other_columns(bodies, vectors)

    def _other_columns(
        self, bodies: Sequence[Mapping[str, Any] | None], vectors: Sequence[list[bytes]]
    ) -> dict[str, pa.Array]:
        """Return the columns of `_other_fields` by their names."""
        route, facts, field = self._recipe.route, self._facts, self._fields[0]
        if route is CLASSIFY:
            return label_columns(bodies, has_many=facts.has_many, has_spans=facts.has_spans)
        if route is MODERATIONS:
            return moderation_columns(bodies, has_many=facts.has_many)
        if route is DECISIONS:
            return self._question_columns(bodies)
        if route in _HEARING:
            return _transcript_columns(bodies, self._recipe.params)
        if route is EMBEDDINGS:
            return {field.name: self._vectors(vectors, len(bodies), field.type)}
        cells = [
            self._pooled(body) if route is POOLING else _scores(body, field.name) for body in bodies
        ]
        return {field.name: pa.array(cells, field.type)}

    def _pooled(self, body: Mapping[str, Any] | None) -> list[Any] | None:
        """Return the cell of a body of `/pooling`, a list if requests have several texts."""
        if body is None:
            return None
        found = [item["data"] for item in body["data"]]
        return found if self._facts.has_many else found[0]

    def _question_columns(self, bodies: Sequence[Mapping[str, Any] | None]) -> dict[str, pa.Array]:
        """Return the columns of all questions, and count their answers."""
        columns: dict[str, pa.Array] = {}
        is_calibrated = self.calibration is not None and self.calibration.is_complete
        cells = [None if body is None else is_calibrated for body in bodies]
        columns[CALIBRATED] = pa.array(cells, pa.bool_())
        for place, counts in enumerate(self.counts):
            question = counts.question
            found = None if self.calibration is None else self.calibration.of(question.name)
            rows: list[Probabilities | None] = []
            raw: list[Probabilities | None] = []
            for body in bodies:
                answer = None if body is None else body["answers"][place]
                row = None if answer is None else probabilities_of(question, answer)
                raw.append(row)
                if row is not None and found is not None:
                    row = tuple(found.map(row))
                rows.append(row)
                if body is not None and row is not None:
                    diagnostics = body.get("diagnostics")
                    counts.add(row, diagnostics[place] if diagnostics else None)
            columns |= question_columns(question, rows, raw)
        return columns

    def _choice_columns(self, bodies: Sequence[Mapping[str, Any] | None]) -> dict[str, pa.Array]:
        """Return columns of choices: lists if a request has several."""
        number = self._recipe.num_choices
        choices = [body.get("choices") or [] if body else [] for body in bodies]
        messages = [[choice.get("message") or choice for choice in each] for each in choices]
        columns = {}
        for field in self._fields:
            match field.name:
                case "usage" | "error":
                    continue
                case "text":
                    values = [[_text_of(one) for one in each] for each in messages]
                case "finish_reason" | "logprobs":
                    values = [[one.get(field.name) for one in each] for each in choices]
                case "reasoning":
                    values = [[reasoning_of(one) for one in each] for each in messages]
                case _:
                    values = [[one.get(field.name) for one in each] for each in messages]
            columns[field.name] = _choice_column(values, field, number)
        return columns

    def _fault_of(self, body: Mapping[str, Any] | None) -> str | None:
        """Return why the answer of a successful row is incomplete; None if it is complete."""
        choices = (body.get("choices") if body else None) or []
        complete = [self._is_complete(choice) for choice in choices]
        if all(complete):
            return None
        if not any(choice.get("finish_reason") == "length" for choice in choices):
            return _NOT_AN_OBJECT
        which = "The answer was"
        if len(choices) > 1:
            which = f"{complete.count(False)} of {len(choices)} answers were"
        limit = "max_output_tokens" if self._recipe.route is RESPONSES else "max_tokens"
        return f"{which} {_CUT_OFF} {limit}."

    def _is_complete(self, choice: Mapping[str, Any]) -> bool:
        """Return whether an answer is complete: an object with a schema, else not truncated."""
        is_cut: bool = choice.get("finish_reason") == "length"
        if not self._answers:
            return not is_cut
        text = _text_of(choice.get("message") or choice)
        if text is None and not is_cut:  # a tool call
            return True
        return isinstance(parse_answer(text), dict)

    def _vectors(self, each: Sequence[list[bytes]], num_rows: int, kind: pa.DataType) -> pa.Array:
        """Return the vectors of each row, decoded directly from base64."""
        size = self._facts.num_floats
        if not size:
            return pa.nulls(num_rows, kind)
        data = b"".join([a2b_base64(text) for texts in each for text in texts])
        floats = pa.Array.from_buffers(
            pa.float32(), len(data) // _FLOAT_BYTES, [None, pa.py_buffer(data)]
        )
        values = _narrowed(floats, self._recipe.vectors)
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(values, type=kind)
        step = size
        if self._facts.has_many:
            values, step = pa.FixedSizeListArray.from_arrays(values, type=kind.value_type), 1
        offsets, end = [], 0
        for texts in each:
            offsets.append(end if texts else None)
            end += len(texts) * step
        return pa.ListArray.from_arrays(pa.array([*offsets, end], pa.int32()), values, type=kind)


def _transcript_fields(params: Mapping[str, Any]) -> list[pa.Field]:
    """Return the columns of a transcript; with `verbose_json`, its language and times as JSON."""
    fields = [pa.field("text", pa.string())]
    if params.get("response_format") == "verbose_json":
        name = "timestamp_granularities"
        times = str(params.get(name) or params.get(f"{name}[]") or "segment")
        fields.append(pa.field("language", pa.string()))
        found = [f"{each}s" for each in ("segment", "word") if each in times]
        fields += [JSON_TEXT.with_name(each) for each in found]
    return fields


def _transcript_columns(
    bodies: Sequence[Mapping[str, Any] | None], params: Mapping[str, Any]
) -> dict[str, pa.Array]:
    return {
        field.name: _choice_column([[body and body.get(field.name)] for body in bodies], field, 1)
        for field in _transcript_fields(params)
    }


def _has_any(rows: bytes, signs: Sequence[bytes]) -> bool:
    return any(sign in rows for sign in signs)


def _without_vectors(row: bytes) -> tuple[bytes, list[bytes]]:
    """Return a row with empty vectors, which parses twice as fast, and their base64."""
    rest, *pieces = row.split(_VECTOR_START)
    if not pieces:
        return row, []
    texts, kept = [], [rest]
    for piece in pieces:
        text, _, after = piece.partition(b'"')
        texts.append(text)
        kept.append(after)
    return (_VECTOR_START + b'"').join(kept), texts


def _free_name(name: str, taken: set[str]) -> str | None:
    return next((one for one in (name, f"{PREFIX}{name}") if one not in taken), None)


def _narrowed(floats: pa.Array, kind: VectorType) -> pa.Array:
    if kind == "int8":
        scaled = compute.round(compute.multiply(floats, pa.scalar(_INT8_SCALE, pa.float32())))
        low = compute.max_element_wise(scaled, pa.scalar(-_INT8_SCALE, pa.float32()))
        floats = compute.min_element_wise(low, pa.scalar(_INT8_SCALE, pa.float32()))
    return floats if kind == "float32" else floats.cast(_VECTOR_TYPES[kind])


def _body(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the body of a successful row."""
    response = row.get("response")
    if not isinstance(response, dict) or response.get("status_code") != 200:
        return None
    body = response.get("body")
    return body if isinstance(body, dict) else None


def _usage(body: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    found = body.get("usage") if body else None
    if not isinstance(found, dict):
        return None
    if "input_tokens" in found:  # of a decision
        names = ("input_tokens", "output_tokens", "total_tokens")
        return dict(zip(USAGE.names, map(found.get, names), strict=True))
    return found


def _scores(body: Mapping[str, Any] | None, name: str) -> list[Any] | None:
    if body is None:
        return None
    if name == "scores":
        return [one["score"] for one in body["data"]]
    names = ("index", "relevance_score")
    return [{name: one[name] for name in names} for one in body["results"]]


def _text_of(message: Mapping[str, Any]) -> Any:
    return message.get("content", message.get("text"))


def _first_text(body: Mapping[str, Any] | None) -> Any:
    choices = (body or {}).get("choices") or [{}]
    return _text_of(choices[0].get("message") or choices[0])


def _choice_column(values: Sequence[list[Any]], field: pa.Field, number: int) -> pa.Array:
    if number > 1:
        found: list[Any] = [each or None for each in values]
    else:
        found = [each[0] if each else None for each in values]
    if is_json_text(field):
        return pa.array(
            [None if one is None else to_json(one).decode() for one in found], pa.string()
        )
    return pa.array(found, field.type)
