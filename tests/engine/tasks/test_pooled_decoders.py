"""Decoders that give vectors or scores, from their folder to a body."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import (
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal, with_files
from tidemill.demo import MODEL_PATH
from tidemill.protocol.contract import EngineError

pytestmark = pytest.mark.usefixtures("proved")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Qwen 3 of random weights, with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(7)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=json.loads((MODEL_PATH / "config.json").read_bytes())["vocab_size"],
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    return folder


def stack(*names: str) -> list[dict[str, Any]]:
    """Return the list of a network and modules, each in its own folder."""
    parts = {"Transformer": "base.modules.transformer", "Normalize": "base.modules.normalize"}
    parts |= {"Pooling": "sentence_transformer.modules.pooling"}
    parts |= {"LogitScore": "cross_encoder.modules.logit_score"}
    return [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"sentence_transformers.{parts[name]}.{name}",
        }
        for i, name in enumerate(["Transformer", *names])
    ]


async def test_a_decoder_gives_the_vectors_of_its_last_tokens(
    serve: Serve, decoder: Path, tmp_path: Path
) -> None:
    """Qwen3-Embedding does the same, with a prompt for queries."""
    folder = with_files(
        decoder,
        tmp_path,
        {
            "modules.json": stack("Pooling", "Normalize"),
            "1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": "lasttoken"},
            "2_Normalize/config.json": {},
            "config_sentence_transformers.json": {"prompts": {"query": "Find: "}},
        },
    )
    reference = SentenceTransformer(str(folder), device="cpu")
    served = serve(folder)
    for name in (None, "query"):
        body = await answer(served, "/v1/embeddings", input=TEXTS, prompt_name=name)
        vectors = np.array([entry["embedding"] for entry in body["data"]])
        assert np.abs(vectors - reference.encode(TEXTS, prompt_name=name)).max() < 1e-5


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)


@pytest.mark.parametrize("has_template", [False, True])
async def test_a_decoder_that_answers_with_a_token_is_a_reranker(
    serve: Serve, decoder: Path, tmp_path: Path, *, has_template: bool
) -> None:
    """It uses sentence-transformers' module, with and without a template for pairs."""
    text = {"method": "forward", "method_output_name": "logits"}
    saved: dict[str, Any] = {
        "transformer_task": "text-generation",
        "module_output_name": "causal_logits",
    }
    files: dict[str, Any] = {
        "modules.json": stack("LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": 300, "false_token_id": 301},
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
    }
    if has_template:
        saved["modality_config"] = {"text": text, "message": {**text, "format": "flat"}}
        saved["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True}}
        files["chat_template.jinja"] = TEMPLATE
    else:
        saved["modality_config"] = {"text": text}
    folder = with_files(decoder, tmp_path, {**files, "sentence_bert_config.json": saved})
    pairs = [("Who?", "Paris is in France."), ("What is it?", "a"), ("Who?", "b " * 20)]
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs, batch_size=1)
    body = await answer(
        serve(folder),
        "/v1/score",
        text_1=[first for first, _ in pairs],
        text_2=[second for _, second in pairs],
    )
    assert np.allclose([entry["score"] for entry in body["data"]], expected, atol=1e-4)


async def test_tokens_and_template_of_a_reranker_are_configurable(
    serve: Serve, decoder: Path
) -> None:
    """Like vLLM's, the score is the sigmoid of the difference of two logits, after the template."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in (301, 300)]
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": tokens,
        "is_original_qwen3_reranker": True,
    }
    served = serve(decoder, hf_overrides=overrides, chat_template=TEMPLATE)
    body = await answer(served, "/rerank", query="Who?", documents=["Paris", "You"])
    model = Qwen3ForCausalLM.from_pretrained(decoder, dtype=torch.float32)
    for result in body["results"]:
        text = f"<query>: Who?\n<document>: {result['document']['text']}\n"
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        expected = torch.sigmoid(logits[300] - logits[301])
        assert result["relevance_score"] == pytest.approx(float(expected), abs=1e-5)


async def test_flags_select_text_vectors_or_scores_of_a_decoder(
    serve: Serve, decoder: Path
) -> None:
    """The flags are those of vLLM."""
    urls = (
        {"/v1/chat/completions", "/v1/completions"},
        {"/v1/embeddings", "/v2/embed", "/v1/score", "/v1/rerank"},
    )
    for settings, served_urls in (({}, urls[0]), ({"convert": "embed"}, urls[1])):
        reply = await refusal(serve(decoder, **settings), "/v1/unknown")
        assert all(url in reply.body["error"]["message"] for url in served_urls)
    body = await answer(serve(decoder, runner="pooling"), "/v1/embeddings", input="Hello")
    vector = np.array(body["data"][0]["embedding"])
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    model = Qwen3ForCausalLM.from_pretrained(decoder, dtype=torch.float32).model
    with torch.no_grad():
        last = model(tokenizer("Hello", return_tensors="pt").input_ids).last_hidden_state[0, -1]
    assert np.abs(vector - torch.nn.functional.normalize(last, dim=0).numpy()).max() < 1e-5
    with pytest.raises(EngineError):
        serve(decoder, convert="classify")


def test_pooling_flags_of_a_generative_model_are_refused(serve: Serve) -> None:
    """They would have no effect."""
    with pytest.raises(EngineError, match="--pooler-config requires an embedding"):
        serve(MODEL_PATH, pooler_config={"pooling_type": "CLS"})
