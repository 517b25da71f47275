"""What a kind of model is: which models are of it, how its work is made, which urls it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.config import EngineConfig
from engine.endpoints.endpoint import Endpoint, Sized
from engine.errors import ModelRefused
from engine.stepping.engine import Engine

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT", bound=Sized)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[RequestT, ResultT]):
    """A model at work: `engine` runs what its `endpoints` ask for.

    Only people who wait ask for `online` ones. `notes` are sentences that whoever runs it should
    read.
    """

    engine: Engine[RequestT, ResultT]
    endpoints: Sequence[Endpoint[RequestT, ResultT, Any]]
    device: torch.device
    notes: tuple[str, ...] = ()
    online: Sequence[Endpoint[RequestT, ResultT, Any]] = ()


def refuse_settings_of_text(config: EngineConfig, gives: str) -> None:
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


class Kind(Protocol):
    """One kind of model."""

    def takes(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Say whether `config.model` is of this kind, by its config.json or by what `config` says.

        Nothing in that is checked. Raises `EngineError` where its other files cannot be asked.
        """

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> Loaded[Any, Any]:
        """Load `config.model`, of which `folder` has the config.json, and begin its work.

        `chat_template` is a template's text or the path of a file that holds it. Raises
        `EngineError` for what cannot be served.
        """
