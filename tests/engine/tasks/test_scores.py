"""Cross-encoders, from their folder to a body, compared with sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer
from tokenizers.processors import RobertaProcessing
from transformers import (
    BertTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests.engine.scripted_encoder import minilm
from tests.engine.tasks.pooled import SMALL, TEXTS, Serve, answer, minilm_with, refusal
from tidemill.demo import MODEL_PATH
from tidemill.engine.errors import ModelRefused

pytestmark = pytest.mark.usefixtures("proved")


async def test_scores_of_a_cross_encoder_equal_those_of_sentence_transformers(
    serve: Serve, reranker: Path
) -> None:
    """It holds with the sigmoid and for raw logits."""
    served = serve(reranker)
    query, *documents = TEXTS[0], TEXTS[1], TEXTS[3], "Paris"
    pairs = [(query, document) for document in documents]
    reference = CrossEncoder(str(reranker), device="cpu")
    body = await answer(served, "/v1/score", queries=query, documents=documents)
    scores = [entry["score"] for entry in body["data"]]
    assert np.allclose(scores, reference.predict(pairs), atol=1e-5)
    raw = await answer(served, "/score", data_1=query, data_2=documents, use_activation=False)
    expected = reference.predict(pairs, activation_fn=torch.nn.Identity())
    assert np.allclose([entry["score"] for entry in raw["data"]], expected, atol=1e-4)
    ranked = await answer(served, "/v2/rerank", query=query, documents=documents)
    assert [result["index"] for result in ranked["results"]] == [
        entry["corpus_id"] for entry in reference.rank(query, documents)
    ]
    reply = await refusal(served, "/v1/embeddings", input="a")
    assert "this model supports /v1/score, /v1/rerank" in reply.body["error"]["message"]


async def test_a_document_is_truncated_to_the_context(serve: Serve, reranker: Path) -> None:
    """If only the document is too long, sentence-transformers truncates it the same way."""
    pair = ("What is it?", "word " * 100)
    expected = CrossEncoder(str(reranker), device="cpu", max_length=64).predict([pair])
    body = await answer(
        serve(reranker), "/score", text_1=pair[0], text_2=pair[1], truncate_prompt_tokens=-1
    )
    assert body["data"][0]["score"] == pytest.approx(expected[0], abs=1e-5)
    assert body["usage"]["prompt_tokens"] == 64


def test_an_unknown_activation_of_scores_refuses_the_model(tmp_path: Path, serve: Serve) -> None:
    """The error comes before anything is loaded."""
    config = {
        "model_type": "bert",
        "num_labels": 1,
        "sbert_ce_default_activation_function": "torch.nn.ELU",
        "architectures": ["BertForSequenceClassification"],
    }
    folder = minilm_with(tmp_path, {"config.json": config, "modules.json": None})
    (folder / "modules.json").unlink()
    with pytest.raises(ModelRefused, match="ELU"):
        serve(folder)


def roberta(folder: Path) -> None:
    """Save a cross-encoder whose pairs have two separators between them and one segment."""
    backend = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    ids = {token: backend.token_to_id(token) for token in ("<s>", "</s>", "<pad>")}
    backend.post_processor = RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]))
    config = RobertaConfig(
        **SMALL,
        vocab_size=backend.get_vocab_size(),
        pad_token_id=ids["<pad>"],
        max_position_embeddings=ids["<pad>"] + 67,
    )
    RobertaForSequenceClassification(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


def distilbert(folder: Path) -> None:
    """Save a cross-encoder without segments, though its tokenizer returns them."""
    config = DistilBertConfig(
        dim=64,
        n_layers=2,
        n_heads=4,
        hidden_dim=128,
        max_position_embeddings=64,
        num_labels=1,
        vocab_size=30_522,
        initializer_range=0.5,
    )
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizer.from_pretrained(
        minilm(), model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(folder)


@pytest.mark.parametrize("save", [roberta, distilbert])
async def test_pairs_of_other_families_follow_their_tokenizers(
    save: Callable[[Path], None], serve: Serve, tmp_path: Path
) -> None:
    """Scores equal those of sentence-transformers, with and without truncation."""
    torch.manual_seed(11)
    save(tmp_path)
    pairs = [("Who?", "Paris is in France."), ("What is it?", "a"), ("Who?", "b " * 100)]
    reference = CrossEncoder(str(tmp_path), device="cpu", max_length=64)
    expected = reference.predict(pairs, batch_size=1)
    body = await answer(
        serve(tmp_path),
        "/v1/score",
        text_1=[first for first, _ in pairs],
        text_2=[second for _, second in pairs],
        truncate_prompt_tokens=-1,
    )
    assert np.allclose([entry["score"] for entry in body["data"]], expected, atol=1e-4)
    assert len({round(float(score), 6) for score in expected}) == len(pairs)
