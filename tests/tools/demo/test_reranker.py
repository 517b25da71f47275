"""The demo reranker: small in the repository, and it ranks the answer to a question first."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.long_parameters import with_long
from tidemill import demo
from tools.demo.pairs import questions
from tools.demo.train_reranker import (
    REQUIRED_ACCURACY,
    accuracy,
    assemble,
    base_path,
    is_trained,
    scores,
)

Loaded = tuple[Any, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the whole model."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("reranker")
    assemble(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    """The model as transformers loads it, with its tokenizer."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def test_what_is_kept_is_small_and_no_more_than_was_trained() -> None:
    """The weights of the model below come with their package, not with this repository."""
    [path] = demo.RERANKER_PATH.iterdir()
    assert path.stat().st_size <= 1_000_000
    assert all(is_trained(name) for name in load_file(path))


def test_the_assembled_model_is_one_of_transformers_own(loaded: Loaded) -> None:
    """A sequence classifier with one label; what was not trained is the package's."""
    model, _ = loaded
    assert model.config.architectures == ["BertForSequenceClassification"]
    assert model.config.num_labels == 1
    below = load_file(base_path() / "model.safetensors")
    name = "encoder.layer.3.intermediate.dense.weight"
    assert torch.equal(model.state_dict()[f"bert.{name}"], below[name])


@pytest.mark.parametrize("num_questions", with_long([25], [100]))
def test_the_answer_to_a_held_out_question_is_scored_best(
    loaded: Loaded, num_questions: int
) -> None:
    """It is the best of four documents in at least 95 of 100 held-out questions."""
    assert accuracy(*loaded, num_questions=num_questions) >= REQUIRED_ACCURACY


@torch.inference_mode()
def test_it_ranks_by_meaning_and_not_by_common_words(loaded: Loaded) -> None:
    """The document that answers wins over one with more words of the question."""
    question = "What is the capital of France?"
    documents = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]
    wrong, right = scores(*loaded, [question] * 2, documents).tolist()
    assert right > 0 > wrong


def test_nothing_of_a_held_out_subject_is_trained_on() -> None:
    """No question is in both sets."""
    train = {question for question, _ in islice(questions("train", 1), 2000)}
    assert not train & {question for question, _ in islice(questions("held_out", 2), 500)}
