"""Spark: `answer` adds the answers of a recipe to a DataFrame, with one engine per executor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from ..engine import Questions
from ..errors import TidemillError
from .options import decision_keys, require, split_options

require("tidemill.spark", "spark", "tables")

import pyarrow as pa  # noqa: E402 - after the check for the extra
from pyspark import TaskContext  # noqa: E402
from pyspark.sql import DataFrame, types  # noqa: E402

from .batch_answers import BatchAnswers  # noqa: E402
from .hosted_engine import HostedEngine  # noqa: E402
from .sockets import socket_address  # noqa: E402

_TYPES = {
    pa.string(): types.StringType(),
    pa.bool_(): types.BooleanType(),
    pa.int8(): types.ByteType(),
    pa.int64(): types.LongType(),
    pa.float32(): types.FloatType(),
    pa.float64(): types.DoubleType(),
}
_engines: dict[str, HostedEngine] = {}


def answer(df: DataFrame, *, model: str | None = None, **options: Any) -> DataFrame:
    """Return a DataFrame with answers in columns next to its own, as `tidemill run` does.

    `options` are the keys of a recipe (`prompt="Label: {{ text }}"`, `id="id"`) and the options of
    an engine (`max_num_seqs=64`). Nothing runs before an action. Raises TidemillError for invalid
    options; column `error` contains the error of a failed row.
    """
    if not isinstance(df, DataFrame):
        raise TidemillError(f"`df` must be a Spark DataFrame; got a {type(df).__name__}")
    engine_options, recipe = split_options({"model": model, **options})
    answers = BatchAnswers(recipe, _arrow_schema(df.schema))
    _check_cases(answers)
    kept = [df.schema[name] for name in answers.keep]
    added = [types.StructField(field.name, _spark_type(field.type)) for field in answers.fields]
    run = partial(_answer_partition, answers, engine_options)
    return df.mapInArrow(run, types.StructType([*kept, *added]))


def decide(
    df: DataFrame,
    input: str,
    questions: Questions,
    *,
    model: str | None = None,
    **options: Any,
) -> DataFrame:
    """Return a DataFrame with the answers to questions about the column `input`, as typed columns.

    `questions` have a recipe's short form (`"damaged: Is an item damaged?"`) or its keys (`name`,
    `instructions`, `choices` or `levels`). `options` are those of `answer`.
    """
    return answer(df, model=model, **{**options, **decision_keys(input, questions)})


def _answer_partition(
    answers: BatchAnswers, options: Mapping[str, Any], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the answers to a partition, in a task's process; raises EngineDied."""
    remaining = iter(batches)
    first = next((batch for batch in remaining if batch.num_rows), None)
    if first is not None:
        yield from answers.answered(_executor_engine(options), chain([first], remaining))


def _executor_engine(options: Mapping[str, Any]) -> HostedEngine:
    """Return the executor's engine on the task's GPUs, or a new one if it has died."""
    gpus = _gpus_of_task()
    # The processes of an executor's tasks are children of one process.
    address = socket_address(os.getppid(), options, gpus)
    engine = _engines.get(address)
    if engine is None or engine.is_dead:
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        engine = _engines[address] = HostedEngine(address, options, env)
    return engine


def _gpus_of_task() -> list[str]:
    context = TaskContext.get()
    found = context.resources().get("gpu") if context is not None else None
    return sorted(found.addresses) if found is not None else []


def _arrow_schema(schema: types.StructType) -> pa.Schema:
    """Return the columns with the only type information that a recipe needs: which are lists."""
    some, lists = pa.null(), pa.list_(pa.null())
    return pa.schema(
        [
            (field.name, lists if isinstance(field.dataType, types.ArrayType) else some)
            for field in schema.fields
        ]
    )


def _check_cases(answers: BatchAnswers) -> None:
    """Raise TidemillError if an answer's column differs from a kept one only by case."""
    kept = {name.lower(): name for name in answers.keep}
    for field in answers.fields:
        if (name := kept.get(field.name.lower())) is not None:
            raise TidemillError(
                f"Spark does not distinguish `{name}` from the answers' column `{field.name}`: "
                f"rename `{name}`, or remove it from `keep`"
            )


def _spark_type(kind: pa.DataType) -> types.DataType:
    if pa.types.is_list(kind):
        return types.ArrayType(_spark_type(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [types.StructField(field.name, _spark_type(field.type)) for field in kind]
        return types.StructType(fields)
    if kind not in _TYPES:
        raise TidemillError(f"Spark does not support {kind}: set `vectors` to float32 or int8")
    return _TYPES[kind]
