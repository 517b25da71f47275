"""Models of vectors and scores, from their folder to a body: held to sentence-transformers."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.processors import RobertaProcessing
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from demo import MODEL_PATH
from engine.config import EngineConfig
from engine.contract import Reply
from engine.endpoints.served import ServedEngine
from engine.errors import EngineError, ModelRefused
from engine.load import load_served
from tests.engine.scripted_encoder import minilm

TEXTS = [
    "The capital of France is Paris.",
    "a",
    "What is the capital of Norway? " * 12,
    "Émile naïve 北京 🙂",
]
Serve = Callable[..., ServedEngine]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_labels": 1,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Return what loads a folder in fp32 on the CPU, with settings and a template."""
    loaded: list[ServedEngine] = []

    def load(folder: Path, *, chat_template: str | None = None, **settings: Any) -> ServedEngine:
        config = EngineConfig(str(folder), dtype="float32", device="cpu", **settings)
        loaded.append(load_served(config, served_names=("tiny",), chat_template=chat_template))
        return loaded[-1]

    yield load
    for engine in loaded:
        engine.close()


@pytest.fixture(scope="module")
def served(serve: Serve) -> ServedEngine:
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


def minilm_with(folder: Path, files: dict[str, Any]) -> Path:
    """Return a folder of MiniLM in which some files say something else."""
    for source in minilm().rglob("*"):
        if source.is_file():
            target = folder / source.relative_to(minilm())
            target.parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(source, target)
    for name, said in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(json.dumps(said))
    return folder


async def answer(served: ServedEngine, url: str, **body: Any) -> dict[str, Any]:
    """Return a body that must be one."""
    reply = await served.respond(url, body, "req_1", 0)
    assert reply.status_code == 200, reply.body
    return reply.body


async def refusal(served: ServedEngine, url: str, **body: Any) -> Reply:
    """Return a reply that must be none."""
    reply = await served.respond(url, body, "req_1", 0)
    assert reply.status_code == 400
    return reply


