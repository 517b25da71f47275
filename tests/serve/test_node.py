"""OpenAI's client for Node against our server; its tests are in tests/node/serve.mjs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.server.served import Place

SCRIPT = Path(__file__).parents[1] / "node" / "serve.mjs"


def test_the_node_client_works(place: Place) -> None:
    """Each of its tests passes in a separate process."""
    if not (SCRIPT.parent / "node_modules" / "openai").is_dir():
        pytest.skip("no client for Node: `make test` gets it")
    result = subprocess.run(
        ["node", "--test", str(SCRIPT)],
        env=os.environ
        | {"TIDEMILL_URL": place.url, "TIDEMILL_MODEL": place.model, "TIDEMILL_KEY": place.key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped 0" in result.stdout
