"""Requests to models of vectors and scores, and the folders of such models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.scripted_encoder import minilm
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served
from tidemill.protocol.contract import Reply

TEXTS = [
    "The capital of France is Paris.",
    "a",
    "What is the capital of Norway? " * 12,
    "Émile naïve 北京 🙂",
]
Serve = Callable[..., Dispatcher]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_labels": 1,
    "initializer_range": 0.5,
}


def minilm_with(folder: Path, files: dict[str, Any]) -> Path:
    """Return a folder of MiniLM in which some files have other contents."""
    for source in minilm().rglob("*"):
        if source.is_file():
            target = folder / source.relative_to(minilm())
            target.parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(source, target)
    for name, contents in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(json.dumps(contents))
    return folder


def with_files(folder: Path, target: Path, files: dict[str, Any]) -> Path:
    """Return a copy of a folder with more files."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for name, contents in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return target


async def answer(served: Dispatcher, url: str, **body: Any) -> dict[str, Any]:
    """Return the body of a successful reply."""
    reply = await served.respond(url, body, "req_1", 0)
    assert reply.status_code == 200, reply.body
    return reply.body


async def refusal(served: Dispatcher, url: str, **body: Any) -> Reply:
    """Return a failed reply."""
    reply = await served.respond(url, body, "req_1", 0)
    assert reply.status_code == 400
    return reply


@contextmanager
def serving() -> Iterator[Serve]:
    """Yield a function that loads a folder in fp32 on the CPU, with settings and a template."""
    loaded: list[Dispatcher] = []

    def load(folder: Path, *, chat_template: str | None = None, **settings: Any) -> Dispatcher:
        config = EngineConfig(str(folder), dtype="float32", device="cpu", **settings)
        loaded.append(load_served(config, served_names=("tiny",), chat_template=chat_template))
        return loaded[-1]

    yield load
    for engine in loaded:
        engine.close()
