"""Simulated steps, and the cost of a missing overlap or an unnecessary pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.gpu.cards import CARDS
from bench.gpu.counts import Form, Spans, kernels_of
from bench.gpu.mixes import Mix
from bench.gpu.roofline import Weights, kv_bytes, sequence_bytes, serial, state_bytes
from bench.gpu.shapes import architecture
from bench.gpu.simulator import Host, Reach, Setting, forecast, levers, table
from tidemill.engine.model.config.architecture import Architecture

EIGHT = architecture("llama-3-8b")
SMALL = replace(EIGHT, blocks=EIGHT.blocks[:2])
CARD = replace(CARDS["h200"], memory=4e9)
SETTING = Setting(SMALL, CARD, max_num_seqs=64, max_num_batched_tokens=512)
MIX = Mix(64, 32)


def spans(*of: tuple[int, int], num_rows: int = 0, shared: int = 0) -> Spans:
    """Return spans of tokens, one pair of positions per sequence."""
    starts, stops = np.array(of).T
    return Spans(starts, stops, num_rows, shared)


def totals(model: Architecture, step: Spans, form: Form | None = None) -> tuple[float, float, int]:
    """Return bytes, operations and calls of all kernels."""
    kernels = kernels_of(model, step, form or Form())
    return (
        sum(kernel.bytes for kernel in kernels),
        sum(kernel.flops for kernel in kernels),
        sum(kernel.calls for kernel in kernels),
    )


def test_products_are_those_of_the_weights() -> None:
    """A chunk's operations are two for each weight and token, and those of attention."""
    step = spans((0, 512), num_rows=512)
    products = [one for one in kernels_of(EIGHT, step, Form()) if one.kind == "product"]
    weights = Weights.from_model(EIGHT)
    expected = 2 * 512 * (weights.active + weights.head)
    assert sum(one.flops for one in products) == pytest.approx(expected)
    read = 2 * (weights.read + weights.head)
    assert sum(one.bytes for one in products) == pytest.approx(read, rel=0.2)


def test_decodes_read_their_keys_and_share_pages() -> None:
    """Every token of a sequence is read, unless it was read in the step or is past the window."""
    shape = EIGHT.blocks[0].attention
    apart = spans((999, 1000), (499, 500), num_rows=2)
    attention = next(one for one in kernels_of(EIGHT, apart, Form()) if one.name == "attention")
    own = 2 * 2 * (shape.num_query_heads * 2 * shape.key_dim)
    layers = len(EIGHT.blocks) - 1
    assert attention.bytes == layers * (1500 * kv_bytes(shape) + own)
    shared = totals(EIGHT, apart._replace(shared=400))[0]
    assert shared < totals(EIGHT, apart)[0]
    one_by_one = Form(meets_shared_once=False)
    assert totals(EIGHT, apart._replace(shared=400), one_by_one)[0] == totals(EIGHT, apart)[0]
    block = replace(EIGHT.blocks[0], attention=replace(shape, window=16))
    windowed = replace(EIGHT, blocks=(block,) * len(EIGHT.blocks))
    assert totals(windowed, apart)[0] < shared


def test_every_needless_pass_costs_bytes() -> None:
    """Each costs bytes or calls compared with the default step."""
    step = spans((99, 100), (0, 50), num_rows=2, shared=16)
    moved, flops, calls = totals(EIGHT, step)
    assert totals(EIGHT, step, Form(joins_norms=False))[::2] > (moved, calls)
    assert totals(EIGHT, step, Form(joins_entry=False))[::2] > (moved, calls)
    assert totals(EIGHT, step, Form(last_rows_only=False))[1] > flops
    assert totals(EIGHT, step, Form(chooses_at_once=False))[::2] > (moved, calls)
    assert totals(EIGHT, step, Form(joins_gates=True))[0] < moved


