"""`/tokenize` and `/detokenize`: texts and conversations into tokens and back, without the model.

Lines of files do not ask for these: who writes a prompt does, before it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.answers.forms import AnswerForms
from engine.contract import Reply
from engine.endpoints.conversations import Conversations
from engine.endpoints.endpoint import Heading, Prepared
from engine.protocol.errors import RequestError
from engine.protocol.requests import read_body
from engine.protocol.routes import DETOKENIZE, TOKENIZE
from engine.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from engine.scheduling.sequence import SequenceRequest, SequenceResult
from engine.text.text_model import TextModel

_Prepared = Prepared[SequenceRequest, dict[str, Any]]


class Tokenize:
    """Tells what tokens a text or a conversation is."""

    route = TOKENIZE

    def __init__(self, model: TextModel, *, forms: AnswerForms) -> None:
        self._model = model
        self._conversations = Conversations(model, forms)

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return the answer, for which nothing has to run."""
        request: TokenizeTextRequest | TokenizeChatRequest
        if "messages" in body:
            request = asked = read_body(TokenizeChatRequest, body)
            text = self._conversations.of(asked, heading).prompt
            adds = bool(asked.add_special_tokens)
        else:
            request = read_body(TokenizeTextRequest, body)
            text, adds = request.prompt, request.add_special_tokens is not False
        ids = self._model.tokenizer.encode(text, add_special_tokens=adds)
        return Prepared([], self._answer(ids, with_texts=bool(request.return_token_strs)), heading)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the answer."""
        del results
        return Reply(200, prepared.context)

    def _answer(self, ids: list[int], *, with_texts: bool) -> dict[str, Any]:
        piece = self._model.tokenizer.piece
        texts = [piece(token_id).decode("utf-8", "replace") for token_id in ids]
        return {
            "count": len(ids),
            "max_model_len": self._model.max_model_len,
            "tokens": ids,
            "token_strs": texts if with_texts else None,
        }


class Detokenize:
    """Tells what text tokens are, marks and all."""

    route = DETOKENIZE

    def __init__(self, model: TextModel) -> None:
        self._model = model

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return the answer, for which nothing has to run."""
        ids = read_body(DetokenizeRequest, body).tokens
        highest, size = max(ids, default=0), self._model.vocab_size
        if highest >= size:
            raise RequestError(
                f"`tokens` names token {highest}; this model has tokens 0 to {size - 1}.",
                param="tokens",
            )
        text = self._model.tokenizer.text(ids, skip_special_tokens=False)
        return Prepared([], {"prompt": text}, heading)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the answer."""
        del results
        return Reply(200, prepared.context)
