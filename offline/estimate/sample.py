"""Sample of a file: some of its lines run, spread evenly, to measure the others by."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from pydantic_core import from_json

from ..console.errors import Stopped
from ..engine.engine import load_engine
from ..files.input_file import InputFile, PlacedLine
from ..plan.line_index import LineIndex
from ..run.job import run_job
from ..run.run_options import RunOptions

_SIGNALS = 128  # a run that a signal has stopped ends with more by the signal's number


def spread_lines(
    requests: InputFile, index: LineIndex, most: int, refused: Collection[int] = ()
) -> Iterator[PlacedLine]:
    """Yield lines spread evenly over the file, all of a short one, but for those at some places."""
    places = np.setdiff1d(np.arange(len(index)), [*refused])
    chosen = np.linspace(0, len(places) - 1, min(len(places), most)).astype(int)
    return requests.read(index, places[chosen].tolist())


def run_sample(
    options: RunOptions,
    requests: InputFile,
    index: LineIndex,
    num_lines: int,
    refused: Collection[int],
) -> list[tuple[int, int]]:
    """Run lines of a file but the refused, whose rows are thrown away; return places and tokens.

    What tokens cost is kept as that of any run. Raises CliError as a run does.
    """
    with tempfile.TemporaryDirectory(dir=options.output_tmp_dir) as folder:
        source, output = Path(folder) / "sample.jsonl", Path(folder) / "rows.jsonl"
        lines = [*spread_lines(requests, index, num_lines, refused)]
        source.write_bytes(b"".join(line.raw.data + b"\n" for line in lines))
        # The lines are rendered requests of the chosen shard.
        sampled = replace(
            options,
            input_file=str(source),
            output_file=str(output),
            on_invalid_line="skip",
            table=None,
            shard=None,
            no_card=True,
        )
        status = run_job(sampled, load=partial(load_engine, weights_cache=options.weights_cache))
        if status > _SIGNALS:
            raise Stopped(status - _SIGNALS)
        rows = [from_json(row) for row in output.read_bytes().splitlines()]
    return [
        (line.place, int((body.get("usage") or {}).get("completion_tokens") or 0))
        for line, row in zip(lines, rows, strict=True)
        if row["response"] and (body := row["response"]["body"])
        if row["response"]["status_code"] == 200
    ]
