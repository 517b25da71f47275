"""Windows follow from transformers' masks, whatever its attention calls contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.families import COMMON
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import UnsupportedConfig, read_hf_config
from tidemill.engine.model.config.masks import window_of
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf.forward import TransformersNetwork
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.parity import parity_inputs
from tidemill.engine.model.parity.logits import LONGEST_WINDOW, chunked_logits
from tidemill.engine.model.weights.checkpoint import find_checkpoint

CPU = torch.device("cpu")
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
# By config class: the tiny models whose windows only their masks know.
MASKED: dict[str, dict[str, Any]] = {
    "Qwen2MoeConfig": {
        **EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
}


def save(folder: Path, kind: str, window: int, **differs: Any) -> Any:
    """Write a tiny model whose attention has a window, and return it."""
    torch.manual_seed(7)
    fields = COMMON | MASKED.get(kind, {}) | differs
    config = getattr(transformers, kind)(**fields, sliding_window=window)
    network: Any = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    network.save_pretrained(folder)
    return network.eval().requires_grad_(requires_grad=False)


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("window", [12, LONGEST_WINDOW + 10])
def test_a_window_that_only_the_mask_knows_is_kept_to(
    tmp_path: Path, kind: str, window: int
) -> None:
    """One window is longer than the tokens of a parity check."""
    network = save(tmp_path, kind, window)
    loaded = load_model(EngineConfig(str(tmp_path), dtype="float32", device="cpu"))
    assert isinstance(loaded.network, TransformersNetwork)
    assert window in {shape.window for shape in loaded.shapes}
    tokens = torch.randint(0, COMMON["vocab_size"], (window + 60,), generator=torch.Generator())
    with torch.inference_mode():
        expected = network(input_ids=tokens[None], use_cache=False).logits[0]
    assert torch.equal(chunked_logits(loaded, tokens)[0].argmax(-1), expected.argmax(-1))


def test_an_undetectable_window_is_refused(tmp_path: Path) -> None:
    """Doge builds a new mask from the one that has the window."""
    save(tmp_path, "DogeConfig", 12)
    with pytest.raises(
        ModelRefused, match="sliding_window 12, but it is unknown how its class applies it"
    ):
        load_model(EngineConfig(str(tmp_path), dtype="float32", device="cpu"))


def test_our_decoder_is_held_to_windows_that_its_proof_does_not_pass(tmp_path: Path) -> None:
    """Otherwise a window that is read wrongly would show only in long rows."""
    window = parity_inputs.LONGEST_WINDOW + 10
    save(tmp_path, "MistralConfig", window, num_hidden_layers=2, max_position_embeddings=2 * window)
    checkpoint, hf_config = find_checkpoint(str(tmp_path)), read_hf_config(str(tmp_path))
    right = architecture_of(hf_config)
    blocks = [
        replace(block, attention=replace(block.attention, window=window - 1))
        for block in right.blocks
    ]
    wrong = replace(right, blocks=tuple(blocks))
    for architecture, holds in ((right, True), (wrong, False)):
        parts = (checkpoint, hf_config, architecture)
        loaded = native.load(*parts, torch.float32, CPU)
        if holds:
            assert native.check_parity(*parts, loaded).holds
        else:
            with pytest.raises(
                UnsupportedConfig, match="a layer has window 4106 by transformers' masks, not 4105"
            ):
                native.check_parity(*parts, loaded)


@pytest.mark.parametrize(
    ("sees", "window"),
    [
        (lambda _b, _h, q, k: k <= q, 0),
        (lambda _b, _h, q, k: (k <= q) & (k > q - 4096), 4096),
        (lambda _b, _h, q, k: (k <= q) & (k > q - 1), 1),
        (lambda _b, _h, q, k: k >= q * 0, None),
        (lambda _b, _h, q, k: (k <= q) & (k // 8192 == q // 8192), None),
        (lambda _b, _h, q, k: torch.zeros(9)[q] == k, None),
        (lambda _b, _h, _q, _k: False, None),
    ],
    ids=["all before", "a window", "itself", "both ways", "chunks", "a table", "nothing"],
)
def test_a_window_is_found_by_the_mask_function(
    sees: Callable[..., Any], window: int | None
) -> None:
    """Functions of other forms have no window."""
    assert window_of(sees) == window
