"""`tidemill view`: prints the rows of an output for reading, or shows them in a browser."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from tidemill.offline.arguments.argument_types import (
    nonblank_text,
    port_number,
    positive_int,
)
from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.console.errors import Refused, Stopped
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import log, print_output
from tidemill.offline.files.paths import STANDARD_STREAM, check_input_path

if TYPE_CHECKING:
    from tidemill.offline.rows.view import ViewedRow

_MAX_CHARS = 1_000
_PRINTED_ROWS = 20
_PAGE_ROWS = 50
_MAX_PAGE_ROWS = 1_000
_EPILOG = """\
examples:
  tidemill view requests.output.jsonl -i requests.jsonl | less
  tidemill view rows.jsonl --errors -n 100
  tidemill view rows.jsonl --grep "cannot help"
  tidemill view reviews.output.parquet
  tidemill view requests.output.jsonl -i requests.jsonl --browser

exit status:
  0  the rows were printed, or none matches; Ctrl-C ended the page
  1  an invalid input, or standard output was closed
  2  invalid arguments or paths
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `view` to the command line."""
    parser = commands.add_parser(
        "view",
        help="print the rows of an output for reading, or show them in a browser",
        description="Print answers for reading, each next to its request if the file of requests\n"
        "is given and the terminal is wide enough. With --browser, serve them as a web page on\n"
        "this machine until Ctrl-C.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "rows",
        metavar="ROWS",
        help="read rows of Tidemill or OpenAI, or a table of results: a path, - or an http(s) URL",
    )
    add("-i", "--input-file", metavar="FILE", help="read the requests of ROWS from here")
    add(
        "--id",
        metavar="COLUMN",
        help="take a table's custom IDs from this column (default: the recipe's, custom_id or id)",
    )
    add("--errors", action="store_true", help="show only failed rows")
    add(
        "--grep",
        type=nonblank_text,
        metavar="TEXT",
        help="show only rows with this text in their custom_id, answer or error, ignoring case",
    )
    add(
        "-n",
        "--num-rows",
        type=positive_int,
        metavar="N",
        help=f"print N rows (default: {_PRINTED_ROWS}), or show N per page (default: {_PAGE_ROWS})",
    )
    add("--full", action="store_true", help=f"do not truncate texts at {_MAX_CHARS:,} characters")
    add("--browser", action="store_true", help="show the rows in a browser, on 127.0.0.1 only")
    add(
        "--port",
        type=port_number,
        metavar="PORT",
        help="serve the page on this port (default: a free one)",
    )
    add_tmp_dir_flag(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Print the rows, or serve them as a web page, and return the exit status."""
    name, requests = arguments.rows, arguments.input_file
    if name == requests == STANDARD_STREAM:
        raise Refused("only one of the two files can be standard input")
    for each in (name, requests or name):
        check_input_path(each)
    if arguments.browser:
        return _serve_page(arguments)
    if arguments.port is not None:
        raise Refused("--port requires --browser")
    return _print_rows(arguments)


def _print_rows(arguments: argparse.Namespace) -> int:
    from tidemill.offline.files.source import open_source
    from tidemill.offline.rows.view import matching_rows, render_row, with_requests

    name, requests = arguments.rows, arguments.input_file
    tmp_dir, max_chars = arguments.output_tmp_dir, None if arguments.full else _MAX_CHARS
    with StopSignals(), _open_viewed(name, requests, tmp_dir, arguments.id) as rows:
        found = matching_rows(rows, only_errors=arguments.errors, pattern=arguments.grep)
        shown = [*islice(found, arguments.num_rows or _PRINTED_ROWS)]
        is_more = next(found, None) is not None
        if requests is not None:
            with open_source(requests, tmp_dir=tmp_dir) as source:
                shown = with_requests(shown, source)
        for row in shown:
            print_output(render_row(row, max_chars))
    if is_more:
        log("there are more rows: print more with -n N")
    elif not shown:
        log(f"no row of {name} matches")
    return 0


@contextmanager
def _open_viewed(
    name: str, requests: str | None, tmp_dir: Path | None, id_column: str | None
) -> Iterator[Iterator[ViewedRow]]:
    """Open the rows of a JSONL file, or of a table, whose input columns are the requests."""
    from tidemill.offline.files.row_file import RowFile, plain_copy
    from tidemill.offline.files.source import open_source
    from tidemill.offline.rows.page.open_pages import table_rows
    from tidemill.offline.rows.view import viewed_lines

    with open_source(name, tmp_dir=tmp_dir) as source:
        table = table_rows(source, name, requests, id_column)
        if table is None:
            with plain_copy(source, tmp_dir) as plain:
                yield viewed_lines(RowFile(*plain))
            return
        yield table.rows()


def _serve_page(arguments: argparse.Namespace) -> int:
    from tidemill.offline.rows.page.open_pages import open_page
    from tidemill.offline.rows.page.page_server import PageServer

    name, page_rows = arguments.rows, min(arguments.num_rows or _PAGE_ROWS, _MAX_PAGE_ROWS)
    if arguments.full:
        raise Refused(
            "--full is not supported with --browser: click a row on the page to show it in full"
        )
    with (
        StopSignals(),
        open_page(name, arguments.input_file, arguments.output_tmp_dir, arguments.id) as page,
    ):
        try:
            server = PageServer(page, page_rows, arguments.port or 0)
        except OSError as exc:
            raise Refused(f"cannot listen on port {arguments.port}: {exc.strerror}") from exc
        with server:
            url = server.url + _search(arguments)
            print_output(url)
            log("press Ctrl-C to stop the page; anyone on this machine can read it with this URL")
            if _has_desktop():
                webbrowser.open(url)
            with suppress(Stopped):
                server.serve_forever()
    return 0


def _search(arguments: argparse.Namespace) -> str:
    """Return the URL fragment that selects the rows the page shows first."""
    status = {"status": "failed"} if arguments.errors else {}
    text = {"text": arguments.grep} if arguments.grep else {}
    return f"#/?{urlencode(status | text)}" if status or text else ""


def _has_desktop() -> bool:
    """Return whether a graphical browser can open; a text browser might take over the terminal."""
    names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform == "darwin" or any(map(os.environ.get, names))
