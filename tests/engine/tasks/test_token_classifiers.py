"""Token classifiers, from their folder to spans, compared with transformers' pipeline."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedTokenizerFast, pipeline

from tests.engine.model.encoders.small_encoders import loaded, save
from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal, serving
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.errors import ModelRefused
from tidemill.engine.inspection import inspect_model
from tidemill.engine.model.encoders.eager import check_inputs
from tidemill.engine.model.encoders.pooling_config import read_pooling_config
from tidemill.engine.model.endpoint_names import endpoints_of

pytestmark = pytest.mark.usefixtures("proved")

NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC-X")
LABELS: dict[str, Any] = {"id2label": dict(enumerate(NAMES)), "label2id": {}}
STRATEGIES = ("none", "simple", "first", "average", "max")
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 2},
    "DistilBert": {"hidden_dim": 80},
    "ModernBert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "Qwen3": {"num_key_value_heads": 3, "head_dim": 16},
}
HARD = [
    *TEXTS,
    "Ünïcödé e\u0301tudes, 👩‍👩‍👧 in 東京都 — 'Aix-en-Provence'!",
    "[SEP] typed [CLS]",
    " \n\t ",
    "tide  mill\u00a0water " * 20,
    "\U0001f600unbelievablyunseenword\U0001f600",
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable that transformers' pipelines set."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def tagger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small token classifier."""
    return save(tmp_path_factory.mktemp("tagger"), "Bert", "ForTokenClassification", **LABELS)


@pytest.fixture(scope="module")
def tagger(tagger_folder: Path) -> Iterator[Dispatcher]:
    """Return a small token classifier behind its endpoints."""
    assert endpoints_of(EngineConfig(str(tagger_folder))) == ("/v1/classify", "/pooling")
    with serving() as load:
        yield load(tagger_folder)


