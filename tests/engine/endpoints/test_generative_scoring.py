"""`/v1/generative_scoring`: probabilities of label tokens behind a query and its items."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scripted_model import METADATA, Scene, text_model
from tidemill.protocol.errors import RequestError

LONG = Scene(model=replace(text_model(), max_model_len=2**17))


def score(scene: Scene, **fields: object) -> dict[str, Any]:
    """Return the body that answers a query with one item and changes."""
    body = {"query": "The capital", "items": " is", "label_token_ids": [3, 1]} | fields
    return scene.reply(scene.scoring, body).body


def test_scores_are_relative_to_the_labels_or_to_all_tokens() -> None:
    """The scripted model gives token `i` a log-probability of -i / 100."""
    scene = Scene()
    body = score(scene)
    among = 1 / (1 + math.exp(0.02))
    assert body["scores"] == [pytest.approx([among, 1 - among])]
    assert body["data"] == [{"index": 0, "object": "score", "score": pytest.approx(among)}]
    of_all = [math.exp(-0.03), math.exp(-0.01), math.exp(-0.03)]
    assert score(scene, label_token_ids=[3, 1, 3], apply_softmax=False)["scores"] == [
        pytest.approx(of_all)
    ]
    assert score(scene, label_token_ids=[7])["scores"] == [[1.0]]


def test_items_follow_the_query_or_precede_it() -> None:
    """It holds for texts and token ids; only the query has special tokens."""
    scene = Scene(model=replace(text_model(), truncate_prompt_tokens=1))  # which is for prompts
    query = scene.tokenizer.encode("The capital", add_special_tokens=True)
    body = score(scene, items=[" is", "a"])
    prompts = [one.prompt_ids for one in scene.generator.requests[-2:]]
    assert prompts == [
        query + scene.tokenizer.encode(item, add_special_tokens=False) for item in (" is", "a")
    ]
    count = sum(map(len, prompts))
    assert body["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 0,
        "total_tokens": count,
    }
    score(scene, query=[9], items=[[5, 6]], item_first=True, cache_salt="one")
    last = scene.last()
    assert (last.prompt_ids, last.max_tokens, last.cache_salt) == ([5, 6, 9], 1, "one")
    assert last.sampling.temperature == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"label_token_ids": [text_model().vocab_size]}, "label_token_ids"),
        ({"label_token_ids": ["yes"]}, "label_token_ids.0"),
        ({"query": ["a", "b"]}, "query"),
        ({"query": ""}, "query"),
        ({"items": []}, "items"),
        ({"items": [[10**6]]}, "items"),
        ({"items": "word " * 400}, "items"),
    ],
)
def test_what_cannot_be_scored_is_named(fields: dict[str, Any], param: str) -> None:
    """The error names the field itself."""
    with pytest.raises(RequestError) as caught:
        score(Scene(), **fields)
    assert caught.value.param == param


def test_a_query_is_not_repeated_for_more_items_than_memory_holds() -> None:
    """A body of 300 kB would become two hundred million tokens."""
    body = {"query": [5] * 100_000, "items": ["a"] * 2_048, "label_token_ids": [1]}
    with pytest.raises(RequestError, match=r"the maximum is 16,777,216") as refused:
        LONG.scoring.prepare(body, METADATA)
    assert refused.value.param == "items"
