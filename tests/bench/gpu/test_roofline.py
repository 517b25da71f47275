"""The serial roofline, compared with manual calculations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.gpu.cards import CARDS
from bench.gpu.mixes import Mix
from bench.gpu.roofline import Weights, pairs, serial, table
from bench.gpu.shapes import architecture
from tidemill.engine.kernels.attention import AttentionShape

H200 = CARDS["h200"]


@pytest.mark.parametrize(
    ("mix", "outputs", "everything"),
    [("1024/128", 5081, 45_700), ("128/1024", 24_305, 27_300), ("220/200", 20_658, 43_400)],
)
def test_the_bounds_of_8b_on_an_h200(mix: str, outputs: int, everything: int) -> None:
    """They are within one token per second of the product's target figures."""
    bound = serial(architecture("llama-3-8b"), H200, Mix.read(mix))
    assert bound.outputs_per_second == pytest.approx(outputs, abs=1)
    assert bound.tokens_per_second == pytest.approx(everything, rel=2e-3)


def test_weights_are_those_of_the_checkpoint() -> None:
    """8.03 billion numbers are held, 15.0 GB are read in a step; experts count as often as met."""
    weights = Weights.from_model(architecture("llama-3-8b"))
    assert weights.held == pytest.approx(8.03e9, rel=1e-3)
    assert 2 * (weights.read + weights.head) == pytest.approx(15.0e9, rel=1e-2)
    mixture = Weights.from_model(architecture("qwen3-30b-a3b"))
    assert mixture.held == pytest.approx(30.5e9, rel=1e-2)
    assert mixture.active + mixture.head == pytest.approx(3.0e9, rel=2e-2)
    held = {"gpt-oss-20b": 20.9e9, "qwen3-next-80b-a3b": 79.7e9, "llama-4-scout": 107.8e9}
    for name, count in held.items():
        assert Weights.from_model(architecture(name)).held == pytest.approx(count, rel=2e-3)


def test_shared_prefixes_are_computed_and_read_once() -> None:
    """The bound is between that of private tokens and that of all tokens."""
    model = architecture("llama-3-8b")
    alone, shared, apart = (
        serial(model, H200, Mix.read(mix)).outputs_per_second
        for mix in ("100/100", "512+100/100", "612/100")
    )
    assert apart < 0.5 * shared < shared < alone


def test_a_window_limits_the_visible_keys() -> None:
    """A position sees as many keys as precede it, but at most the window."""
    assert pairs(0, 8, 0) == 32
    assert pairs(0, 8, 100) == 32
    assert pairs(4, 8, 4) == 16
    model = architecture("llama-3-8b")
    windows = replace(model.blocks[0].attention, window=64)
    assert isinstance(windows, AttentionShape)
    blocks = tuple(replace(block, attention=windows) for block in model.blocks)
    mix = Mix.read("1024/128")
    assert serial(replace(model, blocks=blocks), H200, mix).keys < serial(model, H200, mix).keys


def test_a_mix_is_written_as_it_is_read() -> None:
    """The mix may have a shared prefix or none."""
    for words in ("1024/128", "512+100/100"):
        assert str(Mix.read(words)) == words
    lines = list(table(architecture("tiny"), CARDS["l4"], (Mix.read("8/4"),)))
    assert lines[-1].startswith("| 8/4 |")
    with pytest.raises(SystemExit, match="do not fit"):
        serial(architecture("qwen3-30b-a3b"), CARDS["l4"], Mix.read("8/4"))
