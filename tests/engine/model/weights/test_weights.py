"""Stored tensors fill their weights, whatever their location and order."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.families import FAMILIES, VARIANTS, build
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.config.hf_config import UnsupportedConfig, read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.weights.checkpoint import INDEX, WHOLE, find_checkpoint
from tidemill.engine.model.weights.weights import read_weights

CPU = torch.device("cpu")


def weights_of(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the weights in a folder by role."""
    hf_config = read_hf_config(str(folder))
    architecture = architecture_of(hf_config)
    checkpoint = find_checkpoint(str(folder))
    return read_weights(checkpoint, architecture, dtype, CPU, is_multimodal=hf_config.is_multimodal)


def check_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare weights with others, role by role and bit by bit."""
    assert got.keys() == expected.keys()
    for role, tensor in got.items():
        assert torch.equal(tensor, expected[role]), role


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_shards_and_a_bare_base_hold_the_same_weights(tmp_path: Path, name: str) -> None:
    """However a family's model is saved: whole, in many files, or without its head."""
    model: Any = build(name)
    model.save_pretrained(tmp_path / "whole")
    expected = weights_of(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    check_equal(weights_of(tmp_path / "sharded"), expected)
    bare = tmp_path / "bare"
    shutil.copytree(tmp_path / "whole", bare)
    tensors = load_file(bare / WHOLE)
    stored = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    save_file(stored, bare / WHOLE, metadata={"format": "pt"})
    check_equal(weights_of(bare), expected)


@pytest.mark.parametrize("name", ["LlamaConfig", "GptOssConfig", "MixtralConfig"])
def test_weights_are_rounded_on_their_way(tmp_path: Path, name: str) -> None:
    """Each is rounded as in torch, and widened without a loss."""
    build(name).save_pretrained(tmp_path)  # type: ignore[operator]
    wide = weights_of(tmp_path)
    narrow = weights_of(tmp_path, torch.bfloat16)
    check_equal(narrow, {role: tensor.bfloat16() for role, tensor in wide.items()})
    build(name).to(torch.bfloat16).save_pretrained(tmp_path / "narrow")  # type: ignore[operator]
    check_equal(weights_of(tmp_path / "narrow"), {k: t.float() for k, t in narrow.items()})


def test_merged_weights_are_above_each_other(tmp_path: Path) -> None:
    """Queries, keys, values; gates, ups; of each expert its own."""
    model: Any = build("Qwen3MoeConfig")
    model.save_pretrained(tmp_path)
    weights, layer = weights_of(tmp_path), model.model.layers[2]
    attention = layer.self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(weights["2.qkv_proj"], torch.cat(parts))
    assert torch.equal(weights["2.gate_up_proj"], layer.mlp.experts.gate_up_proj)
    assert torch.equal(weights["2.down_proj"], layer.mlp.experts.down_proj)


def test_interleaved_experts_are_sorted_out(tmp_path: Path) -> None:
    """GPT-OSS stores them transposed, with gates and ups interleaved."""
    model: Any = build("GptOssConfig")
    model.save_pretrained(tmp_path)
    weights, experts = weights_of(tmp_path), model.model.layers[1].mlp.experts
    gates, ups = experts.gate_up_proj[..., ::2], experts.gate_up_proj[..., 1::2]  # [E, H, I]
    assert torch.equal(weights["1.gate_up_proj"], torch.cat([gates, ups], dim=2).transpose(1, 2))
    assert torch.equal(weights["1.down_proj"], experts.down_proj.transpose(1, 2))
    biases = experts.gate_up_proj_bias
    assert torch.equal(
        weights["1.gate_up_proj_bias"], torch.cat([biases[:, ::2], biases[:, 1::2]], 1)
    )


def test_experts_in_other_layouts_are_left_to_transformers(tmp_path: Path) -> None:
    """Which knows of ways to store them that we do not."""
    model: Any = build("MixtralConfig")
    model.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(UnsupportedConfig, match="experts"):
        weights_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("MiMoV2FlashConfig", "model.mtp.layers.0.self_attn.q_proj.weight"),
        ("Ernie4_5_MoeConfig", "model.mtp_block.0.mlp.down_proj.weight"),
        ("Ernie4_5_MoeConfig", "model.mtp_linear_proj.0.weight"),
    ],
)
def test_weights_that_predict_more_than_one_token_are_left_out(
    tmp_path: Path, name: str, key: str
) -> None:
    """Their names are those that transformers' class ignores; other unused ones are refused."""
    model: Any = build(name)
    assert any(re.search(ignored, key) for ignored in model._keys_to_ignore_on_load_unexpected)
    model.save_pretrained(tmp_path)
    expected, tensors = weights_of(tmp_path), load_file(tmp_path / WHOLE)
    save_file(tensors | {key: torch.ones(2, 2)}, tmp_path / WHOLE, metadata={"format": "pt"})
    check_equal(weights_of(tmp_path), expected)
    other = key.replace("mtp", "draft")
    save_file(tensors | {other: torch.ones(2, 2)}, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=re.escape(other)):
        weights_of(tmp_path)


