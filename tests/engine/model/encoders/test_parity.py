"""Vectors and scores of our encoder, against sentence-transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from tests.engine.model.encoders.small_encoders import (
    FAMILIES,
    MINILM,
    TEXTS,
    cosines,
    loaded,
    requests,
    save,
    values,
)
from tidemill.engine.kernels.cpu import linear
from tidemill.engine.scheduling.encoding import EncodingRequest

pytestmark = pytest.mark.usefixtures("proved")

PAIRS = list(zip(TEXTS, reversed(TEXTS), strict=True))


def sentence_transformer(folder: Path, mode: str | tuple[str, ...] = "mean") -> SentenceTransformer:
    """Return a folder's model with its own pooling, saved back to the folder."""
    network = Transformer(str(folder), max_seq_length=300)
    pooling = Pooling(network.get_embedding_dimension(), pooling_mode=mode)
    model = SentenceTransformer(modules=[network, pooling], device="cpu")
    model.save(str(folder))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, family: str) -> None:
    """The engine agrees on batches of texts of many lengths, for every family."""
    model = sentence_transformer(save(tmp_path, family))
    got = values(loaded(tmp_path), requests(model.tokenizer, TEXTS))
    assert cosines(got, model.encode(TEXTS)).min() >= 0.9999
    np.testing.assert_allclose(got, model.encode(TEXTS), atol=2e-5)


def test_vectors_of_a_real_model_are_those_of_sentence_transformers() -> None:
    """MiniLM, which was trained; before they are brought to length 1."""
    model = SentenceTransformer(str(MINILM), device="cpu")
    got = values(loaded(MINILM), requests(model.tokenizer, TEXTS, 256))
    assert cosines(got, model.encode(TEXTS)).min() >= 0.9999999


@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert"])
def test_in_bf16_vectors_point_the_same_way(tmp_path: Path, family: str) -> None:
    """The directions agree up to rounding."""
    model = sentence_transformer(save(tmp_path, family))
    got = values(loaded(tmp_path, dtype="bfloat16"), requests(model.tokenizer, TEXTS))
    assert cosines(got, model.encode(TEXTS)).min() >= 0.995


@pytest.mark.parametrize(
    "mode",
    [
        *("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
        ("cls", "mean", "lasttoken"),
    ],
)
def test_every_way_of_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, mode: str | tuple[str, ...]
) -> None:
    """One alone, or some joined."""
    model = sentence_transformer(save(tmp_path, "Bert"), mode)
    got = values(loaded(tmp_path), requests(model.tokenizer, TEXTS))
    np.testing.assert_allclose(got, model.encode(TEXTS), atol=2e-5)


@pytest.mark.parametrize("mode", ["mean", "cls", "weightedmean"])
def test_a_prompt_that_is_left_out_is_read_but_not_pooled(tmp_path: Path, mode: str) -> None:
    """Pooling has include_prompt false here."""
    network = Transformer(str(save(tmp_path, "Bert")), max_seq_length=300)
    pooling = Pooling(48, pooling_mode=mode, include_prompt=False)
    model = SentenceTransformer(modules=[network, pooling], device="cpu")
    model.save(str(tmp_path))
    prompt = "Find what answers this: "
    skipped = len(model.tokenizer(prompt)["input_ids"]) - 1  # the end of a text is not the prompt's
    encoding_requests = [
        EncodingRequest(request.token_ids, num_skipped=skipped)
        for request in requests(model.tokenizer, [prompt + text for text in TEXTS])
    ]
    got = values(loaded(tmp_path), encoding_requests)
    np.testing.assert_allclose(got, model.encode(TEXTS, prompt=prompt), atol=2e-5)


def test_modules_after_pooling_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Dense layers with activations, one without a bias."""
    network = Transformer(str(save(tmp_path, "Bert")), max_seq_length=300)
    modules = [
        network,
        Pooling(48),
        Dense(48, 70),
        Dense(70, 20, bias=False, activation_function=torch.nn.GELU()),
    ]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(tmp_path))
    ours = loaded(tmp_path)
    assert ours.width == 20
    got = values(ours, requests(model.tokenizer, TEXTS))
    np.testing.assert_allclose(got, model.encode(TEXTS), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_sentence_transformers(tmp_path: Path, family: str) -> None:
    """Scores of pairs agree for each family's head, before the activation."""
    # The tokenizer distinguishes two segments.
    types = {"type_vocab_size": 2} if "type_vocab_size" in FAMILIES[family] else {}
    save(tmp_path, family, "ForSequenceClassification", num_labels=1, **types)
    model = CrossEncoder(str(tmp_path), device="cpu", max_length=300)
    ours = loaded(tmp_path)
    assert ours.width == 1
    got = values(ours, requests(model.tokenizer, PAIRS))[:, 0]
    expected = model.predict(PAIRS, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.ptp(expected) > 1e-2


def test_a_padding_token_within_a_text_has_transformers_position(
    tmp_path: Path,
) -> None:
    """RoBERTa does not count it as a position."""
    save(tmp_path, "Roberta")
    ids = [5, 1, 1, 9, 1, 12, 7]
    ours = loaded(tmp_path)
    got = values(ours, [EncodingRequest(own) for own in ([8, 9], ids, [7, 1])])
    from transformers import RobertaModel

    module = RobertaModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        hidden = module(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
    np.testing.assert_allclose(got[1], hidden.last_hidden_state[0, 0].numpy(), atol=2e-5)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            "float32",
            marks=pytest.mark.skipif(
                not linear.supports(torch.float32),
                reason="no kernel for fp32 on this processor: torch's sums up to 3 rows otherwise",
            ),
        ),
        "bfloat16",
    ],
)
def test_a_vector_is_the_same_alone_and_in_company(tmp_path: Path, dtype: str) -> None:
    """The result is bit-identical."""
    save(tmp_path, "ModernBert")
    ours = loaded(tmp_path, dtype=dtype)
    lengths = [1, 3, 17, 64, 65, 200, 300]
    generator = np.random.default_rng(0)
    encoding_requests = [
        EncodingRequest(generator.integers(3, 9000, length).tolist()) for length in lengths
    ]
    together = values(ours, encoding_requests)
    for request, row in zip(encoding_requests, together, strict=True):
        assert np.array_equal(values(ours, [request])[0], row)
