"""`/tokenize` and `/detokenize`: requests that people send while writing a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scripted_model import (
    INFO,
    MAX_MODEL_LEN,
    METADATA,
    Scene,
    ScriptedGenerator,
    sentencepiece_tokenizer,
    text_model_of,
)
from tidemill.engine.endpoints import token_endpoints, tokens
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.protocol.contract import Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.prompts import MAX_TEXT_CHARS

SCENE = Scene()
Body = dict[str, Any]


async def respond(url: str, body: Body) -> Reply:
    """Return the reply of a server's engine."""
    served = Dispatcher(
        [], ScriptedGenerator([]), INFO, model_names=["tiny"], online=token_endpoints(SCENE.model)
    )
    reply = await served.answer(url, body, "req_1", 0)
    assert isinstance(reply, Reply)
    return reply


async def test_a_text_becomes_tokens() -> None:
    """The body has vLLM's format; the pieces are included on request."""
    ids = SCENE.tokenizer.encode("The capital é", add_special_tokens=True)
    answer = (await respond("/tokenize", {"prompt": "The capital é"})).body
    assert answer == {
        "count": len(ids),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": ids,
        "token_strs": None,
    }
    body = {"prompt": "The capital é", "return_token_strs": True}
    assert "".join((await respond("/tokenize", body)).body["token_strs"][:2]) == "The capital"


async def test_special_tokens_are_added_unless_they_are_not_wanted() -> None:
    """It is the same as for a prompt of `/v1/completions`."""
    model = text_model_of(sentencepiece_tokenizer())
    served = Dispatcher(
        [], ScriptedGenerator([]), INFO, model_names=["tiny"], online=token_endpoints(model)
    )
    counts = []
    for fields in ({}, {"add_special_tokens": False}):
        reply = await served.answer("/tokenize", {"prompt": "a b", **fields}, "req_1", 0)
        assert isinstance(reply, Reply)
        counts.append(reply.body["count"])
    assert counts[0] == counts[1] + 1


async def test_a_conversation_becomes_the_models_prompt() -> None:
    """The template renders it like a chat request."""
    messages = [{"role": "user", "content": "Hi"}]
    tokens = (await respond("/tokenize", {"messages": messages})).body["tokens"]
    [sequence] = SCENE.chats.prepare({"messages": messages}, METADATA).requests
    assert tokens == sequence.prompt_ids


async def test_the_tokenizer_is_described() -> None:
    """It has the template's names of special tokens, and the template; a base model has none."""
    template = SCENE.model.chat_template
    assert template is not None
    info = (await respond("/tokenizer_info", {})).body
    assert info["eos_token"] == SCENE.tokenizer.vocabulary.special_tokens["eos_token"]
    assert info["chat_template"] == template.source_text
    assert info["model_max_length"] == MAX_MODEL_LEN
    assert {"bos_token", "pad_token"} <= info.keys()
    base = Dispatcher(
        [],
        ScriptedGenerator([]),
        INFO,
        model_names=["tiny"],
        online=token_endpoints(replace(SCENE.model, chat_template=None)),
    )
    reply = await base.answer("/tokenizer_info", {}, "req_1", 0)
    assert isinstance(reply, Reply)
    assert reply.body["chat_template"] is None


@pytest.mark.parametrize("field", ["prompt", "messages"])
async def test_a_long_text_is_counted_up_to_the_context(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer reads no more of four million characters than a context may have."""
    scene, num_chars = Scene(), list[int]()
    backend = scene.tokenizer.vocabulary.backend

    class CountingBackend:
        """A backend that counts the characters that it reads."""

        def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
            num_chars.append(sum(map(len, texts)))
            return backend.encode_batch_fast(texts, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

    monkeypatch.setattr(scene.tokenizer, "least_tokens", lambda _: 0)
    counting = replace(scene.tokenizer.vocabulary, backend=CountingBackend())
    monkeypatch.setattr(scene.tokenizer, "vocabulary", counting)
    monkeypatch.setattr(scene.tokenizer, "_backend", CountingBackend())
    endpoint = token_endpoints(scene.model)[0]
    text = "of the " * (MAX_TEXT_CHARS // 7)
    value = text if field == "prompt" else [{"role": "user", "content": text}]
    with pytest.raises(RequestError, match=r"the prompt has at least \d+ tokens\.$") as refused:
        endpoint.prepare({field: value}, METADATA)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", field)
    assert sum(num_chars) <= 20_000


async def test_many_tokens_are_serialized_in_a_thread() -> None:
    """A million tokens are megabytes of an answer."""
    body = {"tokens": [7] * 2_000}
    replies = [await respond("/detokenize", body), await respond("/detokenize", {"tokens": [7]})]
    assert [reply.is_long for reply in replies] == [True, False]


async def test_tokens_of_too_long_a_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of many bytes may be repeated a million times."""
    monkeypatch.setattr(tokens, "_MAX_DETOKENIZED_BYTES", 8)
    ids = SCENE.tokenizer.encode("The capital", add_special_tokens=False)
    reply = await respond("/detokenize", {"tokens": ids})
    assert reply.body["error"]["message"] == "The text of `tokens` exceeds 8 bytes: send fewer."


async def test_tokens_become_text() -> None:
    """The text is restored, including special tokens."""
    text = "<|im_start|>user é"
    ids = (await respond("/tokenize", {"prompt": text})).body["tokens"]
    assert (await respond("/detokenize", {"tokens": ids})).body == {"prompt": text}


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a" * (MAX_TEXT_CHARS + 1)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [99_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
    ],
)
async def test_invalid_bodies_are_rejected_by_name(url: str, body: Body, param: str) -> None:
    """The error is the same as for any other body."""
    reply = await respond(url, body)
    assert reply.status_code in (400, 404)
    assert reply.body["error"]["param"] == param


async def test_rows_of_files_cannot_tokenize() -> None:
    """Such rows would have no use."""
    served = Dispatcher(
        [], ScriptedGenerator([]), INFO, model_names=["tiny"], online=token_endpoints(SCENE.model)
    )
    reply = await served.respond("/tokenize", {"prompt": "a"}, "req_1", 0)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "url")
