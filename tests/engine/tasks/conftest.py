"""Folders of models of vectors and scores, loaded behind their endpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tests.engine.scripted_encoder import minilm
from tests.engine.tasks.pooled import SMALL, Serve, serving
from tidemill.engine.endpoints.dispatcher import Dispatcher


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return what loads a folder; the engine ends with the test."""
    with serving() as load:
        yield load


@pytest.fixture(scope="module")
def served() -> Iterator[Dispatcher]:
    """Return MiniLM behind its endpoints."""
    with serving() as load:
        yield load(minilm())


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small cross-encoder of random weights, with MiniLM's tokenizer."""
    folder = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(5)
    config = BertConfig(**SMALL, vocab_size=30_522, max_position_embeddings=64)
    BertForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(minilm() / name, folder)
    return folder
