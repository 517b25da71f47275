"""Folders of models of vectors and scores, loaded behind their endpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tests.engine.scripted_encoder import minilm
from tests.engine.tasks.pooled import SMALL, Serve
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Return what loads a folder in fp32 on the CPU, with settings and a template."""
    loaded: list[Dispatcher] = []

    def load(folder: Path, *, chat_template: str | None = None, **settings: Any) -> Dispatcher:
        config = EngineConfig(str(folder), dtype="float32", device="cpu", **settings)
        loaded.append(load_served(config, served_names=("tiny",), chat_template=chat_template))
        return loaded[-1]

    yield load
    for engine in loaded:
        engine.close()


@pytest.fixture(scope="module")
def served(serve: Serve) -> Dispatcher:
    """Return MiniLM behind its endpoints."""
    return serve(minilm())


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
