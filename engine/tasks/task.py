"""Tasks: the models of each kind, their engine core, and their URLs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..endpoints.endpoint import Endpoint, EngineResult
from ..endpoints.image_inputs import ImageSupport
from ..endpoints.media_fetch import MediaFetcher, fetch_from
from ..errors import ModelRefused
from ..loop.core import EngineCore
from ..loop.engine import Engine
from ..scheduling.images import ImageForm, ImageSpec
from ..scheduling.prompt_audio import AudioSpec
from ..text.vocabulary import Vocabulary, load_vocabulary, recall_vocabulary

ModelT = TypeVar("ModelT")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT", bound=EngineResult)


@dataclass(frozen=True, slots=True)
class LoadedTask(Generic[RequestT, ResultT]):
    """A loaded model: `engine` runs the requests of its `endpoints`.

    `online` endpoints serve only interactive requests. `notes` are messages for the operator.
    `max_num_seqs` is the most sequences of a step, if not that of all models on the device.
    """

    engine: Engine[RequestT, ResultT]
    endpoints: Sequence[Endpoint[RequestT, ResultT, Any]]
    device: torch.device
    notes: tuple[str, ...] = ()
    online: Sequence[Endpoint[RequestT, ResultT, Any]] = ()
    max_num_seqs: int | None = None


def refuse_generation_settings(config: EngineConfig, kind: str) -> None:
    """Reject settings that only text generation models support, for a model of another kind.

    These are adapters, several ranks, a KV cache dtype, quantization and batch invariance.
    """
    if config.lora_modules:
        raise ModelRefused(
            f"{config.model} is {kind}: adapters ({config.lora_modules[0].name}) are supported "
            "for text generation models only; merge it into the model"
        )
    if config.tensor_parallel_size > 1:
        raise ModelRefused(
            f"{config.model} is {kind}: it runs on one GPU; remove --tensor-parallel-size"
        )
    if config.kv_cache_dtype != "auto":
        raise ModelRefused(
            f"{config.model} is {kind}: --kv-cache-dtype {config.kv_cache_dtype} requires a text "
            "generation model; remove it"
        )
    if config.quantization is not None:
        raise ModelRefused(
            f"{config.model} is {kind}: quantization is not supported; remove --quantization"
        )
    if config.batch_invariant:
        raise ModelRefused(
            f"{config.model} is {kind}: --batch-invariant requires a text generation model; "
            "remove it"
        )


def checked_truncation(config: EngineConfig, max_model_len: int) -> int | None:
    """Return the truncation of prompts; raise `EngineError` above the model's context."""
    num_tokens = config.truncate_prompt_tokens
    if num_tokens is not None and num_tokens > max_model_len:
        raise EngineError(
            f"--truncate-prompt-tokens {num_tokens} is above {config.model}'s context of "
            f"{max_model_len:,} tokens: use -1 for that length"
        )
    return num_tokens


def image_support_of(
    image_spec: ImageSpec | ImageForm | AudioSpec, config: EngineConfig
) -> ImageSupport:
    """Return the support of a model's images, or of its recordings, by the settings."""
    limits = config.images
    if isinstance(image_spec, AudioSpec):
        limits = replace(limits, max_bytes=config.fetching.max_bytes)
    fetch = fetch_from(replace(config.fetching, max_bytes=limits.max_bytes), config.read_object)
    return ImageSupport(image_spec, limits, MediaFetcher(fetch, limits.max_bytes))


class Task(Protocol):
    """One kind of model."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Return whether `config.model` is of this kind, by its config.json or by `config`.

        Nothing is validated. Raises `EngineError` if its other files cannot be read.
        """

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[Any, Any]:
        """Load `config.model`, whose config.json is in `folder`, and start its engine.

        `chat_template` is a template's text or the path of a file that contains it. Raises
        `EngineError` if the model is not supported.
        """


@contextmanager
def start_engine(
    config: EngineConfig,
    folder: Path | None,
    make: Callable[[], tuple[ModelT, EngineCore[RequestT, ResultT]]],
    at_end: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Engine[RequestT, ResultT], ModelT, Vocabulary]]:
    """Yield a running engine, its model and its vocabulary; the engine ends if the block fails.

    `make` runs in the engine's thread: it loads the model and creates its core; so does `at_end`.
    """
    loaded: Future[ModelT] = Future()

    def make_core() -> EngineCore[RequestT, ResultT]:
        model, core = make()
        loaded.set_result(model)
        return core

    with ThreadPoolExecutor(1, "tidemill-vocabulary") as executor:
        recalled = executor.submit(recall_vocabulary, config.model, folder)
        engine = Engine(make_core, at_end)
    try:
        vocabulary = recalled.result() or load_vocabulary(config.model, folder)
        yield engine, loaded.result(), vocabulary
    except BaseException:
        engine.close()
        raise
