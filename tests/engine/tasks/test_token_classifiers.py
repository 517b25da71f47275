"""Token classifiers, from their folder to spans, compared with transformers' pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedTokenizerFast, pipeline

from tests.engine.model.encoders.small_encoders import save
from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal, serving
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.inspection import inspect_model
from tidemill.engine.model.endpoint_names import endpoints_of

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
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    """Return a small token classifier behind its endpoints."""
    folder = save(tmp_path_factory.mktemp("tagger"), "Bert", "ForTokenClassification", **LABELS)
    assert endpoints_of(EngineConfig(str(folder))) == ("/v1/classify", "/pooling")
    with serving() as load:
        yield load(folder)


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


async def test_words_of_a_byte_level_tokenizer_are_between_spaces(
    serve: Serve, tmp_path: Path
) -> None:
    """An emoji has several tokens at one position."""
    folder = save(
        tmp_path, "Roberta", "ForTokenClassification", max_position_embeddings=640, **LABELS
    )
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(["<s>", "<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        ByteLevelDecoder(),
    )
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    tag = pipeline("token-classification", str(folder), device="cpu")
    served = serve(folder)
    for strategy in STRATEGIES:
        body = await answer(served, "/classify", input=HARD, aggregation_strategy=strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = [tag(text, aggregation_strategy=strategy) for text in HARD]
        for item, found, text in zip(body["data"], expected, HARD, strict=True):
            assert item["spans"] == spans_of(found, text)


async def test_long_texts_are_rejected_or_cut(tagger: Dispatcher) -> None:
    """Positions are those in the whole text, whichever side is cut."""
    for num_words in (400, 30_000):  # of the longer text only a part is tokenized
        text = "".join(f"tide {number % 9} " for number in range(num_words))
        reply = await refusal(tagger, "/classify", input=text)
        assert "maximum context length is 320 tokens" in reply.body["error"]["message"]
        for side in ("left", "right"):
            body = await answer(
                tagger,
                "/classify",
                input=text,
                truncate_prompt_tokens=-1,
                truncation_side=side,
                aggregation_strategy="none",
            )
            assert body["usage"]["prompt_tokens"] == 320
            [spans] = [item["spans"] for item in body["data"]]
            assert all(text[each["start"] : each["end"]] == each["text"] for each in spans)
            assert {each["text"] for each in spans} <= {"tide", *map(str, range(9))}
            if side == "left":
                assert spans[0]["start"] > len(text) // 2
            else:
                assert spans[-1]["end"] < len(text) // 2


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
    ):
        reply = await refusal(tagger, url, **body)
        assert words in reply.body["error"]["message"], reply.body
    other = serve(save(tmp_path, "Bert", "ForSequenceClassification", **LABELS))
    refused = await refusal(other, "/v1/classify", input="a", aggregation_strategy="max")
    assert "requires a token classifier" in refused.body["error"]["message"]
