"""Sparse vectors and several vectors of a text, compared with sentence-transformers' encoders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModel, AutoTokenizer

from tests.engine.model.encoders.small_encoders import save
from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal, serving
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints import pooling
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.encoders.pooling_config import read_pooling_config
from tidemill.engine.model.endpoint_names import endpoints_of

pytestmark = pytest.mark.usefixtures("proved")

Pairs = list[dict[str, Any]]
MLM: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 1},
    "DistilBert": {"hidden_dim": 80},
    "MPNet": {},
    "ModernBert": {"local_attention": 16, "global_attn_every_n_layers": 2},
}


def dense(pairs: Pairs, width: int = 30_522) -> NDArray[np.float64]:
    """Return a sparse vector's dimensions, those without a pair being 0."""
    indexes = [pair["index"] for pair in pairs]
    assert indexes == sorted(set(indexes))
    assert all(pair["value"] > 0 for pair in pairs)
    vector = np.zeros(width)
    vector[indexes] = [pair["value"] for pair in pairs]
    return vector


def splade(folder: Path, family: str = "Bert", **settings: Any) -> SparseEncoder:
    """Save a small SPLADE model to `folder` and return it."""
    network = save(folder.with_name(f"{folder.name}-network"), family, "ForMaskedLM", **MLM[family])
    transformer = Transformer(str(network), transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling(**settings)], device="cpu")
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Bert", {"pooling_strategy": "sum"}),
        ("Bert", {"activation_function": "log1p_relu"}),
        *((family, {}) for family in MLM if family != "Bert"),
    ],
)
async def test_sparse_vectors_are_those_of_sentence_transformers(
    family: str, settings: dict[str, Any], serve: Serve, tmp_path: Path
) -> None:
    """SPLADE of each family's masked language model, and of each kind of pooling."""
    model = splade(tmp_path / "model", family, **settings)
    body = await answer(serve(tmp_path / "model"), "/pooling", input=TEXTS)
    expected = model.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    for item, vector in zip(body["data"], expected, strict=True):
        assert np.allclose(dense(item["data"]), vector, atol=1e-4)


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small SPLADE model."""
    folder = tmp_path_factory.mktemp("splade") / "model"
    splade(folder)
    return folder


@pytest.fixture(scope="module")
def sparse(sparse_folder: Path) -> Iterator[Dispatcher]:
    """Return a small SPLADE model behind its endpoints."""
    with serving() as load:
        yield load(sparse_folder)


async def test_forms_and_errors_of_sparse_vectors(
    sparse: Dispatcher, sparse_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs by index for texts and token IDs; what the model does not have is refused."""
    assert endpoints_of(EngineConfig(str(sparse_folder))) == ("/pooling",)
    body = await answer(sparse, "/pooling", input=TEXTS, task="embed_sparse")
    ids = AutoTokenizer.from_pretrained(sparse_folder)(TEXTS).input_ids
    by_ids = await answer(sparse, "/pooling", input=ids)
    for item, other in zip(body["data"], by_ids["data"], strict=True):
        assert item["object"] == "pooling"
        assert np.allclose(dense(item["data"]), dense(other["data"]), atol=1e-5)
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    for wrong, param, words in (
        ({"task": "embed"}, "task", "this model supports 'embed_sparse'."),
        ({"task": "token_classify"}, "task", "this model supports 'embed_sparse'."),
        ({"encoding_format": "base64"}, "encoding_format", "a sparse vector is a list of pairs."),
        ({"use_activation": False}, "use_activation", "cannot be false"),
        ({"prompt_name": "title"}, "prompt_name", "this model has document, query"),
        ({"prompt_name": 1}, "prompt_name", "must be"),
        ({"input": [7], "prompt_name": "query"}, "prompt_name", "for text `input`"),
        ({"input": {"a": 1}}, "input", "`input` must be"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": "tide " * 400}, "input", "maximum context length"),
        ({"dimensions": 8}, "dimensions", "is not supported"),
    ):
        reply = await refusal(sparse, "/pooling", **{"input": "a", **wrong})
        error = reply.body["error"]
        assert error["param"] == param, error
        assert words in error["message"], error
    for url in ("/v1/embeddings", "/v1/chat/completions"):
        reply = await refusal(sparse, url, input="a")
        assert "this model supports /pooling." in reply.body["error"]["message"]
    monkeypatch.setattr(pooling, "MAX_PAIRS", 10)
    reply = await refusal(sparse, "/pooling", input=TEXTS)
    assert "pairs of index and value; the maximum is 10." in reply.body["error"]["message"]


async def test_a_masked_language_model_is_splade_by_an_option(
    served: Dispatcher, serve: Serve, tmp_path: Path
) -> None:
    """The option names SPLADE, as with text-embeddings-inference; other models refuse it."""
    folder = save(tmp_path / "mlm", "Bert", "ForMaskedLM")
    option = {"pooler_config": {"pooling_type": "SPLADE"}}
    body = await answer(serve(folder, **option), "/pooling", input=TEXTS)
    expected = SparseEncoder(str(folder), device="cpu").encode(TEXTS)
    for item, vector in zip(body["data"], expected.to_dense().numpy(), strict=True):
        assert np.allclose(dense(item["data"]), vector, atol=1e-4)
    with pytest.raises(ModelRefused, match="needs a masked language model"):
        serve(save(tmp_path / "bert", "Bert"), **option)
    with pytest.raises(ModelRefused, match="sparse vectors are supported for models that"):
        serve(save(tmp_path / "electra", "Electra", "ForMaskedLM", embedding_size=48), **option)
    reply = await refusal(served, "/pooling", input="a", task="embed_sparse")
    assert "this model supports 'embed' or 'token_embed'." in reply.body["error"]["message"]


def test_the_option_agrees_with_the_modules_of_a_sparse_model(sparse_folder: Path) -> None:
    """Servers of text-embeddings-inference pass it for all models; the files say more."""
    config = json.loads((sparse_folder / "config.json").read_bytes())
    named, unnamed = (
        read_pooling_config(config, EngineConfig(str(sparse_folder), pooler_config=option))
        for option in ({"pooling_type": "SPLADE"}, {})
    )
    assert named == unnamed
    assert named.splade is not None


async def test_modules_of_sparse_models_are_checked(
    sparse_folder: Path, serve: Serve, tmp_path: Path
) -> None:
    """An unknown pooling, a missing one, or logits of other sizes are refused by name."""
    config = {"pooling_strategy": "max", "activation_function": "relu"}
    for number, (name, contents, words) in enumerate(
        [
            ("1_SpladePooling/config.json", {**config, "pooling_strategy": "mean"}, "mean"),
            ("1_SpladePooling/config.json", {**config, "activation_function": "gelu"}, "gelu"),
            ("modules.json", [{"type": "sentence_transformers.models.Transformer"}], "has no"),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(sparse_folder, folder)
        (folder / name).write_text(json.dumps(contents))
        with pytest.raises(ModelRefused, match=words):
            serve(folder)
    weights = load_file(sparse_folder / "model.safetensors")
    del weights["cls.predictions.transform.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "modules.json").write_bytes((sparse_folder / "modules.json").read_bytes())
    with pytest.raises(ModelRefused, match=r"its weights lack cls\.predictions\.transform\.dense"):
        serve(folder)
    (folder / "1_SpladePooling" / "config.json").unlink()
    with pytest.raises(ModelRefused, match="lists '1_SpladePooling', which has no config"):
        serve(folder)


@pytest.fixture(scope="module")
def m3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small BGE-M3 with its two heads."""
    folder = save(tmp_path_factory.mktemp("m3"), "XLMRoberta", type_vocab_size=1)
    torch.manual_seed(2)
    for name, width in (("sparse_linear.pt", 1), ("colbert_linear.pt", 48)):
        torch.save(torch.nn.Linear(48, width).state_dict(), folder / name)
    return folder


async def test_bge_m3_has_all_kinds_of_vectors(m3_folder: Path, serve: Serve) -> None:
    """FlagEmbedding's formulas, and vLLM's weights of tokens, from one network."""
    served = serve(m3_folder)
    tokenizer = AutoTokenizer.from_pretrained(m3_folder)
    module = AutoModel.from_pretrained(m3_folder)
    heads = {
        name: torch.load(m3_folder / f"{name}_linear.pt", weights_only=True)
        for name in ("sparse", "colbert")
    }
    bodies = {
        task: (await answer(served, "/pooling", input=TEXTS, task=task))["data"]
        for task in ("embed", "token_embed", "embed_sparse", "token_classify")
    }
    special = {tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text).input_ids
        with torch.inference_mode():
            hidden = module(torch.tensor([ids])).last_hidden_state[0]
            weights = torch.nn.functional.linear(hidden, **heads["sparse"]).relu()
            vectors = torch.nn.functional.linear(hidden[1:], **heads["colbert"])
        expected = np.zeros(30_522)
        for index, weight in zip(ids, weights[:, 0].tolist(), strict=True):
            if index not in special:
                expected[index] = max(expected[index], weight)
        unit = torch.nn.functional.normalize
        assert np.allclose(dense(bodies["embed_sparse"][number]["data"]), expected, atol=1e-4)
        assert np.allclose(bodies["token_classify"][number]["data"], weights[1:-1], atol=1e-4)
        assert np.allclose(bodies["token_embed"][number]["data"], unit(vectors), atol=1e-4)
        assert np.allclose(bodies["embed"][number]["data"], unit(hidden[0], dim=0), atol=1e-4)
    raw = {"task": "token_classify", "use_activation": False}
    body = await answer(served, "/pooling", input=TEXTS[0], **raw)
    assert np.min(body["data"][0]["data"]) < 0
    vectors = (await answer(served, "/v1/embeddings", input=TEXTS))["data"]
    for item, other in zip(vectors, bodies["embed"], strict=True):
        assert np.allclose(item["embedding"], other["data"], atol=1e-6)
    reply = await refusal(served, "/pooling", input="a", task="classify")
    assert "'token_embed' or 'embed_sparse' or 'token_classify'" in reply.body["error"]["message"]


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_broken_heads_of_bge_m3_are_refused(
    name: str, m3_folder: Path, serve: Serve, tmp_path: Path
) -> None:
    """A truncated file, another shape, or a file with code in it is an error by its name."""
    folder = tmp_path / "m3"
    shutil.copytree(m3_folder, folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(ModelRefused, match=f"{name} cannot be read"):
        serve(folder)
    torch.save(torch.nn.Linear(16, 1).state_dict(), folder / name)
    with pytest.raises(ModelRefused, match=f"{name} belongs to another model"):
        serve(folder)
    torch.save(torch.nn.Linear(48, 1), folder / name)
    with pytest.raises(ModelRefused, match=f"{name} cannot be read"):
        serve(folder)
