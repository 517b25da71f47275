"""Daft provider: runs Daft's `prompt` and `embed_text` on the engine of the process."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ..engine import EMBEDDINGS, Engine
from ..errors import EngineDied, TidemillError
from .options import check_options, require
from .process_engine import drop_engine, process_engine

require("tidemill.daft", "daft", "engine")

import numpy as np  # noqa: E402 - after the check for the extra
from daft import DataType  # noqa: E402
from daft.ai.protocols import (  # noqa: E402
    Prompter,
    PrompterDescriptor,
    TextEmbedder,
    TextEmbedderDescriptor,
)
from daft.ai.provider import Provider as DaftProvider  # noqa: E402
from daft.ai.typing import EmbeddingDimensions, EmbedTextOptions, UDFOptions  # noqa: E402

_TEXTS_PER_REQUEST: Final = 64
_OF_DAFT: Final = (
    *(option.name for option in fields(UDFOptions)),
    *EmbedTextOptions.__annotations__,
)


class Provider(DaftProvider):  # type: ignore[misc]
    """Provider of `prompt` and `embed_text`, to be attached to a session.

    `options` are options of an engine (`max_num_seqs=64`). Other arguments of `prompt` and
    `embed_text` than Daft's are fields of the request, such as `temperature`. Raises TidemillError
    for unknown options.

    >>> daft.attach_provider(Provider())
    >>> df.with_column("answer", prompt(df["question"], provider="tidemill"))
    """

    def __init__(self, model: str | None = None, *, name: str = "tidemill", **options: Any) -> None:
        check_options({"model": model, **options})
        self._name = name
        self._options = {"model": model, **options}

    @property
    def name(self) -> str:
        """Return the provider's name."""
        return self._name

    def get_prompter(
        self,
        model: str | None = None,
        return_format: Any = None,
        system_message: str | None = None,
        **options: Any,
    ) -> EnginePrompterDescriptor:
        """Return the descriptor of a prompter; `return_format` is the answers' pydantic model."""
        found = self._options_of(model, options)
        return EnginePrompterDescriptor(found, return_format, system_message)

    def get_text_embedder(
        self, model: str | None = None, dimensions: int | None = None, **options: Any
    ) -> EngineEmbedderDescriptor:
        """Return the descriptor of an embedder; without `dimensions`, the model determines them."""
        if options.get("output_dtype") is not None:
            raise TidemillError("`output_dtype` does not support Daft, whose vectors are float32")
        sized = {} if dimensions is None else {"dimensions": dimensions}
        found = self._options_of(model, {"batch_size": _TEXTS_PER_REQUEST, **options, **sized})
        return EngineEmbedderDescriptor(found, dimensions)

    def _options_of(self, model: str | None, given: Mapping[str, Any]) -> ExpressionOptions:
        engine = self._options if model is None else {**self._options, "model": model}
        return ExpressionOptions(
            self._name,
            engine,
            {name: value for name, value in given.items() if name in _OF_DAFT},
            {name: value for name, value in given.items() if name not in _OF_DAFT},
        )


@dataclass(frozen=True, slots=True)
class ExpressionOptions:
    """Options of one expression: those of the engine, of Daft, and the fields of each request."""

    provider: str
    engine: Mapping[str, Any]
    daft: Mapping[str, Any]
    body: Mapping[str, Any]


class _EngineDescriptor:
    """Provider, model and options of a descriptor."""

    options: ExpressionOptions

    def get_provider(self) -> str:
        """Return the provider's name."""
        return self.options.provider

    def get_model(self) -> str:
        """Return the model."""
        return str(self.options.engine["model"])

    def get_options(self) -> dict[str, Any]:
        """Return all options except the engine's."""
        return {**self.options.daft, **self.options.body}


@dataclass
class EnginePrompterDescriptor(_EngineDescriptor, PrompterDescriptor):  # type: ignore[misc]
    """Descriptor that creates the prompter of a process."""

    options: ExpressionOptions
    return_format: Any
    system_message: str | None

    def instantiate(self) -> EnginePrompter:
        """Return a prompter."""
        return EnginePrompter(self)


class EnginePrompter(Prompter):  # type: ignore[misc]
    """Prompter that sends one request at a time to the engine of its process."""

    def __init__(self, descriptor: EnginePrompterDescriptor) -> None:
        self._options = descriptor.options
        self._format = descriptor.return_format
        self._system = descriptor.system_message
        self._engine: Engine | None = None

    async def prompt(self, messages: tuple[Any, ...]) -> Any:
        """Return the answer to a user message of these texts; None if one of them is None."""
        if any(text is None for text in messages):
            return None
        for text in messages:
            if not isinstance(text, str):
                raise TidemillError(f"a message must be a string; got a {type(text).__name__}")
        self._engine = process_engine(self._options.engine)
        try:
            answer = await self._engine.answer(self._body(messages))
        except EngineDied:
            drop_engine(self._engine)
            raise
        text = answer["choices"][0]["message"]["content"]
        return text if self._format is None else self._format.model_validate_json(text)

    def _body(self, texts: tuple[str, ...]) -> dict[str, Any]:
        parts = [{"type": "text", "text": text} for text in texts]
        content = texts[0] if len(texts) == 1 else parts
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        body = {"messages": messages, **self._options.body}
        if self._format is not None:
            schema = {"name": self._format.__name__, "schema": self._format.model_json_schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body


@dataclass
class EngineEmbedderDescriptor(_EngineDescriptor, TextEmbedderDescriptor):  # type: ignore[misc]
    """Descriptor that creates the embedder of a process; holds the engine that it measured."""

    options: ExpressionOptions
    dimensions: int | None
    _engine: Engine | None = field(default=None, init=False, repr=False, compare=False)

    def get_dimensions(self) -> EmbeddingDimensions:
        """Return the length and the type of vectors; raises TidemillError."""
        if self.dimensions is None:
            self._engine = process_engine(self.options.engine)
            self.dimensions = self._engine.embed(["a"], progress=False).shape[1]
        return EmbeddingDimensions(self.dimensions, DataType.float32())

    def is_async(self) -> bool:
        """Return True: texts are embedded in an event loop."""
        return True

    def instantiate(self) -> EngineEmbedder:
        """Return an embedder."""
        return EngineEmbedder(self.options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}


class EngineEmbedder(TextEmbedder):  # type: ignore[misc]
    """Embedder that uses the engine of its process."""

    def __init__(self, options: ExpressionOptions) -> None:
        self._options = options
        self._engine: Engine | None = None

    async def embed_text(self, text: list[str | None]) -> list[Any]:
        """Return the vectors of texts, with None for None."""
        texts = [one for one in text if one is not None]
        self._engine = process_engine(self._options.engine)
        body = {**self._options.body, "encoding_format": "base64"}
        some = [
            texts[start : start + _TEXTS_PER_REQUEST]
            for start in range(0, len(texts), _TEXTS_PER_REQUEST)
        ]
        requests = [self._engine.answer({**body, "input": each}, url=EMBEDDINGS) for each in some]
        try:
            answers = await asyncio.gather(*requests)
        except EngineDied:
            drop_engine(self._engine)
            raise
        found = (one["embedding"] for answer in answers for one in answer["data"])
        remaining = (np.frombuffer(b64decode(each), "<f4") for each in found)
        return [None if one is None else next(remaining) for one in text]
