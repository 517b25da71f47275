"""Layer by layer, both networks compute the same function, with one layer in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import build
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import HFConfig, read_hf_config
from tidemill.engine.model.config.masks import windows_by_masks
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf import (
    layers as transformers_layers,
)
from tidemill.engine.model.hf import (
    model as transformers_model,
)
from tidemill.engine.model.parity import layerwise
from tidemill.engine.model.parity.layerwise import OUTER, LayerReader
from tidemill.engine.model.parity.logits import chunked_logits
from tidemill.engine.model.weights.checkpoint import find_checkpoint

CPU = torch.device("cpu")
VOCAB = 200
TOKENS = torch.randint(0, VOCAB, (41,), generator=torch.Generator().manual_seed(0))
FAMILIES = ("Llama, biased and tied", "Gemma3, near and far", "GptOssConfig", "Qwen3MoeConfig")


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[HFConfig, LayerReader]:
    """Return the reader of a folder's model, with a part of its vocabulary."""
    monkeypatch.setattr(layerwise, "PARITY_VOCAB", VOCAB)
    hf_config, checkpoint = read_hf_config(str(folder)), find_checkpoint(str(folder))
    parts = (checkpoint, hf_config, architecture_of(hf_config))
    return hf_config, LayerReader.open(*parts, CPU, num_layers=None)


@pytest.fixture
def _all_young() -> Iterator[None]:
    """Keep a test's objects in the youngest generation, because scanning all objects is slow."""
    gc.collect(1)  # ends other tests' layers, or moves them to the oldest generation
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_all_young")
@pytest.mark.parametrize("family", FAMILIES)
def test_our_logits_are_those_of_the_whole_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Each layer is read once for all chunks, while one more is in memory."""
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config, reader = opened(tmp_path, monkeypatch)
    parts = (reader.checkpoint, hf_config, architecture_of(hf_config))
    loaded = native.load(*parts, torch.float32, CPU)
    kept = reader.vocabulary
    expected = chunked_logits(loaded, kept[TOKENS])[..., kept]
    others, read = _num_layers(), list[int]()
    assert others == len(reader.architecture.blocks)
    read_layer = LayerReader.read

    def noted(reader: LayerReader, layer: int, dtype: torch.dtype) -> Any:
        read.append(layer)
        assert _num_layers() == others  # the one before is gone
        return read_layer(reader, layer, dtype)

    monkeypatch.setattr(LayerReader, "read", noted)
    got = layerwise.layerwise_logits(reader, loaded, torch.float32, TOKENS)
    assert read == [OUTER, 0, 1, 2, 3]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def _num_layers() -> int:
    return sum(type(one).__name__ == "DecoderLayer" for one in gc.get_objects(generation=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_logits_and_windows_are_those_of_its_whole_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Layers may be read alone or together."""
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config, reader = opened(tmp_path, monkeypatch)
    whole = transformers_model.load_fp32(reader.checkpoint, hf_config, CPU, None)
    with torch.inference_mode():
        kept = reader.vocabulary
        expected = transformers_model.eager_logits("tiny", whole, kept[TOKENS], CPU)[..., kept]
        for most in (0, 2 * reader.num_bytes(0)):
            monkeypatch.setattr(transformers_layers, "GROUP_BYTES", most)
            module = transformers_layers.load_layerwise(reader, hf_config, torch.float32)
            windows = tuple(windows_by_masks(module, CPU).values())
            assert windows == tuple(windows_by_masks(whole, CPU).values())
            assert windows == tuple(one.attention.window for one in reader.architecture.blocks)
            got = transformers_model.eager_logits("tiny", module, TOKENS, CPU)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            assert (
                sum(p.numel() for p in module.parameters())
                < sum(p.numel() for p in whole.parameters()) / 2
            )
