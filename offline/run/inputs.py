"""Input of a run or an estimate: checks its paths, opens the file, and reads it once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tidemill.batch.file.lines import MAX_LINE_BYTES
from tidemill.engine.config import EngineConfig
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.protocol.routes import ENDPOINTS

from ..console.terminal import log
from ..engine.engine import chat_template
from ..files.http_transfer import RETRY_DELAYS_SECONDS
from ..files.input_check import InputReport, check_lines
from ..files.input_file import InputFile
from ..files.paths import check_folder, check_paths
from ..files.source import open_source
from ..plan.line_index import LineIndex
from .reuse import Reuse
from .run_options import RunOptions


def check_names(options: RunOptions) -> None:
    """Raise Refused for invalid paths, before anything is opened."""
    names = options.input_file, options.output_file, options.error_file
    check_paths(*names, is_table=options.table is not None)
    if options.output_tmp_dir is not None:
        check_folder(options.output_tmp_dir, "--output-tmp-dir")


def open_input(
    options: RunOptions, stack: ExitStack, delays: Sequence[float] = RETRY_DELAYS_SECONDS
) -> InputFile:
    """Open the input: unpack a compressed one, render a table, and select the lines of a shard."""
    requests = _open_whole(options, stack, tuple(delays))
    if options.shard is None:
        return requests
    requests = requests.select(options.shard)
    log(f"{options.shard}: {_lines_of(requests)}")
    return requests


def _open_whole(options: RunOptions, stack: ExitStack, delays: tuple[float, ...]) -> InputFile:
    limit, tmp_dir = options.max_line_bytes or MAX_LINE_BYTES, options.output_tmp_dir
    if options.table is not None:
        # Imported late: pyarrow is slow to load.
        from ..files.table_requests import open_requests

        return open_requests(
            options.input_file,
            options.table.recipe,
            options.table.output_format,
            tmp_dir=tmp_dir,
            max_line_bytes=limit,
            delays=delays,
            dataset=options.table.dataset,
            stack=stack,
        )
    source = open_source(options.input_file, tmp_dir=tmp_dir, delays=delays)
    requests = InputFile.from_source(stack.enter_context(source), limit, options.line_url)
    if (vendor := requests.form.vendor) is not None:
        from tidemill.batch.file.vendor_rows import FORMS  # late: few files are vendors'

        how = "; `tidemill convert` writes rows in their form" if vendor in FORMS else ""
        log(f"{requests.name} contains {requests.form.contents}{how}")
    return requests.unpack(tmp_dir, stack)


def _lines_of(requests: InputFile) -> str:
    """Return `lines 301 to 400 of requests.jsonl`, which includes blank lines."""
    assert requests.part is not None
    first, end = requests.part.first.number, requests.part.end.number
    if requests.part.end.start > requests.part.first.start:
        return f"{requests.form.unit}s {first:,} to {end - 1:,} of {requests.source.name}"
    return f"no {requests.form.unit} of {requests.source.name}"


def check_input(
    options: RunOptions,
    requests: InputFile,
    names: Sequence[str],
    config: EngineConfig,
    index: LineIndex,
    *,
    reuse: Reuse | None = None,
) -> InputReport:
    """Read all lines, fill their index, look up stored results, and return the report."""
    return check_lines(
        requests,
        names,
        adapters=[module.name for module in config.lora_modules],
        endpoints=endpoints_of(config, chat_template(options)) or ENDPOINTS,
        defaults=options.defaults,
        tmp_dir=options.output_tmp_dir,
        index=index,
        look_up=None if reuse is None else reuse.look_up,
    )
