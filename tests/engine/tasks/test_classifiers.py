"""Classifiers, from their folder to a body, compared with transformers' pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import ModerationCreateResponse
from transformers import pipeline

from tests.engine.model.encoders.small_encoders import save
from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.inspection import inspect_model
from tidemill.protocol.contract import EngineError

pytestmark = pytest.mark.usefixtures("proved")

NAMES = ("anger", "joy", "fear")
LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
PAIR = {"text": "The tide comes in.", "text_pair": "The water rises."}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 2},
    "ModernBert": {"problem_type": "single_label_classification"},
    "DebertaV2": {
        "problem_type": "multi_label_classification",
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
    },
    "Qwen3": {"problem_type": "regression", "num_key_value_heads": 3, "head_dim": 16},
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable that transformers' pipelines set."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.mark.parametrize("family", FAMILIES)
async def test_labels_equal_those_of_transformers(
    family: str, serve: Serve, tmp_path: Path
) -> None:
    """Probabilities of one label or of each, or the numbers of a regression; also for pairs."""
    folder = save(tmp_path, family, "ForSequenceClassification", **LABELS, **FAMILIES[family])
    classify = pipeline("text-classification", str(folder), device="cpu", top_k=None)
    body = await answer(served := serve(folder), "/classify", input=TEXTS)
    assert body["labels"] == list(NAMES)
    pairs = await answer(served, "/v1/classify", input=[PAIR])
    for item, text in zip([*body["data"], *pairs["data"]], [*TEXTS, PAIR], strict=True):
        expected = {entry["label"]: entry["score"] for entry in classify([text])[0]}
        assert np.allclose(item["probs"], [expected[name] for name in NAMES], atol=1e-4)
        assert item["label"] == max(expected, key=expected.__getitem__)
        assert item["num_classes"] == len(NAMES)
    raw = await answer(served, "/v1/classify", input=TEXTS[0], use_activation=False)
    [logits] = classify([TEXTS[0]], function_to_apply="none")
    assert max(raw["data"][0]["probs"]) == pytest.approx(logits[0]["score"], abs=1e-4)


async def test_a_reranker_also_classifies_single_texts(serve: Serve, reranker: Path) -> None:
    """A reward model reads a text or conversation, and has one label."""
    classify = pipeline("text-classification", str(reranker), device="cpu")
    served = serve(reranker, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    [expected] = classify(TEXTS[0])
    for body in ({"input": TEXTS[0]}, {"messages": [{"role": "user", "content": TEXTS[0]}]}):
        body |= {"add_special_tokens": True}
        [item] = (await answer(served, "/v1/classify", **body))["data"]
        assert (item["label"], item["num_classes"]) == ("LABEL_0", 1)
        assert item["probs"] == [pytest.approx(expected["score"], abs=1e-5)]
    reply = await refusal(served, "/v1/moderations", input=TEXTS[0])
    assert (
        "It requires a classifier with named labels, or a guard model with"
        in reply.body["error"]["message"]
    )


CATEGORIES = {"id2label": {0: "Hate", 1: "self_harm", 2: "safe", 3: "spam"}}


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
async def test_labels_are_moderation_categories(problem: str, serve: Serve, tmp_path: Path) -> None:
    """OpenAI's by their names; one that the model lacks is false, of no input type."""
    kind = {"problem_type": problem, "label2id": {}, **CATEGORIES}
    served = serve(save(tmp_path, "Bert", "ForSequenceClassification", **kind))
    probs = (await answer(served, "/classify", input=TEXTS))["data"]
    body = await answer(served, "/v1/moderations", input=TEXTS)
    parsed = ModerationCreateResponse.model_validate(body, strict=True)
    is_exclusive = problem.startswith("single")
    for item, result, (hate, harm, safe, spam) in zip(
        body["results"], parsed.results, [each["probs"] for each in probs], strict=True
    ):
        least = max(hate, harm, safe, spam) if is_exclusive else 0.5
        assert (result.category_scores.hate, result.category_scores.self_harm) == (hate, harm)
        assert item["category_scores"]["spam"] == spam
        assert result.categories.self_harm == (harm >= least)
        assert result.flagged == (max(hate, harm, spam) >= least)
        assert item["category_applied_input_types"]["self-harm"] == ["text"]
        assert (result.categories.violence, result.category_scores.violence) == (False, 0)
        assert result.category_applied_input_types.violence == []
        assert "safe" not in item["categories"]
    parts = [{"type": "text", "text": "A short"}, {"type": "text", "text": "one."}]
    [joined] = (await answer(served, "/moderations", input=parts))["results"]
    assert joined == (await answer(served, "/moderations", input="A short\none."))["results"][0]
    part = parts[0]
    for wrong in ([{"type": "image_url"}], [part] * 3_000, [part, "a"], [[101, 102]], [""], None):
        reply = await refusal(served, "/v1/moderations", input=wrong)
        assert reply.body["error"]["param"].startswith("input")
    reply = await refusal(served, "/v1/moderations", input="a", use_activation=False)
    assert reply.body["error"]["code"] == "unsupported_parameter"


async def test_requests_that_a_classifier_cannot_answer(serve: Serve, tmp_path: Path) -> None:
    """Each has one sentence that names the field."""
    folder = save(tmp_path, "Bert", "ForSequenceClassification", **LABELS)
    served = serve(folder)
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for url, body, words in (
        ("/v1/chat/completions", chat, "this model supports /v1/classify"),
        ("/v1/embeddings", {"input": "a"}, "this model supports /v1/classify"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "this model supports /v1/classify"),
        ("/v1/classify", chat, "This model has no chat template: send `input`"),
        ("/v1/classify", {"input": "tide " * 400}, "maximum context length is 320 tokens"),
        ("/v1/classify", {"input": ["a", ""]}, "`input.1` must not be empty"),
        ("/v1/classify", {"input": {"text": "a"}}, "`input` must be an object like"),
        ("/v1/classify", {"input": [PAIR, "a"]}, "`input.1` must be an object like"),
        ("/v1/classify", {"input": {**PAIR, "text_pair": 1}}, "`input.text_pair` must be a string"),
        ("/v1/classify", {"input": "a", "candidate_labels": ["x"]}, "is not supported"),
        ("/v1/classify", {}, "`input` is required"),
    ):
        reply = await refusal(served, url, **body)
        assert words in reply.body["error"]["message"], reply.body
    cut = await answer(served, "/classify", input="tide " * 400, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 320
    long_first = {"text": "tide " * 400, "text_pair": "x"}
    cut = await answer(served, "/classify", input=long_first, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 320
    assert inspect_model(EngineConfig(str(folder))).gives == "labels"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id2label": {"0": "a", "1": "b", "3": "c"}}, "unsupported id2label"),
        ({"problem_type": "ranking"}, "unsupported problem_type 'ranking'"),
        ({"problem_type": ["regression"]}, "unsupported problem_type"),
        ({"id2label": {"0": "a", "1": "b"}}, "weights"),
        ({"num_labels": 2}, "weights"),
        ({"sbert_ce_default_activation_function": "torch.nn.ELU"}, "activation ELU is not"),
    ],
)
def test_labels_that_do_not_fit_refuse_the_model(
    fields: dict[str, Any], words: str, serve: Serve, tmp_path: Path
) -> None:
    """The error names the field, or the weights of another number of labels."""
    folder = save(tmp_path, "Bert", "ForSequenceClassification", **LABELS)
    config = json.loads((folder / "config.json").read_bytes()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=words) as caught:
        serve(folder)
    assert isinstance(caught.value, ModelRefused)
