"""Token classifiers, from their folder to spans, compared with transformers' pipeline."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from tests.engine.model.encoders.small_encoders import save
from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal
from tidemill.engine.config import EngineConfig
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
    assert report.runs == ("transformers" if family == "DebertaV2" else "native")
