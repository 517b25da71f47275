"""Input of a batch, opened: a file of requests, or the rendered requests of a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from tidemill.batch.file.lines import MAX_LINE_BYTES
from tidemill.batch.file.request_text import request_text
from tidemill.offline.console.terminal import print_output
from tidemill.offline.files.input_file import InputFile
from tidemill.offline.files.source import Source, open_source
from tidemill.offline.files.table_options import TableOptions

NUM_SHOWN: Final = 3
_MAX_CHARS: Final = 10_000
"""Characters of a request that are printed; of a longer one, its beginning and its end."""


@contextmanager
def open_batch_input(
    file: str, table: TableOptions | None, tmp_dir: Path | None, *, is_table_written: bool = True
) -> Iterator[tuple[Source, InputFile | None]]:
    """Open a batch's input; for a table, also yield its requests. Raises BadInput."""
    if table is None:
        with open_source(file, tmp_dir=tmp_dir) as source:
            yield source, None
        return
    # Imported late: pyarrow is slow to load.
    from tidemill.offline.files.table_requests import open_requests

    with ExitStack() as stack:
        requests = open_requests(
            file,
            table.recipe,
            table.output_format if is_table_written else None,
            tmp_dir=tmp_dir,
            max_line_bytes=MAX_LINE_BYTES,
            dataset=table.dataset,
            stack=stack,
        )
        yield requests.source, requests


def print_first_requests(requests: InputFile) -> None:
    """Print the first requests of a table as they will be sent, or as text if they ask questions.

    The questions are the same in all rows, so that their JSON would hide the row.
    """
    has_questions = requests.table is not None and requests.table.recipe.questions
    for raw in islice(requests.lines(), NUM_SHOWN):
        line = json.loads(raw.data)
        if has_questions and "body" in line:
            shown = f"{request_text(line['body'])}\n"
        else:
            shown = json.dumps(line, ensure_ascii=False, indent=2)
        print_output(f"row {raw.number:,}:\n{_excerpt(shown)}")


def _excerpt(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    part = _MAX_CHARS // 2
    return f"{text[:part]}\n[{len(text) - 2 * part:,} more characters]\n{text[-part:]}"
