"""OpenAI's client for Node and the AI SDK against our server; their tests are scripts for Node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.server.served import Place

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "script",
    ["node/serve.mjs", pytest.param("ai_sdk/responses.mjs", marks=pytest.mark.long)],
)
def test_a_client_for_node_works(script: str, place: Place) -> None:
    """Each of its tests passes in a separate process."""
    path = ROOT / script
    if not (path.parent / "node_modules").is_dir():
        pytest.skip("no client for Node: `make test` and `make programs` install them")
    result = subprocess.run(
        ["node", "--test", str(path)],
        env=os.environ
        | {"TIDEMILL_URL": place.url, "TIDEMILL_MODEL": place.model, "TIDEMILL_KEY": place.key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped 0" in result.stdout
