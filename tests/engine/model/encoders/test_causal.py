"""Decoders that compute vectors or scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from tests.engine.model.encoders.small_encoders import (
    FAMILIES,
    TEXTS,
    loaded,
    requests,
    save,
    values,
)
from tidemill.engine.model.encoders.causal import CausalEncoder
from tidemill.engine.scheduling.encoding import EncodingRequest

DECODER = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512}
GEMMA = {**DECODER, "sliding_window": 24, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}
DECODERS: dict[str, dict[str, Any]] = {
    "Qwen3": DECODER,
    "Mistral": {**DECODER, "sliding_window": 50},
    "Gemma3Text": {**GEMMA, "use_bidirectional_attention": True},
    "Lfm2": {**DECODER, "layer_types": ["conv", "full_attention", "conv"]},
}


@pytest.fixture(name="families", autouse=True)
def fixture_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow saving them like encoders."""
    for family, changes in DECODERS.items():
        monkeypatch.setitem(FAMILIES, family, changes)


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
@pytest.mark.parametrize("family", DECODERS)
def test_vectors_of_decoders_are_those_of_sentence_transformers(
    tmp_path: Path, family: str, mode: str
) -> None:
    """Our decoder runs without a head's weights; Gemma's is bidirectional, LFM2's recurrent."""
    save(tmp_path, family, pad_token_id=0)
    network = Transformer(str(tmp_path), max_seq_length=300)
    modules = [network, Pooling(48, pooling_mode=mode), Dense(48, 24)]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(tmp_path))
    ours = loaded(tmp_path)
    assert isinstance(ours.network, CausalEncoder)
    got = values(ours, requests(model.tokenizer, TEXTS))
    np.testing.assert_allclose(got, model.encode(TEXTS), atol=5e-5)


@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
def test_scores_of_decoders_are_those_of_sentence_transformers(tmp_path: Path, family: str) -> None:
    """The head reads the last token."""
    save(tmp_path, family, "ForSequenceClassification", num_labels=1, pad_token_id=0)
    model = CrossEncoder(str(tmp_path), device="cpu", max_length=300)
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    got = values(loaded(tmp_path), requests(model.tokenizer, pairs))[:, 0]
    expected = model.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.ptp(expected) > 1e-2


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_a_decoder_may_score_by_two_of_its_tokens(
    tmp_path: Path, *, tie_word_embeddings: bool
) -> None:
    """The score is how much more likely one token is: only two rows of the head are read."""
    save(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=tie_word_embeddings)
    overrides = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    ours = loaded(tmp_path, runner="pooling", hf_overrides=overrides)
    ids = [[5, 7, 9], [4] * 20, [3]]
    got = values(ours, [EncodingRequest(own) for own in ids])
    module = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    for own, (score,) in zip(ids, got.tolist(), strict=True):
        with torch.inference_mode():
            logits = module(torch.tensor([own])).logits[0, -1]
        assert score == pytest.approx(float(logits[yes] - logits[no]), abs=1e-4)
