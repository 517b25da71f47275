"""`/tokenize`, `/detokenize`, `/tokenizer_info`: texts to tokens and back, without the model.

Interactive only: people use them while writing prompts, and rows of files have no use for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.protocol.contract import Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.prompts import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import DETOKENIZE, TOKENIZE, TOKENIZER_INFO

from ..parsers.registry import ParserSet
from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..text.text_model import TextModel
from .chat_preprocessor import ChatPreprocessor
from .endpoint import Prepared, RequestMetadata
from .prompt_tokens import PromptTokenizer

_MAX_DETOKENIZED_BYTES = 16 * 2**20

_Prepared = Prepared[SequenceRequest, dict[str, Any]]


class Tokenize:
    """Returns the tokens of a text or a conversation."""

    route = TOKENIZE

    def __init__(self, model: TextModel, *, parsers: ParserSet) -> None:
        self._model = model
        self._preprocessor = ChatPreprocessor(model, parsers)
        self._tokenizer = PromptTokenizer(model)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return the answer; the model does not run.

        A long text is counted up to the model's context, and rejected above it.
        """
        request: TokenizeTextRequest | TokenizeChatRequest
        if "messages" in body:
            request = chat = read_body(TokenizeChatRequest, body)
            text, param = self._preprocessor.preprocess(chat, metadata).prompt, "messages"
            adds = bool(chat.add_special_tokens)
        else:
            request = read_body(TokenizeTextRequest, body)
            text, param = request.prompt, "prompt"
            adds = request.add_special_tokens is not False
        ids = self._tokenizer.encode(text, param, add_special_tokens=adds)
        answer = self._answer(ids, with_texts=bool(request.return_token_strs))
        return Prepared([], answer, metadata, num_values=2 * len(ids))

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the answer."""
        del results
        return Reply(200, prepared.context)

    def _answer(self, ids: list[int], *, with_texts: bool) -> dict[str, Any]:
        piece = self._model.tokenizer.piece
        return {
            "count": len(ids),
            "max_model_len": self._model.max_model_len,
            "tokens": ids,
            "token_strs": [piece(token_id).decode("utf-8", "replace") for token_id in ids]
            if with_texts
            else None,
        }


class Detokenize:
    """Returns the text of tokens, special tokens included."""

    route = DETOKENIZE

    def __init__(self, model: TextModel) -> None:
        self._model = model

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return the answer; the model does not run."""
        ids = read_body(DetokenizeRequest, body).tokens
        highest, size = max(ids, default=0), self._model.vocab_size
        if highest >= size:
            raise RequestError(
                f"`tokens` contains token ID {highest}; token IDs of this model must be between "
                f"0 and {size - 1}.",
                param="tokens",
            )
        tokenizer = self._model.tokenizer
        if sum(len(tokenizer.piece(token_id)) for token_id in ids) > _MAX_DETOKENIZED_BYTES:
            raise RequestError(
                f"The text of `tokens` exceeds {_MAX_DETOKENIZED_BYTES:,} bytes: send fewer.",
                param="tokens",
            )
        text = tokenizer.text(ids, skip_special_tokens=False)
        return Prepared([], {"prompt": text}, metadata, num_values=len(ids))

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the answer."""
        del results
        return Reply(200, prepared.context)


class TokenizerInfo:
    """Returns the special tokens and the chat template, for clients without the model's files."""

    route = TOKENIZER_INFO

    def __init__(self, model: TextModel) -> None:
        template = model.chat_template
        self._answer: dict[str, Any] = {
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            **model.tokenizer.vocabulary.special_tokens,
            "model_max_length": model.max_model_len,
            "chat_template": None if template is None else template.source_text,
        }

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return the answer; the model does not run."""
        del body
        return Prepared([], self._answer, metadata)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the answer."""
        del results
        return Reply(200, prepared.context)
