"""Rows of Ray's processors as requests, and what is refused in them by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tidemill.sdk.integrations.ray.processor_requests import RowRequests

CHAT = [{"role": "user", "content": "Hi"}]
PREFILL = [*CHAT, {"role": "assistant", "content": "Well, "}]


def line_of(row: dict[str, Any], task: str = "generate", *, has_chats: bool = True) -> Any:
    """Return the line of a row, parsed."""
    return json.loads(RowRequests(task, "m", has_chats, {"enable_thinking": False}).line(row))


def test_a_chat_has_the_defaults_of_vllm() -> None:
    """The model's files do not change them; nulls of Arrow's structs are ignored."""
    found = line_of(
        {"messages": CHAT, "sampling_params": {"max_tokens": 5, "top_p": None, "detokenize": False}}
    )
    assert found["url"] == "/v1/chat/completions"
    assert found["body"] == {
        "messages": CHAT,
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 5,
        "return_token_ids": True,
    }


def test_a_chat_that_ends_with_the_assistant_goes_on_there() -> None:
    """Ray does the same."""
    body = line_of({"messages": PREFILL, "sampling_params": {}})["body"]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Hi"}, "Hi"),
        ({"tokenized_prompt": np.array([3, 4])}, [3, 4]),
        ({"prompt": "Hi", "tokenized_prompt": [3, 4]}, [3, 4]),
    ],
)
def test_without_the_chat_template_a_row_has_a_prompt(row: dict[str, Any], prompt: Any) -> None:
    """The prompt may be token IDs, also as an array."""
    found = line_of({**row, "sampling_params": {}, "model": "adapter"}, has_chats=False)
    assert found["url"] == "/v1/completions"
    assert (found["body"]["prompt"], found["body"]["model"]) == (prompt, "adapter")


def test_texts_become_vectors_and_pairs_scores() -> None:
    """Cut as the tokenizer would have cut them."""
    cut = {"truncation": True, "max_length": 8}
    row = {"prompt": "Hi", "tokenization_kwargs": cut, "pooling_params": {"dimensions": 2}}
    found = line_of(row, "embed", has_chats=False)
    assert found["url"] == "/v1/embeddings"
    assert found["body"] == {
        "input": "Hi",
        "dimensions": 2,
        "truncate_prompt_tokens": 8,
        "encoding_format": "base64",
    }
    found = line_of({"text_1": "a", "text_2": "b"}, "score")
    assert (found["url"], found["body"]) == ("/v1/score", {"text_1": "a", "text_2": "b"})


@pytest.mark.parametrize(
    ("row", "task", "words"),
    [
        ({"messages": CHAT}, "generate", "`sampling_params` is required"),
        ({"sampling_params": {}}, "generate", "`messages` is required"),
        (
            {"messages": CHAT, "sampling_params": {"logprobs": 2}},
            "generate",
            "`sampling_params.logprobs` is not supported: use tidemill.ray.answer",
        ),
        ({"messages": CHAT, "sampling_params": {"n": 2}}, "generate", "a row has only one text"),
        ({"messages": CHAT, "sampling_params": {"warp": 2}}, "generate", "sampling_params.warp"),
        ({"messages": CHAT, "sampling_params": "hot"}, "generate", "must be a dict, not str"),
        ({"multimodal_data": {"image": 1}}, "generate", "send images as `image_url`"),
        (
            {"messages": [{"role": "user", "content": object()}], "sampling_params": {}},
            "generate",
            "the request cannot be serialized to JSON: ",
        ),
        ({"prompt": "Hi"}, "classify", "`task_type` 'classify' scores pairs of texts"),
        (
            {"prompt": "Hi", "tokenization_kwargs": {"padding": True}},
            "embed",
            "`tokenization_kwargs.padding` is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    row: dict[str, Any], task: str, words: str
) -> None:
    """The error is in the row, and the others go on."""
    found = line_of(row, task, has_chats=task == "generate")
    (error,) = (value for name, value in found.items() if name != "custom_id")
    assert words in error["message"]
