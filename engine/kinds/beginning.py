"""A model and its vocabulary, loaded beside each other, and the work that runs from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from engine.config import EngineConfig
from engine.stepping.engine import Engine
from engine.stepping.work import Work
from engine.text.vocabulary import Vocabulary, load_vocabulary, recall_vocabulary

ModelT = TypeVar("ModelT")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


@contextmanager
def begun(
    config: EngineConfig,
    folder: Path | None,
    make: Callable[[], tuple[ModelT, Work[RequestT, ResultT]]],
    at_end: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Engine[RequestT, ResultT], ModelT, Vocabulary]]:
    """Yield an engine at work, its model and its vocabulary; the engine ends if the block fails.

    `make` runs in the engine's thread: it loads the model and makes its work; so does `at_end`.
    """
    loaded: Future[ModelT] = Future()

    def make_work() -> Work[RequestT, ResultT]:
        model, work = make()
        loaded.set_result(model)
        return work

    with ThreadPoolExecutor(1, "tidemill-vocabulary") as beside:
        recalled = beside.submit(recall_vocabulary, config.model, folder)
        engine = Engine(make_work, at_end)
    try:
        vocabulary = recalled.result() or load_vocabulary(config.model, folder)
        yield engine, loaded.result(), vocabulary
    except BaseException:
        engine.close()
        raise
