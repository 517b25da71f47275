"""Line actor: answers batches whose requests are a column of lines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pyarrow as pa

from .engine_actor import EngineActor
from .processor_requests import LINES
from .processor_results import ROWS


class LineActor:
    """Ray's callable class for processors: replaces the column of lines with a column of rows.

    A request without a seed is sampled with new random numbers each time, as in vLLM.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._engine = EngineActor(options)

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield the table with its rows."""
        lines = table.column(LINES).to_pylist()
        async with self._engine.reserve(sum(map(len, lines))) as engine:
            sent = [engine.send_line(random.getrandbits(63), line).future for line in lines]
            rows = await asyncio.gather(*map(asyncio.wrap_future, sent))
        place = table.schema.get_field_index(LINES)
        yield table.set_column(place, ROWS, pa.array([row.row for row in rows], pa.binary()))
