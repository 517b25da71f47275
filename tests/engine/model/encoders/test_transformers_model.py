"""Models of transformers' own classes, against sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from tests.engine.model.encoders.small_encoders import (
    FAMILIES,
    SIZES,
    TEXTS,
    cosines,
    loaded,
    requests,
    save,
    values,
)
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.inspection import inspect_model
from tidemill.engine.model.encoders import transformers_model
from tidemill.engine.model.encoders.loaded_encoder import LoadedEncoder
from tidemill.engine.model.encoders.pooling_config import Classifier
from tidemill.engine.model.encoders.transformers_model import TransformersEncoder
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.scheduling.encoding import EncodingRequest

_T5 = {"d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 3, "num_heads": 3}
T5 = {"T5": _T5, "MT5": _T5, "UMT5": _T5, "LongT5": {**_T5, "local_radius": 20}}
OTHERS: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_size": 16},
    "Electra": {"embedding_size": 16},
    **T5,
}
# Those whose tables of positions begin behind padding, where ours has something that it lacks.
OFFSET = ("Roberta", "XLMRoberta", "Camembert", "MPNet")


@pytest.fixture(name="families", autouse=True)
def fixture_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow saving them like encoders."""
    for family, changes in OTHERS.items():
        monkeypatch.setitem(FAMILIES, family, changes)


def sentence_transformer(folder: Path) -> SentenceTransformer:
    """Return a folder's model with its own pooling, saved back to the folder."""
    network = Transformer(str(folder), max_seq_length=300)
    model = SentenceTransformer(modules=[network, Pooling(48)], device="cpu")
    model.save(str(folder))
    return model


def count_calls(ours: LoadedEncoder) -> list[int]:
    """Return a list that receives the number of sequences in each call of a model's module."""
    assert isinstance(ours.network, TransformersEncoder)
    calls: list[int] = []

    def note(module: object, args: object, arguments: dict[str, Any]) -> None:
        del module, args
        calls.append(len(arguments["input_ids"]))

    ours.network._module.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def test_texts_of_few_lengths_are_few_batches(tmp_path: Path) -> None:
    """Texts come in any order, and the vectors are those of sentence-transformers."""
    save(tmp_path, "Electra")
    model = sentence_transformer(tmp_path)
    ours = loaded(tmp_path)
    calls = count_calls(ours)
    few = [f"The mill has {i} stones." for i in range(9)]
    texts = [*few[:5], *TEXTS, *few[5:]]
    encoding_requests = requests(model.tokenizer, texts)
    got = values(ours, encoding_requests)
    assert cosines(got, model.encode(texts)).min() >= 0.9999
    np.testing.assert_allclose(got, model.encode(texts), atol=2e-5)
    assert sum(calls) == len(texts)
    assert len(calls) == len({len(request.token_ids) for request in encoding_requests}) < len(texts)


@pytest.mark.parametrize("family", T5)
@pytest.mark.parametrize("is_saved_whole", [False, True])
def test_the_encoder_of_a_t5_gives_vectors(
    tmp_path: Path, family: str, *, is_saved_whole: bool
) -> None:
    """sentence-t5 is published without a decoder; other weights have one."""
    save(tmp_path, family, "Model" if is_saved_whole else "EncoderModel")
    model = sentence_transformer(tmp_path)
    if is_saved_whole:
        save(tmp_path, family)  # sentence-transformers has kept the encoder alone
    ours = loaded(tmp_path)
    encoding_requests = requests(model.tokenizer, TEXTS)
    got = values(ours, [EncodingRequest(request.token_ids) for request in encoding_requests])
    assert cosines(got, model.encode(TEXTS)).min() >= 0.9999
    np.testing.assert_allclose(got, model.encode(TEXTS), atol=5e-5)


def test_scores_of_a_t5_are_refused(tmp_path: Path) -> None:
    """Its classifier reads both halves."""
    save(tmp_path, "T5", "ForSequenceClassification", num_labels=1)
    with pytest.raises(ModelRefused, match="'t5' is an encoder-decoder"):
        loaded(tmp_path)


@pytest.mark.parametrize("family", OFFSET)
def test_the_row_of_padding_is_not_a_position(tmp_path: Path, family: str) -> None:
    """A text of the context's length is read to its end."""
    save(tmp_path, family, hidden_act="quick_gelu")
    ours = loaded(tmp_path)
    assert isinstance(ours.network, TransformersEncoder)
    assert ours.max_model_len == SIZES["max_position_embeddings"] - 2
    plan = inspect_model(EngineConfig(str(tmp_path), device="cpu")).plan
    assert plan is not None
    assert plan.max_model_len == ours.max_model_len
    got = values(ours, [EncodingRequest([5] * ours.max_model_len)])
    assert np.isfinite(got).all()


def test_an_unknown_activation_is_named(tmp_path: Path) -> None:
    """The error contains the field."""
    save(tmp_path, "Bert")
    raw = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "hidden_act": "wobble"}))
    with pytest.raises(ModelRefused, match=r"config\.json has hidden_act 'wobble', which"):
        loaded(tmp_path)


def test_families_unknown_to_our_networks_are_run_by_transformers(tmp_path: Path) -> None:
    """Sequences run one by one, and a note reports it."""
    save(tmp_path, "Albert")
    network = Transformer(str(tmp_path), max_seq_length=300)
    model = SentenceTransformer(modules=[network, Pooling(48)], device="cpu")
    model.save(str(tmp_path))
    ours = loaded(tmp_path)
    (note,) = ours.notes
    assert note.startswith("transformers runs this model, with sequences of one length together")
    assert "does not implement model type 'albert'" in note
    got = values(ours, requests(model.tokenizer, TEXTS))
    np.testing.assert_allclose(got, model.encode(TEXTS), atol=2e-5)


def test_a_classifier_of_transformers_gives_its_own_scores(tmp_path: Path) -> None:
    """Whatever its head is made of."""
    save(tmp_path, "Electra", "ForSequenceClassification", num_labels=1)
    model = CrossEncoder(str(tmp_path), device="cpu", max_length=300)
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    got = values(loaded(tmp_path), requests(model.tokenizer, pairs))[:, 0]
    expected = model.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_a_head_with_another_number_of_labels_is_refused(tmp_path: Path) -> None:
    """The error has both numbers."""
    save(tmp_path, "Electra", "ForSequenceClassification", num_labels=3)
    config = json.loads((tmp_path / "config.json").read_bytes())
    checkpoint, cpu = find_checkpoint(str(tmp_path)), torch.device("cpu")
    with pytest.raises(ModelRefused, match=r"its head gives 3 numbers, but .* has 2 labels"):
        transformers_model.load(checkpoint, config, torch.float32, cpu, classifier=Classifier(2))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_labels": 2}))
    with pytest.raises(ModelRefused, match=r"out_proj.bias \[3\] instead of \[2\]"):
        loaded(tmp_path)
