"""Table actor: answers batches of a table by a recipe, in any order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pyarrow as pa

from ..batch_answers import BatchAnswers
from .engine_actor import EngineActor


class TableActor:
    """Ray's callable class for `answer`: an engine of `options`, and the `keys` of a recipe."""

    def __init__(self, keys: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._keys = keys
        self._engine = EngineActor(options)
        self._answers: dict[pa.Schema, BatchAnswers] = {}

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield the kept columns of a table with the answers to its rows."""
        answers = self._answers_of(table.schema)
        schema = pa.schema([*(table.schema.field(name) for name in answers.keep), *answers.fields])
        answered = []
        for batch in table.to_batches():
            inputs = batch.select(list(answers.columns))
            async with self._engine.reserve(inputs.nbytes) as engine:
                found = await answers.answer_columns(engine, batch)
            kept = [batch.column(name) for name in answers.keep]
            answered.append(pa.RecordBatch.from_arrays([*kept, *found.flatten()], schema=schema))
        yield pa.Table.from_batches(answered, schema)

    def _answers_of(self, schema: pa.Schema) -> BatchAnswers:
        if schema not in self._answers:
            self._answers[schema] = BatchAnswers(self._keys, schema)
        return self._answers[schema]
