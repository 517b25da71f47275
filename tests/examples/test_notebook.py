"""The example's notebook, run by a kernel as Jupyter does, and a cell that is interrupted."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from tests.warm_start import installed_starts

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120
ENDLESS = """
from itertools import repeat
from tidemill import Engine

with Engine() as engine:
    print(engine.pid)
    for _ in engine.answer_many(repeat({"messages": [{"role": "user", "content": "Hi"}]})):
        print("answered")
"""


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels import this checkout, as forked ones do, and use separate settings."""
    if installed_starts() is None:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """Return a kernel and its client."""
    manager, client = start_new_kernel(cwd=str(tmp_path))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def text_of(cell: Any) -> str:
    """Return a cell's stream, then its bars and its value; a bar may split the stream in two."""
    outputs = cell["outputs"]
    stream = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    others = [output["data"]["text/plain"] for output in outputs if "data" in output]
    return "\n".join([stream, *others])


def test_the_notebook_runs(tmp_path: Path) -> None:
    """With a bar for each of its long cells, that says at last that all is done."""
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=PATIENCE_SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = {cell["id"]: cell for cell in notebook["cells"] if cell["cell_type"] == "code"}
    assert "Paris" in text_of(cells["answers"])
    assert "7 of 7 requests" in text_of(cells["answers"])
    assert "3 of 3 rows" in text_of(cells["table"])
    assert "{'country': 'France', 'text': 'Paris'}" in text_of(cells["table"])
    bars = [
        output for output in cells["table"]["outputs"] if output["output_type"] == "display_data"
    ]
    assert len(bars) == 1
    assert bars[0]["data"]["text/html"].startswith('<progress value="3" max="3"></progress> 3 of 3')


def test_a_cell_that_is_interrupted_leaves_no_engine(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    """The cell ends with KeyboardInterrupt, and the engine with its block."""
    manager, client = kernel
    message_id = client.execute(ENDLESS)
    output = ""
    while "answered" not in output:
        message = client.get_iopub_msg(timeout=PATIENCE_SECONDS)
        assert message["msg_type"] != "error", message["content"]
        output += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
    [pid] = [int(line) for line in output.split() if line.isdigit()]
    watched = os.pidfd_open(pid)
    manager.interrupt_kernel()
    message = client.get_shell_msg(timeout=PATIENCE_SECONDS)
    while message["parent_header"]["msg_id"] != message_id:  # skip kernel-info replies
        message = client.get_shell_msg(timeout=PATIENCE_SECONDS)
    assert message["content"]["ename"] == "KeyboardInterrupt"
    assert select.select([watched], [], [], PATIENCE_SECONDS)[0]
    os.close(watched)
