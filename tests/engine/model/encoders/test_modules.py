"""Modules in addition to a network, fetched in the layout of the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from tests.engine.model.encoders.small_encoders import TEXTS, loaded, requests, save, values
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.encoders.loaded_encoder import LoadedEncoder
from tidemill.engine.model.encoders.loading import load_encoder
from tidemill.engine.model.encoders.pooling_config import read_pooling_config

pytestmark = pytest.mark.usefixtures("proved")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "2_Dense/model.safetensors"


@pytest.fixture(name="model")
def fixture_model(tmp_path: Path) -> SentenceTransformer:
    """Return a small model with a Dense layer, saved to a folder."""
    network = Transformer(str(save(tmp_path / "saved", "Bert")), max_seq_length=300)
    model = SentenceTransformer(modules=[network, Pooling(48), Dense(48, 20)], device="cpu")
    model.save(str(tmp_path / "saved"))
    return model


@pytest.fixture(name="snapshot")
def fixture_snapshot(
    model: SentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return the snapshot of `tiny/embedder` in the hub's cache, offline: links to its blobs."""
    del model  # it has been saved
    repository = tmp_path / "hub" / "models--tiny--embedder"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    saved = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file()]
    for number, path in enumerate(saved):
        link = snapshot / path.relative_to(tmp_path / "saved")
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(repository / "blobs" / str(number))
        up = "../" * len(link.relative_to(repository).parts[:-1])
        link.symlink_to(f"{up}blobs/{number}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def from_hub(snapshot: Path) -> LoadedEncoder:
    """Load `tiny/embedder` by its id."""
    config = EngineConfig(model="tiny/embedder", device="cpu", dtype="float32")
    description = read_pooling_config(json.loads((snapshot / "config.json").read_bytes()), config)
    assert description is not None
    return load_encoder(config, description)


def test_the_weights_of_modules_are_read_by_the_hubs_links(
    model: SentenceTransformer, snapshot: Path
) -> None:
    """The weights are in a folder of the snapshot, for the model's id and for its folder."""
    assert (snapshot / WEIGHTS).readlink().parts[:4] == ("..", "..", "..", "blobs")
    expected = model.encode(TEXTS)
    for ours in (from_hub(snapshot), loaded(snapshot)):
        got = values(ours, requests(model.tokenizer, TEXTS))
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_a_link_of_a_module_that_leads_elsewhere_is_refused(snapshot: Path, tmp_path: Path) -> None:
    """Nothing outside of the cache is read."""
    blob = (snapshot / WEIGHTS).resolve()
    blob.rename(tmp_path / "elsewhere")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelRefused, match="links to"):
        from_hub(snapshot)


def test_missing_weights_of_a_module_are_named(snapshot: Path) -> None:
    """A hub with only pickled weights is not queried for a model of the folder's name."""
    (snapshot / WEIGHTS).rename(snapshot / "2_Dense/pytorch_model.bin")
    repository = snapshot.parent.parent
    missing = repository / ".no_exist" / COMMIT / WEIGHTS
    missing.parent.mkdir(parents=True)
    missing.touch()
    with pytest.raises(ModelRefused, match=r"has neither .* \(it contains pytorch_model\.bin\)"):
        from_hub(snapshot)
