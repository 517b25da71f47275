"""OpenAI's client for Node against a server of ours; its tests stand in tests/node/serve.mjs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.server.served import Place

SCRIPT = Path(__file__).parents[1] / "node" / "serve.mjs"


def test_the_client_for_node_is_served(place: Place) -> None:
    """Each of its own tests passes, in a process of its own."""
    if not (SCRIPT.parent / "node_modules" / "openai").is_dir():
        pytest.skip("no client for Node: `make test` gets it")
    told = subprocess.run(
        ["node", "--test", str(SCRIPT)],
        env=os.environ
        | {"TIDEMILL_URL": place.url, "TIDEMILL_MODEL": place.model, "TIDEMILL_KEY": place.key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "skipped 0" in told.stdout
