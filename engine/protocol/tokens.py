"""Tokens on the wire: bodies that ask what a text is in tokens, and tokens in text, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.fields import Count, Text

MAX_TOKENS = 2**20
MAX_TEXT_CHARS = 4 * 2**20


class TokenizeTextRequest(BaseModel):
    """What tokens a text is; unknown fields are let pass, null is leaving out."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: Annotated[Text, Field(max_length=MAX_TEXT_CHARS)]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest):
    """What tokens a conversation is, as `/v1/chat/completions` would put it to the model."""

    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """What text tokens are."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: Annotated[list[Count], Field(fail_fast=True, max_length=MAX_TOKENS)]
