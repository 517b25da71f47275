"""`/v1/rerank` and `/v2/rerank`: a query and documents in, the documents by their scores out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contract import Reply
from engine.endpoints.encodings import EncoderModel
from engine.endpoints.endpoint import Heading
from engine.endpoints.pairs import Pairs, PreparedPairs
from engine.protocol.requests import read_body
from engine.protocol.routes import RERANK
from engine.protocol.scoring import RerankRequest
from engine.scheduling.encoding import EncodingResult


class Rerank:
    """The endpoint of rerankers, and of models that give vectors."""

    route = RERANK

    def __init__(self, model: EncoderModel) -> None:
        self._pairs = Pairs(model)

    def prepare(self, body: dict[str, Any], heading: Heading) -> PreparedPairs:
        """Return a sequence for each pair, or for each text where vectors are compared."""
        return self._pairs.prepare(read_body(RerankRequest, body), heading)

    def finish(self, prepared: PreparedPairs, results: Sequence[EncodingResult]) -> Reply:
        """Return the documents, the highest score first."""
        return self._pairs.finish(prepared, results)
