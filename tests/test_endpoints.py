"""The tables of docs/reference/endpoints.md and endpoint_bodies.md: each cell is tested."""

from __future__ import annotations

import asyncio
import io
import json
import re
import wave
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tidemill import demo
from tidemill.engine.config import EngineConfig
from tidemill.engine.load import load_served
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine_process.canary import canary_line
from tidemill.protocol.contract import Reply, Served
from tidemill.protocol.routes import ENDPOINTS, find_route
from tools.demo.train_reranker import assemble, base_path

pytestmark = pytest.mark.usefixtures("proved")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/endpoints.md").read_text(encoding="utf-8")
TEXT = PAGE + (ROOT / "tests/endpoint_bodies.md").read_text(encoding="utf-8")
NAME = "model"
NOT_SERVED = "–"
Load = Callable[[str], Served]


class Cell(NamedTuple):
    """The outcome of a body at a URL, sent to a model of one kind."""

    url: str
    body: str
    kind: str
    outcome: str


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each table with a column per kind, header first, and the heading above it."""
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE):
        metadata = section.partition("\n")[0]
        rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in section.splitlines()
            if line.startswith("| ")
        ]
        starts = [i for i, row in enumerate(rows) if row[-4:] == list(KINDS)]
        for start in starts:
            yield metadata.strip("`"), rows[start:]


KINDS = ("chat", "vectors", "reranker", "speech")


def cells() -> list[Cell]:
    """Return the cells of all tables of bodies."""
    return [
        Cell(url, row[0].strip("`"), kind, outcome)
        for url, (_, *rows) in tables()
        if url in ENDPOINTS
        for row in rows
        for kind, outcome in zip(KINDS, row[-4:], strict=True)
    ]


def overview() -> list[Cell]:
    """Return the cells of the table of URLs; each URL of a row has separate cells."""
    [(_, *rows)] = [rows for metadata, rows in tables() if metadata not in ENDPOINTS]
    return [
        Cell(url, "", kind, outcome)
        for row in rows
        for url in re.findall(r"`([^`]+)`", row[0])
        for kind, outcome in zip(KINDS, row[-4:], strict=True)
    ]


@cache
def sound() -> str:
    """Return a second of a tone as a WAV file in base64."""
    tone = np.sin(np.arange(16_000) * 0.1) * 8_000
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(tone.astype("<i2").tobytes())
    return b64encode(held.getvalue()).decode()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Return a function that loads the model of a kind; all load before process checks."""
    reranker = tmp_path_factory.mktemp("models") / "reranker"
    assemble(reranker)
    config = json.loads((reranker / "config.json").read_text())
    named = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    (reranker / "config.json").write_text(json.dumps(config | named))
    folders = {
        "chat": demo.MODEL_PATH,
        "vectors": base_path(),
        "reranker": reranker,
        "speech": demo.SPEECH_PATH,
    }
    with ExitStack() as stack:
        models = {}
        for kind, folder in folders.items():
            config = EngineConfig(str(folder), max_num_seqs=4)
            served = load_served(config, served_names=(NAME,), chat_template=None)
            models[kind] = stack.enter_context(closing(served))
        yield models.__getitem__


def answer(served: Served, url: str, body: str) -> Reply:
    """Return the reply to a body from the table."""
    fields = json.loads(body.replace("…", sound()))
    return asyncio.run(served.respond(url, fields, "req_1", 0))


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_a_cell_is_true(cell: Cell, load: Load) -> None:
    """A body has the outcome of the table: a success, a 400 with a field, or an unsupported URL."""
    reply = answer(load(cell.kind), cell.url, cell.body)
    error = reply.body.get("error") or {}  # a response has a null
    if cell.outcome == "yes":
        assert (reply.status_code, error) == (200, {})
        assert reply.usage.prompt_tokens > 0
    else:
        assert reply.status_code == 400
        assert (error["code"] == "endpoint_not_supported") == (cell.outcome == NOT_SERVED)
        assert error["param"] is not None


def test_every_cell_has_a_known_outcome() -> None:
    """Each endpoint has some cells."""
    assert {cell.outcome for cell in cells()} == {"yes", "400", NOT_SERVED}
    assert {cell.url for cell in cells()} == set(ENDPOINTS)
    assert len(cells()) > 100


def test_the_example_of_each_url_is_a_tested_body() -> None:
    """The page has one body for each endpoint."""
    examples = dict(re.findall(r"^\| `(/\S+)` \| `(\{.*\})` \|$", PAGE, re.MULTILINE))
    assert examples.keys() == set(ENDPOINTS)
    assert examples.items() <= {(cell.url, cell.body) for cell in cells()}


def test_a_url_is_supported_if_one_of_its_bodies_is() -> None:
    """The table of URLs agrees with those of bodies."""
    served = {(cell.url, cell.kind) for cell in cells() if cell.outcome == "yes"}
    outcome = {}
    for cell in overview():
        route = find_route(cell.url)
        assert route is not None
        outcome[route.name, cell.kind] = cell.outcome
        assert cell.outcome in {"yes", NOT_SERVED}
    assert {where for where, what in outcome.items() if what == "yes"} == served
    assert {name for name, _ in outcome} == set(ENDPOINTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_endpoints_are_known_before_it_loads(kind: str, load: Load) -> None:
    """They follow from its files; nothing is known about a model that is not on this machine."""
    info = load(kind).info()
    assert set(endpoints_of(EngineConfig(info.model)) or ()) == set(info.endpoints) & {*ENDPOINTS}
    assert endpoints_of(EngineConfig("s3://bucket/model")) is None
    assert endpoints_of(EngineConfig("no/such-model")) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_each_kind_has_a_canary_request(kind: str, load: Load) -> None:
    """Workers use it to distinguish a faulty machine from a faulty line."""
    served = load(kind)
    data = canary_line(served.info().endpoints)
    assert data is not None
    line = json.loads(data)
    reply = asyncio.run(served.respond(line["url"], line["body"], "known", 0))
    assert reply.status_code == 200, reply.body
