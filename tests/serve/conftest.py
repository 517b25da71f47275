"""One server of the demo model for all tests of the folder, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from bench.server.served import Place, serving
from tidemill import demo

KEY = "sk-of-the-tests"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return the address of `tidemill serve` in a separate process, which requires `KEY`."""
    folder = tmp_path_factory.mktemp("serve")
    flags = ("--model", str(demo.MODEL_PATH), "--served-model-name", demo.NAME)
    with serving(*flags, log=folder / "log", key=KEY) as place:
        yield place


@pytest.fixture
def client(place: Place) -> Iterator[openai.OpenAI]:
    """Return OpenAI's client without retries."""
    with openai.OpenAI(base_url=f"{place.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
