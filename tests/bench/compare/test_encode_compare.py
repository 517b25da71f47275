"""The files of the encoders' benchmark, and the table that it prints."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from bench.compare.encode_compare import LONGEST, Workload, copy_model, table, write_lines


def test_texts_have_as_many_tokens_as_their_workload_says(tmp_path: Path) -> None:
    """The model's own tokenizer counts them, and cuts none of them."""
    model = tmp_path / "minilm"
    copy_model(model)
    write_lines(tmp_path / "lines.jsonl", Workload(40, 8, 400), model)
    lines = (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lengths = [len(tokenizer.encode(json.loads(line)["body"]["input"]).ids) for line in lines]
    assert len(lengths) == 40
    assert 8 <= min(lengths) < 60
    assert 300 < max(lengths) <= 400
    config = json.loads((model / "sentence_bert_config.json").read_bytes())
    assert config["max_seq_length"] == LONGEST


def test_the_table_says_how_many_times_ours_is() -> None:
    """The factor of each file is the ratio of medians."""
    figures = {("mixed", "tidemill"): [30.0, 10.0, 20.0], ("mixed", "other"): [5.0]}
    assert "| mixed, other | 5.0 | 4.00 × |" in table("float32", figures)
