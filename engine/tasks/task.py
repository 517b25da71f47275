"""Tasks: the models of each, their engine core, and the urls that they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..endpoints.endpoint import Endpoint, EngineResult
from ..errors import ModelRefused
from ..loop.core import EngineCore
from ..loop.engine import Engine
from ..text.vocabulary import Vocabulary, load_vocabulary, recall_vocabulary

ModelT = TypeVar("ModelT")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT", bound=EngineResult)


@dataclass(frozen=True, slots=True)
class LoadedTask(Generic[RequestT, ResultT]):
    """A model at work: `engine` runs what its `endpoints` ask for.

    Only people who wait ask for `online` ones. `notes` are sentences that whoever runs it should
    read.
    """

    engine: Engine[RequestT, ResultT]
    endpoints: Sequence[Endpoint[RequestT, ResultT, Any]]
    device: torch.device
    notes: tuple[str, ...] = ()
    online: Sequence[Endpoint[RequestT, ResultT, Any]] = ()


def refuse_generation_settings(config: EngineConfig, gives: str) -> None:
    """Refuse what only models that write text are served with, for one that gives something else.

    Adapters, ranks, a type of the KV cache, weights made of few bits.
    """
    if config.lora_modules:
        raise ModelRefused(
            f"{config.model} gives {gives}: adapters ({config.lora_modules[0].name}) are served "
            "beside models that write text only; merge it into the model"
        )
    if config.tensor_parallel_size > 1:
        raise ModelRefused(
            f"{config.model} gives {gives}: it runs on one GPU; leave out --tensor-parallel-size"
        )
    if config.kv_cache_dtype != "auto":
        raise ModelRefused(
            f"{config.model} gives {gives}: --kv-cache-dtype {config.kv_cache_dtype} is for models "
            "that write text only; leave it out"
        )
    if config.quantization is not None:
        raise ModelRefused(
            f"{config.model} gives {gives}: its weights stay as they are; leave out --quantization"
        )


def checked_truncation(config: EngineConfig, max_model_len: int) -> int | None:
    """Return the truncation of prompts; `EngineError` for one above the model's context."""
    num_tokens = config.truncate_prompt_tokens
    if num_tokens is not None and num_tokens > max_model_len:
        raise EngineError(
            f"--truncate-prompt-tokens {num_tokens} is above the context of {config.model}, which "
            f"is {max_model_len:,} tokens: use -1 for as much as it takes"
        )
    return num_tokens


class Task(Protocol):
    """One kind of model."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Say whether `config.model` is of this kind, by its config.json or by what `config` says.

        Nothing in that is checked. Raises `EngineError` where its other files cannot be asked.
        """

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[Any, Any]:
        """Load `config.model`, of which `folder` has the config.json, and begin its work.

        `chat_template` is a template's text or the path of a file that holds it. Raises
        `EngineError` for what cannot be served.
        """


@contextmanager
def start_engine(
    config: EngineConfig,
    folder: Path | None,
    make: Callable[[], tuple[ModelT, EngineCore[RequestT, ResultT]]],
    at_end: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Engine[RequestT, ResultT], ModelT, Vocabulary]]:
    """Yield an engine at work, its model and its vocabulary; the engine ends if the block fails.

    `make` runs in the engine's thread: it loads the model and makes its core; so does `at_end`.
    """
    loaded: Future[ModelT] = Future()

    def make_core() -> EngineCore[RequestT, ResultT]:
        model, core = make()
        loaded.set_result(model)
        return core

    with ThreadPoolExecutor(1, "tidemill-vocabulary") as beside:
        recalled = beside.submit(recall_vocabulary, config.model, folder)
        engine = Engine(make_core, at_end)
    try:
        vocabulary = recalled.result() or load_vocabulary(config.model, folder)
        yield engine, loaded.result(), vocabulary
    except BaseException:
        engine.close()
        raise
