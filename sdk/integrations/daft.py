"""Daft: `answer` adds the answers of a recipe to a DataFrame, with one engine per process."""

from __future__ import annotations

from typing import Any, Final

from ..engine import Questions
from ..errors import EngineDied, TidemillError
from .options import decision_keys, require, split_options

require("tidemill.daft", "daft", "tables")

import daft  # noqa: E402 - after the check for the extra
import pyarrow as pa  # noqa: E402

from .batch_answers import BatchAnswers  # noqa: E402
from .process_engine import drop_engine, process_engine  # noqa: E402

# Daft keeps 64 batches in flight, enough for an engine with 1,024 sequences.
_BATCH_ROWS: Final = 64
_MAX_RETRIES: Final = 3


def answer(df: daft.DataFrame, *, model: str | None = None, **options: Any) -> daft.DataFrame:
    """Return a DataFrame with answers in columns next to its own, as `tidemill run` does.

    `options` are the keys of a recipe (`prompt="Label: {{ text }}"`, `id="id"`) and the options of
    an engine (`max_num_seqs=64`). Nothing runs before the frame is collected. Rows are returned as
    they finish. Raises TidemillError for invalid options; column `error` contains the error of a
    failed row.
    """
    if not isinstance(df, daft.DataFrame):
        raise TidemillError(f"`df` must be a Daft DataFrame; got a {type(df).__name__}")
    engine_options, recipe = split_options({"model": model, **options})
    answers = BatchAnswers(recipe, df.schema().to_pyarrow_schema())
    if not df.column_names:
        raise TidemillError("the table has no columns")
    # Daft would call a method without columns immediately.
    columns = answers.columns or (df.column_names[0],)

    @daft.cls(max_retries=_MAX_RETRIES, on_error="raise", name_override="tidemill")
    class Answerer:
        """Answers batches with the engine of its process; starts a new one if that dies."""

        @daft.method.batch(  # type: ignore[untyped-decorator]
            return_dtype=daft.DataType.from_arrow_type(pa.struct(answers.fields)),
            unnest=True,
            batch_size=_BATCH_ROWS,
        )
        async def answer(self, *series: daft.Series) -> daft.Series:
            """Return the answers to rows."""
            self.engine = process_engine(engine_options)
            arrays = [column.to_arrow() for column in series]
            batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
            try:
                found = await answers.answer_columns(self.engine.process, batch)
            except EngineDied:
                drop_engine(self.engine)
                raise
            return daft.Series.from_arrow(found)

    answered = Answerer().answer(*(df[name] for name in columns))
    return df.select(*answers.keep, answered)


def decide(
    df: daft.DataFrame,
    input: str,
    questions: Questions,
    *,
    model: str | None = None,
    **options: Any,
) -> daft.DataFrame:
    """Return a DataFrame with the answers to questions about the column `input`, as typed columns.

    `questions` have a recipe's short form (`"damaged: Is an item damaged?"`) or its keys (`name`,
    `instructions`, `choices` or `levels`). `options` are those of `answer`.
    """
    return answer(df, model=model, **{**options, **decision_keys(input, questions)})