async def test_vectors_are_those_of_sentence_transformers(served: ServedEngine) -> None:
    """Of every length and script, in either form."""
    body = await answer(served, "/v1/embeddings", input=TEXTS)
    expected = SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS)
    vectors = np.array([entry["embedding"] for entry in body["data"]], dtype=np.float32)
    assert np.abs(vectors - expected).max() < 1e-5
    assert ((vectors * expected).sum(axis=1) > 0.9999).all()
    packed = await answer(served, "/v1/embeddings", input=TEXTS, encoding_format="base64")
    read = [np.frombuffer(b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
    assert np.array_equal(read, vectors)


async def test_scores_of_vectors_are_their_cosines(served: ServedEngine) -> None:
    """Within 1e-4 of what sentence-transformers says, and the ranking follows."""
    reference = SentenceTransformer(str(minilm()), device="cpu")
    query, *documents = TEXTS
    expected = reference.similarity(reference.encode([query]), reference.encode(documents))[0]
    body = await answer(served, "/v1/score", text_1=query, text_2=documents)
    scores = [entry["score"] for entry in body["data"]]
    assert np.allclose(scores, expected, atol=1e-5)
    ranked = await answer(served, "/rerank", query=query, documents=documents)
    order = [result["index"] for result in ranked["results"]]
    assert order == sorted(range(3), key=lambda i: -scores[i])


async def test_a_texts_limit_is_the_folders(served: ServedEngine) -> None:
    """256 of its 512 positions; on request a text is cut to it as sentence-transformers does."""
    text = "word " * 300
    reply = await refusal(served, "/v1/embeddings", input=text)
    assert "maximum context length is 256 tokens" in reply.body["error"]["message"]
    assert "has 302 tokens" in reply.body["error"]["message"]
    body = await answer(served, "/v1/embeddings", input=text, truncate_prompt_tokens=-1)
    expected = SentenceTransformer(str(minilm()), device="cpu").encode(text)
    assert np.abs(np.array(body["data"][0]["embedding"]) - expected).max() < 1e-5
    assert body["usage"]["prompt_tokens"] == 256


async def test_a_limit_that_is_asked_for_is_the_networks_at_most(serve: Serve) -> None:
    """Above what the folder says, but never above its positions."""
    longer = serve(minilm(), max_model_len=400)
    body = await answer(longer, "/v1/embeddings", input="word " * 300)
    assert body["usage"]["prompt_tokens"] == 302
    with pytest.raises(EngineError, match="512"):
        serve(minilm(), max_model_len=513)


async def test_prompts_dense_layers_and_capitals_are_as_the_folder_says(
    serve: Serve, tmp_path: Path
) -> None:
    """All that stands beside a network, in one folder."""
    from safetensors.torch import save_file

    modules = json.loads((minilm() / "modules.json").read_bytes())
    dense = {"name": "d", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    folder = minilm_with(
        tmp_path,
        {
            "modules.json": [*modules[:2], dense, modules[2]],
            "1_Pooling/config.json": {
                "word_embedding_dimension": 384,
                "pooling_mode": ["cls", "mean"],
                "include_prompt": False,
            },
            "3_Dense/config.json": {"in_features": 768, "out_features": 32},
            "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": True},
            "config_sentence_transformers.json": {
                "prompts": {"query": "Find this: ", "plain": ""},
                "default_prompt_name": "query",
            },
        },
    )
    torch.manual_seed(3)
    weights = {"linear.weight": torch.randn(32, 768), "linear.bias": torch.randn(32)}
    save_file(weights, folder / "3_Dense/model.safetensors")
    reference = SentenceTransformer(str(folder), device="cpu")
    served = serve(folder, hf_overrides={"is_matryoshka": True})
    texts = ["The Capital of France", "a"]
    for asked, told in (({}, {}), ({"prompt_name": "plain"}, {"prompt_name": "plain"})):
        body = await answer(served, "/v1/embeddings", input=texts, **asked)
        vectors = [entry["embedding"] for entry in body["data"]]
        assert np.abs(np.array(vectors) - reference.encode(texts, **told)).max() < 1e-5
    cut = await answer(served, "/v1/embeddings", input=texts, dimensions=8)
    expected = reference.encode(texts, truncate_dim=8, normalize_embeddings=True)
    assert np.abs(np.array([e["embedding"] for e in cut["data"]]) - expected).max() < 1e-5


async def test_scores_of_a_cross_encoder_are_those_of_sentence_transformers(
    serve: Serve, reranker: Path
) -> None:
    """Through the sigmoid, and as they stand."""
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
    assert "this one serves /v1/score, /v1/rerank" in reply.body["error"]["message"]


async def test_a_document_is_cut_to_what_the_network_takes(serve: Serve, reranker: Path) -> None:
    """As sentence-transformers cuts it, where it alone is too long."""
    pair = ("What is it?", "word " * 100)
    expected = CrossEncoder(str(reranker), device="cpu", max_length=64).predict([pair])
    body = await answer(
        serve(reranker), "/score", text_1=pair[0], text_2=pair[1], truncate_prompt_tokens=-1
    )
    assert body["data"][0]["score"] == pytest.approx(expected[0], abs=1e-5)
    assert body["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": {"model_type": "bert", "num_labels": 3}}, "3 labels"),
        (
            {
                "config.json": {
                    "model_type": "bert",
                    "num_labels": 1,
                    "sbert_ce_default_activation_function": "torch.nn.ELU",
                }
            },
            "ELU",
        ),
    ],
)
def test_scores_that_no_endpoint_could_show_refuse_the_model(
    files: dict[str, Any], words: str, tmp_path: Path, serve: Serve
) -> None:
    """Before anything is loaded."""
    for said in files.values():
        said["architectures"] = ["BertForSequenceClassification"]
    folder = minilm_with(tmp_path, {**files, "modules.json": None})
    (folder / "modules.json").unlink()
    with pytest.raises(ModelRefused, match=words):
        serve(folder)


def test_overrides_are_refused_for_a_model_that_writes(serve: Serve) -> None:
    """They would change nothing there."""
    with pytest.raises(EngineError, match="writes text"):
        serve(MODEL_PATH, hf_overrides={"vocab_size": 5})


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Qwen 3 of random weights, with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(7)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=json.loads((MODEL_PATH / "config.json").read_bytes())["vocab_size"],
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    return folder


