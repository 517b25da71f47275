"""`tidemill view`: rows of an output, to read them."""

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
  1  a bad input, or the reader went away
  2  arguments or paths that cannot work
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `view` to the command line."""
    parser = commands.add_parser(
        "view",
        help="print rows of an output to read them",
        description="Prints the answers of rows for people to read, each beside its request if\n"
        "the file of requests is given and the terminal is wide. With --browser a page on this\n"
        "machine shows them, until Ctrl-C.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "rows",
        metavar="ROWS",
        help="a path, - or an http(s) URL of rows, ours or OpenAI's, or of a table of results",
    )
    add("-i", "--input-file", metavar="FILE", help="the requests that ROWS answers")
    add("--errors", action="store_true", help="only rows that failed")
    add(
        "--grep",
        type=nonblank_text,
        metavar="WORDS",
        help="only rows with these words in their custom_id, answer or error, in any case",
    )
    add(
        "-n",
        "--num-rows",
        type=positive_int,
        metavar="N",
        help=f"rows to print (default: {_PRINTED_ROWS}), or on a page (default: {_PAGE_ROWS})",
    )
    add("--full", action="store_true", help=f"print texts of more than {_MAX_CHARS:,} characters")
    add("--browser", action="store_true", help="show the rows in a browser, on 127.0.0.1 only")
    add("--port", type=port_number, metavar="PORT", help="that of the page (default: a free one)")
    add(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="where files that are compressed or no file lie meanwhile (default: the system's)",
    )
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Print the rows, or serve a page of them, and return the exit status."""
    name, requests = arguments.rows, arguments.input_file
    if name == requests == STANDARD_STREAM:
        raise Refused("standard input can be one of the two files only")
    for each in (name, requests or name):
        check_input_path(each)
    if arguments.browser:
        return _serve_page(arguments)
    if arguments.port is not None:
        raise Refused("--port is that of --browser")
    return _print_rows(arguments)


def _print_rows(arguments: argparse.Namespace) -> int:
    from tidemill.offline.files.source import open_source
    from tidemill.offline.rows.view import matching_rows, render_row, with_requests

    name, requests = arguments.rows, arguments.input_file
    tmp_dir, max_chars = arguments.output_tmp_dir, None if arguments.full else _MAX_CHARS
    with StopSignals(), _open_viewed(name, requests, tmp_dir) as rows:
        found = matching_rows(rows, only_errors=arguments.errors, pattern=arguments.grep)
        shown = [*islice(found, arguments.num_rows or _PRINTED_ROWS)]
        is_more = next(found, None) is not None
        if requests is not None:
            with open_source(requests, tmp_dir=tmp_dir) as source:
                shown = with_requests(shown, source)
        for row in shown:
            print_output(render_row(row, max_chars))
    if is_more:
        log("there are more rows: -n N prints more")
    elif not shown:
        log(f"no row of {name} matches")
    return 0


@contextmanager
def _open_viewed(
    name: str, requests: str | None, tmp_dir: Path | None
) -> Iterator[Iterator[ViewedRow]]:
    """Open the rows of a file of JSONL, or of a table, whose kept columns are the requests."""
    from tidemill.offline.files.row_file import RowFile, plain_copy
    from tidemill.offline.files.source import open_source
    from tidemill.offline.rows.page.open_pages import table_rows
    from tidemill.offline.rows.view import viewed_lines

    with open_source(name, tmp_dir=tmp_dir) as source:
        table = table_rows(source, name, requests)
        if table is None:
            with plain_copy(source, tmp_dir) as plain:
                yield viewed_lines(RowFile(*plain))
            return
        yield filter(None, table.rows(1))


def _serve_page(arguments: argparse.Namespace) -> int:
    from tidemill.offline.rows.page.open_pages import open_pages
    from tidemill.offline.rows.page.page_server import PageServer

    name, page_rows = arguments.rows, min(arguments.num_rows or _PAGE_ROWS, _MAX_PAGE_ROWS)
    if arguments.full:
        raise Refused("--full is for the terminal: a page shows each row in full at a click")
    with (
        StopSignals(),
        open_pages(name, arguments.input_file, page_rows, arguments.output_tmp_dir) as pages,
    ):
        try:
            server = PageServer(pages, arguments.port or 0)
        except OSError as exc:
            raise Refused(f"port {arguments.port} cannot be listened on: {exc.strerror}") from exc
        with server:
            url = server.url + _search(arguments)
            print_output(url)
            log("the page is there until Ctrl-C; its address lets anybody on this machine read it")
            if _has_desktop():
                webbrowser.open(url)
            with suppress(Stopped):
                server.serve_forever()
    return 0


def _search(arguments: argparse.Namespace) -> str:
    """Return the part of the page's address that says which rows it shows first."""
    kind = {"kind": "failed"} if arguments.errors else {}
    text = {"text": arguments.grep} if arguments.grep else {}
    return f"#{urlencode(kind | text)}" if kind or text else ""


def _has_desktop() -> bool:
    """Say whether a browser has a window to open; else one of text might take the terminal."""
    names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform == "darwin" or any(map(os.environ.get, names))
