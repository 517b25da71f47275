"""A new kind of model is one file: it is loaded and served next to generation.

`docs/explanation/engine.md` refers to this file: work, an endpoint, and a rule for matching models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.endpoint import Prepared, RequestMetadata
from tidemill.engine.load import load_served
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.loop.engine import Engine
from tidemill.engine.tasks import TASKS, find_task
from tidemill.engine.tasks.generation import GenerationTask
from tidemill.engine.tasks.task import LoadedTask
from tidemill.protocol.contract import EngineStats, Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.routes import ROUTES

URL = "/v1/embeddings"


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A text as the model represents it: how often each letter of its alphabet occurs."""

    counts: list[int]

    @property
    def num_values(self) -> int:
        """Return its length."""
        return len(self.counts)

    def result(self) -> Vector:
        """Return itself: the item is finished when it is created."""
        return self


class Counting:
    """Work that takes one step."""

    def __init__(self, alphabet: str) -> None:
        self._alphabet = alphabet
        self._waiting: list[Vector] = []
        self._num_steps = 0

    def add(self, text: str) -> Vector:
        """Queue a text."""
        vector = Vector([text.count(letter) for letter in self._alphabet])
        self._waiting.append(vector)
        return vector

    def step(self) -> Sequence[StepOutput[Vector]] | None:
        """Finish all queued texts."""
        if not self._waiting:
            return None
        self._num_steps += 1
        waiting, self._waiting = self._waiting, []
        return [StepOutput(vector, [], is_finished=True) for vector in waiting]

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Remove unwanted texts."""
        self._waiting = [vector for vector in self._waiting if vector not in unwanted]

    def stats(self) -> EngineStats:
        """Return the number of steps."""
        return EngineStats(waiting=len(self._waiting), steps=self._num_steps)


class Embeddings:
    """The endpoint of such a model."""

    route = next(route for route in ROUTES if route.name == URL)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> Prepared[str, None]:
        """Return the text."""
        if not isinstance(body.get("input"), str):
            raise RequestError("`input` must be a text.", param="input")
        return Prepared([body["input"]], None, metadata)

    def finish(self, prepared: Prepared[str, None], results: Sequence[Vector]) -> Reply:
        """Return its vector."""
        [vector] = results
        return Reply(200, {"model": prepared.metadata.model, "embedding": vector.counts})


class Letters:
    """Models that count letters."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Return whether the model is of this kind."""
        del config
        return description.get("architectures") == ["LettersModel"]

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[str, Vector]:
        """Load the alphabet, which is the model's only weight."""
        del config, chat_template
        assert folder is not None
        alphabet = (folder / "alphabet.txt").read_text()
        engine = Engine(lambda: Counting(alphabet))
        return LoadedTask(engine, [Embeddings()], torch.device("cpu"), ("it counts",))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Dispatcher]:
    """Load a model of the new kind."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LettersModel"]}))
    (tmp_path / "alphabet.txt").write_text("abc")
    engine = load_served(
        EngineConfig(str(tmp_path)), served_names=("letters",), tasks=(Letters(), *TASKS)
    )
    yield engine
    engine.close()


async def test_it_runs_in_the_engines_thread_behind_its_own_urls(served: Dispatcher) -> None:
    """The layers below it need no knowledge of this kind."""
    reply = await served.respond(URL, {"input": "abracadabra"}, "req_1", 0)
    assert (reply.status_code, reply.body["embedding"]) == (200, [5, 2, 1])
    assert served.stats().steps == 1
    assert (served.info().device, served.info().notes) == ("cpu", ("it counts",))


async def test_a_url_of_another_kind_is_refused_by_name(served: Dispatcher) -> None:
    """A known URL of another kind is named; for an unknown one the error lists the URLs."""
    reply = await served.respond("/v1/chat/completions", {"messages": []}, "req_1", 0)
    assert reply.body["error"]["code"] == "endpoint_not_supported"
    message = (
        "Model does not support endpoint: /v1/chat/completions. It requires a text generation "
        f"model; this model supports {URL}."
    )
    assert (reply.status_code, reply.body["error"]["message"]) == (400, message)
    reply = await served.respond("/v1/unknown", {}, "req_1", 0)
    assert f"Supported endpoints: {URL}." in reply.body["error"]["message"]


@pytest.mark.parametrize("config", ['{"architectures": ["LlamaForCausalLM"]}', "[]", "{", None])
def test_generation_is_the_default_kind(config: str | None, tmp_path: Path) -> None:
    """It reports the error for a model that it cannot load, also without a config."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    for folder in (tmp_path, None):
        assert isinstance(
            find_task(folder, EngineConfig(str(tmp_path)), (Letters(), *TASKS)), GenerationTask
        )