def with_files(folder: Path, target: Path, files: dict[str, Any]) -> Path:
    """Return a copy of a folder with further files."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for name, said in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(said if isinstance(said, str) else json.dumps(said))
    return target


def stack(*names: str) -> list[dict[str, Any]]:
    """Return the list of a network and of modules, in folders of their own."""
    parts = {"Transformer": "base.modules.transformer", "Normalize": "base.modules.normalize"}
    parts |= {"Pooling": "sentence_transformer.modules.pooling"}
    parts |= {"LogitScore": "cross_encoder.modules.logit_score"}
    return [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"sentence_transformers.{parts[name]}.{name}",
        }
        for i, name in enumerate(["Transformer", *names])
    ]


async def test_a_decoder_gives_the_vectors_of_its_last_tokens(
    serve: Serve, decoder: Path, tmp_path: Path
) -> None:
    """As Qwen3-Embedding does, with a prompt for queries."""
    folder = with_files(
        decoder,
        tmp_path,
        {
            "modules.json": stack("Pooling", "Normalize"),
            "1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": "lasttoken"},
            "2_Normalize/config.json": {},
            "config_sentence_transformers.json": {"prompts": {"query": "Find: "}},
        },
    )
    reference = SentenceTransformer(str(folder), device="cpu")
    served = serve(folder)
    for name in (None, "query"):
        body = await answer(served, "/v1/embeddings", input=TEXTS, prompt_name=name)
        vectors = np.array([entry["embedding"] for entry in body["data"]])
        assert np.abs(vectors - reference.encode(TEXTS, prompt_name=name)).max() < 1e-5


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)


@pytest.mark.parametrize("has_template", [False, True])
async def test_a_decoder_that_answers_by_a_token_is_a_reranker(
    serve: Serve, decoder: Path, tmp_path: Path, *, has_template: bool
) -> None:
    """By sentence-transformers' module, with and without a template of pairs."""
    text = {"method": "forward", "method_output_name": "logits"}
    saved: dict[str, Any] = {
        "transformer_task": "text-generation",
        "module_output_name": "causal_logits",
    }
    files: dict[str, Any] = {
        "modules.json": stack("LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": 300, "false_token_id": 301},
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
    }
    if has_template:
        saved["modality_config"] = {"text": text, "message": {**text, "format": "flat"}}
        saved["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True}}
        files["chat_template.jinja"] = TEMPLATE
    else:
        saved["modality_config"] = {"text": text}
    folder = with_files(decoder, tmp_path, {**files, "sentence_bert_config.json": saved})
    pairs = [("Who?", "Paris is in France."), ("What is it?", "a"), ("Who?", "b " * 20)]
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs, batch_size=1)
    body = await answer(
        serve(folder),
        "/v1/score",
        text_1=[first for first, _ in pairs],
        text_2=[second for _, second in pairs],
    )
    assert np.allclose([entry["score"] for entry in body["data"]], expected, atol=1e-4)


async def test_tokens_and_template_of_a_reranker_may_be_told(serve: Serve, decoder: Path) -> None:
    """As vLLM has it: the sigmoid of one logit less the other, after the template."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in (301, 300)]
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": tokens,
        "is_original_qwen3_reranker": True,
    }
    served = serve(decoder, hf_overrides=overrides, chat_template=TEMPLATE)
    body = await answer(served, "/rerank", query="Who?", documents=["Paris", "You"])
    model = Qwen3ForCausalLM.from_pretrained(decoder, dtype=torch.float32)
    for result in body["results"]:
        text = f"<query>: Who?\n<document>: {result['document']['text']}\n"
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        expected = torch.sigmoid(logits[300] - logits[301])
        assert result["relevance_score"] == pytest.approx(float(expected), abs=1e-5)


async def test_a_decoder_writes_gives_vectors_or_scores_as_it_is_told(
    serve: Serve, decoder: Path
) -> None:
    """By the flags that vLLM has for it."""
    urls = (
        {"/v1/chat/completions", "/v1/completions"},
        {"/v1/embeddings", "/v1/score", "/v1/rerank"},
    )
    for settings, served_urls in (({}, urls[0]), ({"convert": "embed"}, urls[1])):
        reply = await refusal(serve(decoder, **settings), "/v1/unknown")
        assert all(url in reply.body["error"]["message"] for url in served_urls)
    body = await answer(serve(decoder, runner="pooling"), "/v1/embeddings", input="Hello")
    vector = np.array(body["data"][0]["embedding"])
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    model = Qwen3ForCausalLM.from_pretrained(decoder, dtype=torch.float32).model
    with torch.no_grad():
        last = model(tokenizer("Hello", return_tensors="pt").input_ids).last_hidden_state[0, -1]
    assert np.abs(vector - torch.nn.functional.normalize(last, dim=0).numpy()).max() < 1e-5
    with pytest.raises(EngineError):
        serve(decoder, convert="classify")


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
    """Save a cross-encoder that knows no segments, though its tokenizer tells them."""
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
async def test_pairs_of_other_families_are_read_as_their_tokenizers_have_them(
    save: Callable[[Path], None], serve: Serve, tmp_path: Path
) -> None:
    """Scores are those of sentence-transformers, whole and cut."""
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


def test_a_model_that_no_file_says_how_to_pool_says_so(serve: Serve, tmp_path: Path) -> None:
    """As one that was trained to fill in words; one with files of its own says nothing."""
    config = BertConfig(**SMALL, vocab_size=30_522, max_position_embeddings=64)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(minilm() / name, tmp_path)
    [note] = serve(tmp_path).info().notes
    assert "its first token's" in note
    assert not any("vectors are made" in note for note in serve(minilm()).info().notes)


@pytest.mark.parametrize("kind", [["bert"], {}, 5])
def test_a_model_type_that_is_no_name_is_refused(
    kind: object, serve: Serve, tmp_path: Path
) -> None:
    """By a sentence, wherever it is looked up."""
    config = json.loads((minilm() / "config.json").read_bytes())
    folder = minilm_with(tmp_path, {"config.json": {**config, "model_type": kind}})
    with pytest.raises(EngineError, match="model"):
        serve(folder)