def spans_of(found: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the entities of a pipeline as spans."""
    return [
        {
            "label": each.get("entity", each.get("entity_group")),
            "score": pytest.approx(float(each["score"]), abs=1e-4),
            "start": each["start"],
            "end": each["end"],
            "text": text[each["start"] : each["end"]],
        }
        for each in found
    ]


@pytest.mark.parametrize("family", FAMILIES)
async def test_spans_equal_those_of_transformers(family: str, serve: Serve, tmp_path: Path) -> None:
    """By each strategy, also in texts with accents, emoji, CJK and special tokens."""
    folder = save(tmp_path, family, "ForTokenClassification", **LABELS, **FAMILIES[family])
    tag = pipeline("token-classification", str(folder), device="cpu")
    served = serve(folder)
    lengths = set()
    for strategy in STRATEGIES:
        body = await answer(served, "/classify", input=HARD, aggregation_strategy=strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = [tag(text, aggregation_strategy=strategy) for text in HARD]
        for item, found, text in zip(body["data"], expected, HARD, strict=True):
            assert item["spans"] == spans_of(found, text)
        lengths.add(sum(len(item["spans"]) for item in body["data"]))
    assert len(lengths) > 2, "the strategies give different spans"
    assert body["usage"]["prompt_tokens"] > 100
    default = await answer(served, "/v1/classify", input=HARD[0])
    [spans] = [item["spans"] for item in default["data"]]
    assert spans == spans_of(tag(HARD[0], aggregation_strategy="simple"), HARD[0])
    report = inspect_model(EngineConfig(str(folder)))
    assert report.gives == "labels"
    assert report.runs == ("transformers" if family in ("DebertaV2", "Qwen3") else "native")


def byte_level(folder: Path, *words: str) -> Path:
    """Save a RoBERTa-like token classifier, which has a token for each byte and of some words."""
    save(folder, "Roberta", "ForTokenClassification", max_position_embeddings=642, **LABELS)
    vocabulary = dict.fromkeys(["<s>", "<pad>", "</s>", *sorted(ByteLevel.alphabet())])
    merges = []
    for word in words:
        for stop in range(1, len(word)):
            merges.append((word[:stop], word[stop]))
            vocabulary[word[: stop + 1]] = None
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        ByteLevelDecoder(),
    )
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


async def test_words_of_a_byte_level_tokenizer_are_between_spaces(
    serve: Serve, tmp_path: Path
) -> None:
    """An emoji has several tokens at one position."""
    folder = byte_level(tmp_path)
    tag = pipeline("token-classification", str(folder), device="cpu")
    served = serve(folder)
    for strategy in STRATEGIES:
        body = await answer(served, "/classify", input=HARD, aggregation_strategy=strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = [tag(text, aggregation_strategy=strategy) for text in HARD]
        for item, found, text in zip(body["data"], expected, HARD, strict=True):
            assert item["spans"] == spans_of(found, text)


@pytest.fixture(scope="module")
def byte_tagger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a token classifier whose tokens include the space before a word."""
    words = ("\u0120tide", "\u01200", "\u01201")
    return byte_level(tmp_path_factory.mktemp("bytes"), *words)


@pytest.fixture(scope="module")
def byte_tagger(byte_tagger_folder: Path) -> Iterator[Dispatcher]:
    """Return that token classifier behind its endpoints."""
    with serving() as load:
        yield load(byte_tagger_folder, max_model_len=320)


@pytest.mark.parametrize("is_byte_level", [False, True])
@pytest.mark.parametrize("num_words", [400, 30_000])  # only a part of the longer text is tokenized
async def test_long_texts_are_rejected_or_cut(
    tagger: Dispatcher,
    tagger_folder: Path,
    byte_tagger: Dispatcher,
    byte_tagger_folder: Path,
    num_words: int,
    *,
    is_byte_level: bool,
) -> None:
    """Positions are those in the whole text, whichever side is cut."""
    served = byte_tagger if is_byte_level else tagger
    folder = byte_tagger_folder if is_byte_level else tagger_folder
    text = "tide 0" + "".join(f" tide {number % 2}" for number in range(num_words))
    reply = await refusal(served, "/classify", input=text)
    assert "maximum context length is 320 tokens" in reply.body["error"]["message"]

    async def spans_cut(side: str) -> list[dict[str, Any]]:
        body = await answer(
            served,
            "/classify",
            input=text,
            truncate_prompt_tokens=-1,
            truncation_side=side,
            aggregation_strategy="none",
        )
        assert body["usage"]["prompt_tokens"] == 320
        [spans] = [item["spans"] for item in body["data"]]
        assert all(text[each["start"] : each["end"]] == each["text"] for each in spans)
        return list(spans)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    whole = tokenizer.encode(text, add_special_tokens=False).offsets
    places = {"right": whole[:318], "left": whole[-318:]}
    for side, own in places.items():
        spans = [(each["start"], each["end"]) for each in await spans_cut(side)]
        assert len(spans) > 50
        assert set(spans) <= set(own), "the positions of the same tokens in the whole text"
    assert max(places["right"])[1] < min(places["left"])[0]


async def test_requests_that_a_token_classifier_cannot_answer(
    tagger: Dispatcher, serve: Serve, tmp_path: Path
) -> None:
    """Each has one sentence that names the field."""
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    pair = {"text": "a", "text_pair": "b"}
    for url, body, words in (
        ("/v1/chat/completions", chat, "this model supports /v1/classify, /pooling."),
        ("/v1/embeddings", {"input": "a"}, "this model supports /v1/classify, /pooling."),
        ("/v1/moderations", {"input": "a"}, "this model supports /v1/classify, /pooling."),
        ("/v1/classify", chat, "this is a token classifier"),
        ("/v1/classify", {"input": pair}, "this is a token classifier"),
        ("/v1/classify", {"input": [101, 102]}, "this is a token classifier"),
        ("/v1/classify", {"input": ["a", ""]}, "`input.1` must not be empty"),
        ("/v1/classify", {"input": 7}, "`input` must be"),
        ("/v1/classify", {"input": "a\ud800"}, "`input"),
        ("/v1/classify", {"input": "a", "use_activation": False}, "`/pooling` returns logits"),
        ("/v1/classify", {"input": "a", "aggregation_strategy": "last"}, "`aggregation_strategy`"),
        ("/v1/classify", {"input": "a", "aggregation_strategy": ["max"]}, "`aggregation_strategy`"),
        ("/v1/classify", {"input": "a", "stride": 8}, "`stride`"),
        ("/v1/classify", {"input": "a b", "is_split_into_words": True}, "`is_split_into_words`"),
    ):
        reply = await refusal(tagger, url, **body)
        assert words in reply.body["error"]["message"], reply.body
    other = serve(save(tmp_path, "Bert", "ForSequenceClassification", **LABELS))
    refused = await refusal(other, "/v1/classify", input="a", aggregation_strategy="max")
    assert "requires a token classifier" in refused.body["error"]["message"]


@pytest.mark.parametrize("family", ["Bert", "DebertaV2"])  # by either loader
def test_layers_that_would_be_left_out_are_refused(family: str, tmp_path: Path) -> None:
    """A CRF's or LSTM's weights are in the files, but not those of heads for pre-training."""
    folder = save(tmp_path, family, "ForTokenClassification", **LABELS, **FAMILIES[family])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    heads = {
        "cls.predictions.bias": torch.ones(3),
        "lm_head.weight": torch.ones(2, 2),
        "pooler.dense.weight": torch.ones(2, 2),
    }
    save_file({**tensors, **heads}, path, {"format": "pt"})
    assert loaded(folder).pooler.is_per_token
    for name in ("crf.transitions", "lstm.weight_ih_l0"):
        save_file({**tensors, **heads, name: torch.ones(6, 6)}, path, {"format": "pt"})
        with pytest.raises(ModelRefused, match=f"its weights contain {name}, which {family}"):
            loaded(folder)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    config["architectures"] = [f"{family}CrfForTokenClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match=f"names the class {family}CrfForTokenClassification"):
        loaded(folder)


@pytest.mark.parametrize("kind", ["LayoutLM", "LayoutLMv3", "Lilt", "Bros", "MarkupLM"])
def test_models_of_pages_are_refused(kind: str, tmp_path: Path) -> None:
    """They read the place of each word, which no endpoint accepts."""
    for head in ("ForTokenClassification", "Model"):
        config = {"model_type": kind.lower(), "architectures": [f"{kind}{head}"]}
        with pytest.raises(ModelRefused, match=f"model type '{kind.lower()}' also reads"):
            read_pooling_config(config, EngineConfig(str(tmp_path)))


def test_a_token_classifier_that_reads_more_than_text_is_refused() -> None:
    """Its class is known by the inputs of its forward pass."""

    class OfImages:
        def forward(self, input_ids: object, pixel_values: object = None) -> None: ...

    with pytest.raises(ModelRefused, match="OfImages also reads pixel_values"):
        check_inputs("some", OfImages())
