"""Tests of every command in an environment without extras."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from tests.cli.api_rig import Shell, line, submitted
from tests.cli.base_environment import ROOT
from tests.cli.fake_api import row_of
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import print_not_run
from tidemill.batch.result_cache import ResultCache
from tidemill.batch.result_key import Scope
from tidemill.cli.main import make_parser
from tidemill.offline.files.shard import Shard, find_shard_lines
from tidemill.offline.files.shard_mark import mark_finished

WORKING = """
check in.jsonl
submit in.jsonl
submit in.jsonl --dry-run
status
status @last
resume @last
results @last -o fetched.jsonl -e failed.jsonl --force
retry @last
cancel @last
erase BATCH --yes
sample in.jsonl -n 1
diff rows.jsonl rows.jsonl
view rows.jsonl
convert rows.jsonl -i records.jsonl
join joined.jsonl
join joined.jsonl -i in.jsonl --force
completion bash
cache list .
cache stats .
cache remove .
"""
INCOMPLETE = """
run in.jsonl
run reviews.csv --prompt {{text}}
run in.jsonl --model s3://bucket/model
check reviews.csv --prompt {{text}}
submit reviews.csv --prompt {{text}}
estimate in.jsonl
estimate reviews.csv --prompt {{text}}
view reviews.csv
calibrate reviews.csv --prior even
serve
models model
drop in.jsonl
worker
launcher
local up
local run -i in.jsonl -o local.jsonl
keys create --name name
keys list
keys revoke key
tenants set tenant --no-webhook
tenants show tenant
workers list
workers resume model
workers stop model
"""


def command_names(parser: argparse.ArgumentParser, before: str = "") -> Iterator[str]:
    """Yield the names of all commands, each with its action if it has some."""
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for action in nested:
        for name, each in action.choices.items():
            yield from command_names(each, f"{before}{name} ")
    if not nested:
        yield before.strip()


def write_shard(folder: Path, request: bytes) -> None:
    """Write the output of the only shard of a file of one request, and its mark."""
    raw = RawLine(1, request.rstrip(b"\n"))
    output = folder / "joined.jsonl.1-of-1"
    output.write_bytes(print_not_run(raw.digest, "a", code="batch_expired", message="expired"))
    lines = find_shard_lines(BytesIO(request), len(request), Shard(1, 1))
    mark_finished(output, None, lines, num_rows=1, num_errors=1, made_with=())


def test_every_command_works_or_names_its_extras_in_one_sentence(shell: Shell) -> None:
    """A command of a plain `pip install tidemill` never ends in an import's traceback."""
    request = line("a")
    batch_id = submitted(shell, "a", "b", fail=True)
    write_shard(shell.folder, Path(shell.file(request)).read_bytes())
    (shell.folder / "rows.jsonl").write_bytes(row_of(request))
    (shell.folder / "records.jsonl").write_bytes(b'{"recordId": "a", "modelInput": {}}')
    (shell.folder / "reviews.csv").write_text("text\ngood\n", encoding="utf-8")
    ResultCache.open(shell.folder, Scope(b"model", "model")).close()
    working, incomplete = WORKING.strip().splitlines(), INCOMPLETE.strip().splitlines()
    typed = [*working, *incomplete]
    names = set(command_names(make_parser()))
    assert {name for name in names if not any(each.startswith(name) for each in typed)} == set()

    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/cli/base_environment.py")],
        input=json.dumps([shlex.split(each.replace("BATCH", batch_id)) for each in typed]),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=shell.folder,
        capture_output=True,
        check=True,
        text=True,
    )
    results = dict(zip(typed, map(json.loads, done.stdout.splitlines()), strict=True))
    assert {each: result for each, result in results.items() if result["raised"]} == {}
    # 3 is the status of a batch with failed rows.
    assert {each: results[each] for each in working if results[each]["status"] not in {0, 3}} == {}
    sentence = re.compile(r"tidemill: .* needs .*, which (is|are) not (installed|here): .*\n")
    assert {
        each: results[each]
        for each in incomplete
        if not sentence.fullmatch(results[each]["stderr"])
    } == {}