def test_experts_are_read_as_they_are_met() -> None:
    """One token meets few of them, many tokens all."""
    mixture = architecture("qwen3-30b-a3b")
    weights = Weights.from_model(mixture)
    few = totals(mixture, spans((0, 1), num_rows=1))[0]
    many = totals(mixture, spans((0, 4096), num_rows=1))[0]
    assert few == pytest.approx(2 * (weights.active + weights.head), rel=0.05)
    assert many > 2 * weights.read
    products = [one for one in kernels_of(mixture, spans((0, 4096)), Form()) if one.flops]
    flops = sum(one.flops for one in products if one.kind == "product")
    last = 2 * 4096 * weights.active / len(mixture.blocks)  # of which only keys are wanted
    assert 2 * 4096 * weights.active - last < flops < 2 * 4096 * weights.active


def test_a_forecast_stays_below_the_roofline() -> None:
    """It comes close if kernels reach the ceilings and the host costs nothing."""
    ideal = replace(
        SETTING, reach=Reach(1, 1, 1, 1, 0), host=Host(step=0, sequence=0, call=0, replay=0)
    )
    at_once = (
        CARD.pool(Weights.from_model(SMALL).held * 2) / 2 / kv_bytes(SMALL.blocks[0].attention)
    )
    assert at_once / (MIX.prompt + MIX.output / 2) > SETTING.max_num_seqs
    found = forecast(ideal, MIX, 128)
    bound = serial(SMALL, CARD, MIX)
    # As few sequences as a step may have read the weights oftener than the bound's.
    seconds = 1 / found.outputs_per_second * MIX.output
    read = bound.weights * bound.sequences / SETTING.max_num_seqs
    assert seconds > max(bound.products, read) + bound.keys
    assert seconds < 1.5 * (bound.products + read + bound.keys)
    assert forecast(SETTING, MIX, 128).outputs_per_second < found.outputs_per_second


def test_every_lever_shows_as_a_number() -> None:
    """Removing a feature costs tokens per second; kernels at the ceilings add some."""
    quick = replace(SETTING, host=Host(step=2e-5, sequence=0, call=2e-5))
    rates = {
        name: forecast(setting, Mix(32, 32, shared=64), 96).outputs_per_second
        for name, setting in levers(quick)
    }
    built = rates.pop("as it is built")
    assert rates.pop("kernels at the card's ceilings") > built
    assert rates.pop("all rows to the end") == built  # as graphs have them anyway
    assert all(rate < built for rate in rates.values()), rates


def test_preemptions_are_counted() -> None:
    """If pages run out before slots, some tokens are computed again."""
    tight = replace(SETTING, card=replace(CARD, memory=2.99e9 + 32 * 80 * 8192))
    assert forecast(SETTING, MIX, 64).preemptions == 0
    assert forecast(tight, MIX, 64).preemptions > 0


def test_a_table_has_a_line_for_each() -> None:
    """Each line has its share of the roofline."""
    lines = list(table([("so", SETTING)], [MIX], 4))
    assert len(lines) == 3
    assert lines[-1].startswith("| 64/32 | so |")
    assert lines[-1].endswith("% |")


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-next-80b-a3b", "llama-4-scout"])
def test_windows_chunks_and_rows_are_simulated(name: str) -> None:
    """Sequences fill the rows and the pages of all groups, and stay below the roofline."""
    model = architecture(name)
    model = replace(model, blocks=model.blocks[:4])
    weights = Weights.from_model(model).held
    setting = Setting(model, replace(CARD, memory=2 * weights + 1e9), max_num_seqs=64)
    room = setting.room(MIX)
    assert bool(room.num_rows) == bool(model.recurrent_shapes)
    found = forecast(setting, MIX, 64)
    assert 0 < found.outputs_per_second < serial(model, setting.card, MIX).outputs_per_second
    states = sum(map(state_bytes, model.blocks))
    step = spans((999, 1000), num_rows=1)
    seen = totals(model, step)[0] - totals(model, spans((9, 10), num_rows=1))[0]
    more = sequence_bytes(model, 1000) - sequence_bytes(model, 10)
    assert seen == pytest.approx(more, rel=0.02)
    assert sequence_bytes(model, 10) > states