def test_weights_without_plain_numbers_are_refused_whatever_they_are_called(
    tmp_path: Path,
) -> None:
    """The weights of GPT-OSS's experts have names without the suffix `weight`."""
    build("GptOssConfig").save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / WHOLE)
    key = "model.layers.0.mlp.experts.down_proj"
    tensors[key] = tensors[key].to(torch.uint8)
    save_file(tensors, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"down_proj is stored as U8: quantised"):
        weights_of(tmp_path)


def test_a_file_that_is_truncated_during_the_read_is_refused(tmp_path: Path) -> None:
    """Another process may write where we read."""
    build("LlamaConfig").save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config = read_hf_config(str(tmp_path))
    checkpoint = find_checkpoint(str(tmp_path))
    whole = (tmp_path / WHOLE).read_bytes()
    (tmp_path / WHOLE).write_bytes(whole[:-100])
    with pytest.raises(ModelRefused, match="was truncated while it was read"):
        read_weights(checkpoint, architecture_of(hf_config), torch.float32, CPU)


MEASURE = """
import os, resource, sys, torch
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.weights import weights as module
from tidemill.engine.model.weights.staging import Staging
from tidemill.engine.model.weights.weights import read_weights
def measure(name, is_staged):
    if is_staged:
        def copy(to, buffer):
            to.copy_(buffer)
            return lambda: None
        first, second = (torch.empty(10**6, dtype=torch.uint8) for _ in range(2))
        module.staging_for = lambda _: Staging(copy, (first, second))
    hf_config = read_hf_config(sys.argv[1])
    checkpoint = find_checkpoint(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    architecture, dtype = architecture_of(hf_config), getattr(torch, name)
    weights = read_weights(checkpoint, architecture, dtype, torch.device("cpu"))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = sum(tensor.nbytes for tensor in weights.values())
    largest = max(path.stat().st_size for path in checkpoint.files)
    print(name, is_staged, (after - before) * 1024, held, largest, flush=True)
# Each is a process with separate memory; the libraries are imported once.
for case in ("bfloat16", False), ("float32", False), ("bfloat16", True):
    if not os.fork():
        measure(*case)
        os._exit(0)
    os.wait()
"""


def save_sharded(folder: Path, hidden: int, layers: int) -> None:
    """Write a bf16 Llama of random bytes, one file per layer."""
    folder.mkdir()
    inner = 4 * hidden
    config = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    ends = {"model.embed_tokens.weight": (1024, hidden), "lm_head.weight": (1024, hidden)}
    files: list[dict[str, tuple[int, ...]]] = [ends | {"model.norm.weight": (hidden,)}]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"
        }
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        files.append(shapes)
    where = {}
    for number, shapes in enumerate(files):
        name = f"model-{number}.safetensors"
        tensors = {key: torch.ones(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_apart_from_the_weights_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    """A tenth of a gigabyte is in nine files: a second copy of it would be found.

    On the way to another device, which the host plays here, two small buffers.
    """
    save_sharded(tmp_path / "model", hidden=768, layers=8)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model")]
    measured = run(command, capture_output=True, text=True, check=True)
    cases = [line.split() for line in measured.stdout.splitlines()]
    assert len(cases) == 3
    for dtype, is_staged, *numbers in cases:
        taken, held, largest = map(int, numbers)
        assert held > 8 * largest, dtype
        assert taken < held + (0 if is_staged == "True" else largest) + 30e6, dtype
