"""Unsupported parameters that would change the result: refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tidemill.protocol.audio import TranscriptionRequest
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.classification import ClassificationRequest
from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.embeddings import EmbeddingRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.pooling import PoolRequest
from tidemill.protocol.requests import read_body
from tidemill.protocol.scoring import RerankRequest, ScoreRequest
from tidemill.protocol.unsupported import (
    CHAT,
    GENERATION,
    LABELS,
    POOL,
    SCORES,
    TRANSCRIPTION,
    VECTORS,
)
from tidemill.protocol.validation import NeutralValues, refuse_unsupported

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 1.2),
        ("suffix", "end"),
        ("logits_processors", ["x"]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("input_ids", [1, 2]),
        ("session_params", {"id": "s"}),
        ("chat_template", "{{ messages }}"),
        ("prompt_embeds", "x"),
        ("lora_path", "x"),
        ("return_hidden_states", True),
    ],
)
def test_a_parameter_that_changes_the_result_is_refused(name: str, value: object) -> None:
    """The error's `param` is the parameter, and the message has its allowed values."""
    with pytest.raises(RequestError) as caught:
        read_body(ChatCompletionRequest, {name: value})
    assert caught.value.param == name
    assert caught.value.code == "unsupported_parameter"
    assert "null" in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        dict.fromkeys(GENERATION),
        {name: values[0] for name, values in GENERATION.items() if values},
        {"tool_choice": "auto", "tools": []},
        {"use_beam_search": False, "length_penalty": 1.0, "suffix": ""},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"best_of": 3, "n": 3},
        {"best_of": 1, "n": None},
    ],
)
def test_values_without_effect_are_accepted(body: dict[str, Any]) -> None:
    """They are null, and the defaults that clients write out."""
    refuse_unsupported(body, GENERATION)


@pytest.mark.parametrize(
    ("name", "value", "body"),
    [
        ("embed_dtype", "float16", {"input": "a"}),
        ("endianness", "big", {"input": "a"}),
        ("padding", "max_length", {"input": "a"}),
        ("images", ["data:"], {"input": "a"}),
        ("output_dimension", 8, {"input": "a"}),
        ("top_k", 3, {"query": "a", "documents": ["b"]}),
        ("rank_fields", ["title"], {"query": "a", "documents": ["b"]}),
        ("activation", False, {"query": "a", "documents": ["b"]}),
    ],
)
def test_unsupported_parameters_of_embeddings_and_scores_are_refused(
    name: str, value: object, body: dict[str, Any]
) -> None:
    """Each kind of body has a separate table."""
    kind = RerankRequest if "query" in body else EmbeddingRequest
    with pytest.raises(RequestError) as caught:
        read_body(kind, {**body, name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    instead = "send `messages` with `image_url` parts" if name == "images" else "remove it"
    assert instead in caught.value.message


@pytest.mark.parametrize("kind", [ClassificationRequest, PoolRequest])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation", False),
        ("softmax", False),
        ("is_split_into_words", True),
        ("offset_mapping", [[0, 1]]),
        ("delimiter", ","),
    ],
)
def test_unsupported_parameters_of_classifiers_are_refused(
    kind: type[BaseModel], name: str, value: object
) -> None:
    """They are older names of other servers, and options of transformers' pipelines."""
    with pytest.raises(RequestError) as caught:
        read_body(kind, {"input": "a", name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    read_body(kind, {"input": "a", name: None})


@pytest.mark.parametrize(("name", "value"), [("tools", [TOOL]), ("tool_choice", "required")])
def test_tools_are_only_for_chats(name: str, value: object) -> None:
    """A completion with tools is refused."""
    with pytest.raises(RequestError) as caught:
        read_body(CompletionRequest, {"prompt": "a", name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_generation_parameters_have_no_effect_on_embeddings() -> None:
    """A body may have fields for other endpoints."""
    body = {"input": "a", "tools": [TOOL], "padding": "do_not_pad"}
    assert read_body(EmbeddingRequest, body).input == ["a"]


@pytest.mark.parametrize(
    ("kinds", "neutral"),
    [
        ((ChatCompletionRequest,), CHAT),
        ((CompletionRequest,), GENERATION),
        ((EmbeddingRequest,), VECTORS),
        ((ScoreRequest, RerankRequest), SCORES),
        ((ClassificationRequest,), LABELS),
        ((PoolRequest,), POOL),
        ((TranscriptionRequest,), TRANSCRIPTION),
    ],
)
def test_no_parameter_is_both_supported_and_refused(
    kinds: tuple[type[BaseModel], ...], neutral: NeutralValues
) -> None:
    """A parameter that becomes supported must leave the table."""
    assert {name for kind in kinds for name in kind.model_fields} & neutral.keys() == set()
