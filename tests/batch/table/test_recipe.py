"""Recipes: their results, and the message for each invalid one."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import load_recipe, parse_recipe

WHOLE = """
url = "/v1/chat/completions"
messages = [{role = "system", content = "You label."}, {role = "user", content = "{{ text }}"}]
id = "review_id"
keep = ["review_id", "stars", "review_id"]
params = {temperature = 0, n = 2}
output = "csv"
"""


def test_a_recipe_is_read_from_toml() -> None:
    """Columns that are listed twice are kept once."""
    recipe = parse_recipe(load_recipe(WHOLE))
    assert recipe.fields["messages"][1] == {"role": "user", "content": "{{ text }}"}
    assert (recipe.id, recipe.keep, recipe.output) == ("review_id", ("review_id", "stars"), "csv")
    assert recipe.body_params == {"temperature": 0, "n": 2}
    assert recipe.num_choices == 2


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{{ a }}"}]}),
        ("/v1/completions", {"prompt": "{{ a }}"}),
        ("/v1/embeddings", {"input": "{{ a }}"}),
        ("/v1/responses", {"input": "{{ a }}"}),
        ("/v1/moderations", {"input": "{{ a }}"}),
        ("/v1/audio/transcriptions", {"file_url": "{{ a }}"}),
    ],
)
def test_a_prompt_fills_the_field_of_its_url(url: str, expected: Any) -> None:
    """In chats it becomes the user's message."""
    recipe = parse_recipe({"url": url, "prompt": "{{ a }}"})
    assert recipe.fields == expected
    assert ("encoding_format" in recipe.body_params) == (url == "/v1/embeddings")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "it has no template"),
        ({"promt": "x"}, "`promt` is not a recipe key: did you mean `prompt`?"),
        (
            {"prompt": "x", "escalate": "m"},
            "`escalate` is not supported here, where one model runs: use `tidemill run`, or a",
        ),
        ({"temperature": 0, "prompt": "x"}, "put parameters of the request into `params`"),
        ({"prompt": "x", "url": "/v1/images"}, "`url` is '/v1/images': it must be one of /v1/"),
        (
            {"prompt": "x", "url": "/v1/rerank"},
            "has no `prompt`: use its own fields, such as `query`",
        ),
        (
            {"prompt": "x", "url": "/v1/score"},
            "has no `prompt`: use its own fields, such as `text_1`",
        ),
        (
            {"prompt": "x", "file_url": "y", "url": "/v1/audio/transcriptions"},
            "`prompt` and `file_url` cannot be used together",
        ),
        ({"prompt": "x", "messages": []}, "`prompt` and `messages` cannot be used together"),
        ({"input": "x", "system": "y", "url": "/v1/embeddings"}, "`system` needs a `prompt`"),
        ({"system": "y", "url": "/v1/responses"}, "`system` needs a `prompt` or `input`"),
        ({"input": "x", "params": {"input": "y"}}, "`input` is both in `params` and outside of it"),
        ({"prompt": "x", "params": 1}, "`params` must be a table"),
        ({"prompt": "x", "id": 1}, "`id` must be a string"),
        ({"prompt": "x", "keep": "a"}, "`keep` must be a list of column names"),
        ({"prompt": "x", "output": "xlsx"}, "`output` is 'xlsx': it must be one of parquet, csv"),
        ({"prompt": "x", "vectors": "int4", "url": "/v1/embeddings"}, "`vectors` is 'int4'"),
        (
            {
                "prompt": "x",
                "vectors": "int8",
                "url": "/pooling",
                "params": {"task": "token_embed"},
            },
            "/pooling does not support `vectors`, the type of /v1/embeddings: omit it",
        ),
        ({"prompt": "x", "confidence": 1}, "`confidence` must be true or false"),
        (
            {"prompt": "x", "confidence": True, "url": "/v1/embeddings"},
            "/v1/embeddings does not support `confidence`",
        ),
        (
            {"prompt": "x", "params": {"output_dtype": "int8"}, "url": "/v1/embeddings"},
            "`params.output_dtype` does not support tables: use `vectors`",
        ),
    ],
)
def test_an_invalid_recipe_is_reported(given: dict[str, Any], words: str) -> None:
    """The message has the key at fault."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(given)
    assert words in str(caught.value)


ASK = {"ask": "good: Is it good?", "escalate": "large"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ASK,
            "`escalate` needs either `escalate_below` or `target_accuracy`, a number above",
        ),
        ({**ASK, "escalate_below": True}, "`escalate` needs either `escalate_below` or"),
        ({**ASK, "escalate_below": 1.5}, "`escalate` needs either `escalate_below` or"),
        ({**ASK, "escalate_below": 1, "target_accuracy": 1}, "needs either `escalate_below` or"),
        ({**ASK, "escalate_below": 1, "escalate_by": "x"}, "`escalate_by` is 'x': it must be"),
        ({"ask": ASK["ask"], "escalate_by": "chat"}, "`escalate_by` needs `escalate`, the model"),
        ({**ASK, "escalate": 1, "escalate_below": 1}, "`escalate` must be a string"),
        ({"ask": ASK["ask"], "escalate_below": 0.5}, "`escalate_below` needs `escalate`"),
        ({"prompt": "x", "escalate": "m", "escalate_below": 0.5}, "needs questions to decide"),
        ({**ASK, "ask": "model: Is it?", "escalate_below": 0.5}, "the question `model` has the"),
        ({**ASK, "gold": "a", "escalate_below": 0.5}, "cannot be combined with `gold` in a dep"),
        ({**ASK, "target_accuracy": 2}, "`escalate` needs either `escalate_below` or"),
    ],
)
def test_an_invalid_cascade_is_reported(given: dict[str, Any], words: str) -> None:
    """A valid one names the model of each row."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(given, may_escalate=True)
    assert words in str(caught.value)
    recipe = parse_recipe({**ASK, "escalate_below": 1}, may_escalate=True)
    assert (recipe.escalate, recipe.escalate_below, recipe.has_models) == ("large", 1.0, True)


def test_invalid_toml_is_reported() -> None:
    """The message has the place."""
    with pytest.raises(RecipeError, match=r"it is not valid TOML: .*line 1"):
        load_recipe("prompt = \n")
    with pytest.raises(RecipeError, match=r"line 2.*: inside a template, use single quotes"):
        load_recipe('id = "a"\nmessages = [{content = "{{ row["a b"] }}"}]\n')
