"""The check of an adapter fails if its rows would differ from those of the merged model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.adapters import halves, write_adapter
from tests.engine.families import build
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels import linear
from tidemill.engine.kernels.adapters import LinearAdapters
from tidemill.engine.model import adapter_parity
from tidemill.engine.model.adapters.loading import Adapter, Module
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.parity import parity_inputs


@pytest.fixture(name="config", params=with_long(["float32"], ["bfloat16"]))
def fixture_config(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> EngineConfig:
    """Return settings of a tiny Qwen3 with two adapters."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    network = build("Qwen3Config")
    network.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    modules = [
        LoraModule(name, str(write_adapter(tmp_path / name, halves(network, seed=seed))))
        for seed, name in enumerate(("first", "second"))
    ]
    return EngineConfig(
        str(tmp_path / "model"), dtype=request.param, device="cpu", lora_modules=tuple(modules)
    )


def test_an_adapter_at_another_scale_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is refused, too, because it was requested with its adapters."""
    placed = Adapter.placed

    def wrong(self: Adapter, *args: Any) -> Any:
        return placed(self, *args) if self.name == "first" else {}

    monkeypatch.setattr(Adapter, "placed", wrong)
    with pytest.raises(
        ModelRefused, match=r"adapter second .* logits differ from those of the merged"
    ):
        load_model(config)


def test_an_adapter_that_is_wrong_in_the_served_dtype_alone_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is the rounding error of the model with the adapter merged into it."""
    placed = Adapter.placed

    def strong(self: Adapter, architecture: Any, dtype: torch.dtype, *others: Any) -> Any:
        weights = placed(self, architecture, dtype, *others)
        if dtype == torch.float32:
            return weights
        return {role: replace(one, up=1.03 * one.up) for role, one in weights.items()}

    monkeypatch.setattr(Adapter, "placed", strong)
    if config.dtype == "float32":
        load_model(config)
        return
    with pytest.raises(ModelRefused, match=r"adapter first .* \(relative distance 0\.[01]\d*\)"):
        load_model(config)


def test_an_adapter_that_touches_rows_of_the_model_itself_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what a proof compares goes through no adapter."""
    load_model(replace(config, lora_modules=()))  # whose proof is remembered

    def all_rows(out: Tensor, x: Tensor, adapting: LinearAdapters) -> Tensor:
        for adapter in adapting.adapters[:1]:
            assert adapter is not None
            out += x @ adapter.down.T @ adapter.up.T
        return out

    monkeypatch.setattr(linear, "add_adapters", all_rows)
    changed = replace(config, lora_modules=config.lora_modules[:1])
    with pytest.raises(ModelRefused, match=r"adapter first .* logits differ"):
        load_model(changed)


def test_a_proof_is_remembered_until_the_adapter_is_another(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each adapter's check is cached separately."""
    made: list[int] = []
    result = adapter_parity._AdapterParity.result

    def counted(self: Any, index: int) -> Any:
        made.append(index)
        return result(self, index)

    monkeypatch.setattr(adapter_parity._AdapterParity, "result", counted)
    load_model(config)
    load_model(config)
    assert made == [0, 1]
    write_adapter(tmp_path / "second", halves(build("Qwen3Config"), seed=7), lora_dropout=0.5)
    load_model(config)
    assert made == [0, 1, 1]


def test_an_adapter_that_answers_with_no_numbers_is_refused(
    config: EngineConfig, tmp_path: Path
) -> None:
    """A finite adapter is refused whose product with its scale is not."""
    network = build("Qwen3Config")
    write_adapter(tmp_path / "second", halves(network, size=1e5), lora_alpha=1e38)
    with pytest.raises(
        ModelRefused, match=r"adapter second .* adds numbers up to .*e\+\d+ to weights"
    ):
        load_model(config)


def test_a_model_that_does_not_fit_in_fp32_is_checked_by_its_first_layers(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself is checked in the same way."""
    monkeypatch.setattr(parity_inputs, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(parity_inputs, "MOST_BYTES", 1000)
    assert load_model(config).notes


def test_merged_adapters_are_removed_from_both_halves_of_a_network() -> None:
    """Each adapter is merged into the model itself, not into the one before."""
    network = build("LlamaConfig")
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    adapter = Adapter(
        "own", Path(), {n: Module(a, b, 0.5) for n, (a, b) in halves(network).items()}
    )
    with torch.inference_mode(), adapter_parity._merged(network, adapter):
        changed = dict(network.named_parameters())
        name = "model.layers.0.self_attn.q_proj.weight"
        down, up = halves(network)["model.layers.0.self_attn.q_proj"]
        torch.testing.assert_close(changed[name], before[name] + 0.5 * up @ down)
    for name, weight in network.named_parameters():
        assert torch.equal(weight, before[name])
