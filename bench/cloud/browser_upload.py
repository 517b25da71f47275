"""A large file through the dashboard in Chromium: seconds, and the browser's memory.

    python -m bench.cloud.browser_upload [--bytes N] [--runs N]

The API is one instance in this process, the bucket an emulator's; every run has a new browser and
cloud. A run fails unless the object matches the file in size and digest, and if the API received a
body that could contain even one line of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import ClassVar

from playwright.sync_api import Browser

from bench.processes import PeakMemory, tree_bytes
from tests.emulators import running
from tests.handler.api.rig import serving
from tests.handler.api.server import Bridge, listening
from tests.handler.dashboard.browser import NO_CHROMIUM, find_chromium, running_chromium
from tests.handler.dashboard.steps import sign_in
from tests.handler.intake.rig import Cloud, line_of
from tidemill.handler.tenants.keys import KeyStore

_FILLER_BYTES = 1000
_CHUNK_BYTES = 2**20
_MB = 10**6
_WAIT_SECONDS = 3600


class WatchedBridge(Bridge):
    """Proxy of the API that records the length of every body."""

    body_lengths: ClassVar[list[int]] = []

    def answer(self) -> None:
        """Answer one request."""
        self.body_lengths.append(int(self.headers.get("content-length") or 0))
        super().answer()

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the parent's names
    do_PUT = do_PATCH = do_OPTIONS = do_HEAD = do_TRACE = do_QUERY = answer  # noqa: N815 - the parent's names


@dataclass(frozen=True, slots=True)
class Upload:
    """One run, from the click until the batch is shown, with the bytes that the browser holds."""

    seconds: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    num_calls: int
    num_body_bytes: int


def write_lines(path: Path, num_bytes: int) -> str:
    """Write `size` bytes of distinct lines; return their digest."""
    num_lines, rest = divmod(num_bytes, len(_line(0)))
    digest = sha256()
    with path.open("wb") as file:
        for piece in chain(map(_line, range(num_lines)), [b"\n" * rest]):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _line(number: int) -> bytes:
    return line_of(f"{number:012}", filler="x" * _FILLER_BYTES) + b"\n"


def pid_of(browser: Browser) -> int:
    """Return the root of a browser's process tree."""
    processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    [pid] = (process["id"] for process in processes if process["type"] == "browser")
    return int(pid)


def upload(browser: Browser, path: Path, digest: str, folder: Path) -> Upload:
    """Upload a file like a user, and check the object."""
    WatchedBridge.body_lengths.clear()
    with (
        running("ministack", folder) as emulator,
        serving(Cloud.on(emulator)) as cloud,
        listening(bridge=WatchedBridge) as url,
        browser.new_context(base_url=url) as context,
    ):
        keys = KeyStore(cloud.deployment.table.name)
        page = context.new_page()
        sign_in(page, cloud.run(keys.create(tenant="lab", name="bench", now=1)), "#/new")
        chooser = page.get_by_label("A JSONL file")
        chooser.wait_for(state="attached")
        before_bytes = tree_bytes(pid := pid_of(browser))
        with PeakMemory(pid) as memory:
            chooser.set_input_files(path)
            started = time.monotonic()
            page.get_by_role("button", name="Upload and start").click()
            page.get_by_role("heading", name=path.name).wait_for(timeout=_WAIT_SECONDS * 1000)
            seconds = time.monotonic() - started
        after_bytes = tree_bytes(pid)
        lengths = list(WatchedBridge.body_lengths)
        check(cloud, path, digest)
    assert max(lengths) < _FILLER_BYTES, f"the API was sent a body of {max(lengths)} bytes"
    peak_bytes = max(memory.peak_bytes, after_bytes)
    return Upload(seconds, before_bytes, peak_bytes, after_bytes, len(lengths), sum(lengths))


def check(cloud: Cloud, path: Path, digest: str) -> None:
    """Assert that the object of the only batch is the file."""
    [batch], _ = cloud.run(cloud.deployment.table.list_batches("lab", limit=10))
    found = cloud.aws.clients["s3"].get_object(Bucket=cloud.bucket, Key=batch.source.key)
    assert found["ContentLength"] == path.stat().st_size
    received = sha256()
    for chunk in found["Body"].iter_chunks(_CHUNK_BYTES):
        received.update(chunk)
    assert received.hexdigest() == digest, "the object is not what was sent"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each run, and the medians of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--bytes", type=int, default=10**9, help="set the size of the file (%(default)s)"
    )
    parser.add_argument("--runs", type=int, default=1)
    parsed = parser.parse_args(arguments)
    executable = find_chromium()
    if executable is None:
        sys.exit(NO_CHROMIUM)
    runs = []
    print("| seconds | MB/s | browser, MB: before | at most | after | calls | bytes in them |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "large.jsonl"
        digest = write_lines(path, parsed.bytes)
        for number in range(parsed.runs):
            folder = Path(name) / f"run-{number}"
            folder.mkdir()
            with running_chromium(executable) as browser:
                runs.append(upload(browser, path, digest, folder))
            show(runs[-1], parsed.bytes)
    print("Medians:")
    show(Upload(*map(statistics.median, zip(*map(astuple, runs), strict=True))), parsed.bytes)


def show(run: Upload, num_bytes: int) -> None:
    """Print a run as a row of the table."""
    held = (run.before_bytes, run.peak_bytes, run.after_bytes)
    memory = " | ".join(f"{each / _MB:.0f}" for each in held)
    rate = num_bytes / run.seconds / _MB
    print(
        f"| {run.seconds:.1f} | {rate:.0f} | {memory} | {run.num_calls} | {run.num_body_bytes:,} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
