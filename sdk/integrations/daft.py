"""Daft: `answer` adds the answers of a recipe to a DataFrame, with one engine a process."""

from __future__ import annotations

from typing import Any, Final

from ..errors import EngineDied, TidemillError
from .options import require, split_options

require("tidemill.daft", "daft", "tables")

import daft  # noqa: E402 - told first if it is missing
import pyarrow as pa  # noqa: E402

from .batch_answers import BatchAnswers  # noqa: E402
from .process_engine import drop_engine, process_engine  # noqa: E402

# Daft has 64 batches in flight, which keeps an engine of 1,024 sequences busy.
_BATCH_ROWS: Final = 64
_MAX_RETRIES: Final = 3


def answer(df: daft.DataFrame, *, model: str | None = None, **options: Any) -> daft.DataFrame:
    """Return a DataFrame with the answers to its rows beside its columns, as `tidemill run` does.

    `options` are the keys of a recipe (`prompt="Label: {{ text }}"`, `id="id"`) and the options of
    an engine (`max_num_seqs=64`). Nothing runs before the frame is collected. Rows come as they are
    finished. Raises TidemillError for what cannot work; a row that fails says so in column `error`.
    """
    if not isinstance(df, daft.DataFrame):
        raise TidemillError(f"give a DataFrame of Daft; this is a {type(df).__name__}")
    engine_options, recipe = split_options({"model": model, **options})
    answers = BatchAnswers(recipe, df.schema().to_pyarrow_schema())
    if not df.column_names:
        raise TidemillError("the table has no column")
    # A method of no column would be called at once.
    columns = answers.columns or (df.column_names[0],)

    @daft.cls(max_retries=_MAX_RETRIES, on_error="raise", name_override="tidemill")
    class Answerer:
        """Answers batches by the engine of its process; if that dies, by another."""

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
