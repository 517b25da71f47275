"""The benchmark of adapters runs every case to its end."""

from __future__ import annotations

from pathlib import Path

from bench.kernels.adapters import CASES, Load, measure
from tests.engine.families import VOCAB, build


def test_every_case_takes_some_time(tmp_path: Path) -> None:
    """The plain model is the first of them."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    load = Load(num_sequences=5, num_prompt=20, num_output=3, vocab_size=VOCAB)
    seconds = measure(tmp_path, rank=2, load=load, rounds=1, dtype="float32")
    assert list(seconds) == ["none", *CASES]
    assert min(seconds.values()) > 0
