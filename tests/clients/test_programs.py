"""Other people's programs, unchanged, that run batches against a deployment's API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import Api
from tests.clients.program_scripts import BATCHES, program, run_program

pytestmark = pytest.mark.long  # each has a separate environment


@pytest.mark.parametrize("name", BATCHES)
def test_a_program_runs_a_batch_in_the_cloud(name: str, api: Api, tmp_path: Path) -> None:
    """It gets the same results as from a server: files by links, rows from workers."""
    assert run_program(program(name), tmp_path, api.url, api.key) == BATCHES[name]
