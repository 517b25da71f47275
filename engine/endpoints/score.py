"""`/v1/score`: pairs of texts in, a score for each out; a body with a query asks for a ranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contract import Reply
from engine.endpoints.encodings import EncoderModel
from engine.endpoints.endpoint import Heading
from engine.endpoints.pairs import Pairs, PreparedPairs
from engine.protocol.requests import read_score
from engine.protocol.routes import SCORE
from engine.scheduling.encoding import EncodingResult


class Score:
    """The endpoint of rerankers, and of models that give vectors."""

    route = SCORE

    def __init__(self, model: EncoderModel) -> None:
        self._pairs = Pairs(model)

    def prepare(self, body: dict[str, Any], heading: Heading) -> PreparedPairs:
        """Return a sequence for each pair, or for each text where vectors are compared."""
        return self._pairs.prepare(read_score(body), heading)

    def finish(self, prepared: PreparedPairs, results: Sequence[EncodingResult]) -> Reply:
        """Return the scores."""
        return self._pairs.finish(prepared, results)
