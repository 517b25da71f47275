"""Ranks with a share each compute the same as one rank with everything."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.adapters import halves, write_adapter
from tests.engine.families import build
from tests.engine.rank_threads import together
from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels.communicator import SINGLE_RANK, Communicator, Shard
from tidemill.engine.model import native
from tidemill.engine.model.adapters.loading import read_adapters
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network import decoder
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.parity.logits import chunked_logits, parity_tokens
from tidemill.engine.model.tensor_parallel import check_tensor_parallel_size
from tidemill.engine.model.weights.checkpoint import Checkpoint, find_checkpoint
from tidemill.engine.model.weights.weight_map import weights_of
from tidemill.engine.model.weights.weights import read_weights

CPU = torch.device("cpu")
# Of both kinds of experts, of one tensor for queries, keys and values, tied and biased, of norms
# after products, of soft caps, sinks and windows, of shared experts, transposed matrices, groups of
# heads and norms over all heads, of latents and recurrent layers: what differs where ranks meet.
MET = [
    "LlamaConfig",
    "Qwen3Config",
    "Phi3Config",
    "Gemma4TextConfig",
    "Llama, biased and tied",
    "Llama, one wide key head",
    "GptOssConfig",
    "MixtralConfig",
    "Qwen3Moe, some layers dense",
    "Glm4MoeConfig",
    "GPT2Config",
    "FalconConfig",
    "Olmo2Config",
    "DeepseekV2Config",
    "DeepseekV3Config",
    "GlmMoeDsaConfig",
    "Lfm2Config",
    "GraniteMoeHybridConfig",
]
# Whose tiny models have two key heads, or two groups of B and C.
BY_TWO = [
    *("Qwen3NextConfig", "Qwen3_5TextConfig", "BambaConfig", "Mamba2Config", "NemotronHConfig"),
    "Nemotron-H, latent experts",
]


def saved(name: str, folder: Path) -> tuple[Checkpoint, Any, Any]:
    """Save a family's tiny model and return its checkpoint and architecture."""
    build(name).save_pretrained(folder)  # type: ignore[operator]
    hf_config = read_hf_config(str(folder))
    return find_checkpoint(str(folder)), hf_config, architecture_of(hf_config)


def logits_of(
    model: tuple[Checkpoint, Any, Any], communicator: Communicator = SINGLE_RANK
) -> Tensor:
    """Return a rank's `chunked_logits`, `[2, t, V]` on the first."""
    loaded = native.load_shard(*model, torch.float32, CPU, communicator=communicator)
    return chunked_logits(loaded, parity_tokens(loaded.vocab_size, ()))


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, size) for name in MET for size in (2, 4)), *((n, 2) for n in BY_TWO)],
)
def test_shares_come_to_the_logits_of_the_whole(tmp_path: Path, name: str, size: int) -> None:
    """Through chunks, a decode, and whatever a family does where ranks meet."""
    model = saved(name, tmp_path)
    expected = logits_of(model)
    got, *_ = together(size, partial(logits_of, model))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["Qwen3Config", "Llama, biased and tied", "PhiConfig"])
@torch.inference_mode()
def test_named_logits_are_those_of_an_fp32_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    """The bf16 heads are tied, have a bias, and are shared; pairs come in tiles."""
    build(name).to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config = read_hf_config(str(tmp_path))
    model = find_checkpoint(str(tmp_path)), hf_config, architecture_of(hf_config)
    monkeypatch.setattr(decoder, "EXACT_PAIRS", 5)
    rows, token_ids = np.arange(12) % 7, np.arange(12) * 29
    hidden = torch.randn(7, model[2].hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(torch.bfloat16)

    def network_of(communicator: Communicator, dtype: torch.dtype) -> Decoder:
        network = native.load_shard(*model, dtype, CPU, communicator=communicator).network
        assert isinstance(network, Decoder)
        return network

    expected = network_of(SINGLE_RANK, torch.float32).compute_logits(hidden.float())
    shares = together(
        size,
        lambda group: network_of(group, torch.bfloat16).compute_exact_logits(
            hidden, rows, token_ids
        ),
    )
    for got in shares:
        torch.testing.assert_close(got, expected[rows, token_ids], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["Phi3Config", "GptOssConfig", "Qwen3Moe, some layers dense", "GraniteMoeConfig"]
)
def test_every_stored_number_is_some_ranks(tmp_path: Path, name: str) -> None:
    """All ranks together read all numbers, and no rank reads numbers that it does not need."""
    checkpoint, _, architecture = saved(name, tmp_path)
    size = 2
    read: dict[str, torch.Tensor] = {}
    counts = [0, 0]
    for rank in range(size):
        for weight in weights_of(architecture, shard=Shard(rank, size)):
            for part in weight.parts:
                taken = (*part.taken, *map(range, part.shape[len(part.taken) :]))
                places = torch.zeros(part.shape, dtype=torch.bool)
                places[tuple(slice(one.start, one.stop) for one in taken)] = True
                counts[rank] += part.count
                read[part.key] = places | read.get(part.key, False)
    whole = {part.key: prod(part.shape) for one in weights_of(architecture) for part in one.parts}
    assert {key: int(places.sum()) for key, places in read.items()} == whole
    del checkpoint
    assert max(counts) < 0.65 * sum(whole.values())


def test_an_adapter_is_shared_as_its_model_is(tmp_path: Path) -> None:
    """It shares steps with rows of the model itself, for merged tensors and single ones."""
    for name in ("Phi3Config", "LlamaConfig"):
        checkpoint, hf_config, architecture = saved(name, tmp_path / name)
        targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "k_proj", "up_proj")
        folder = write_adapter(tmp_path / f"{name}-adapter", halves(build(name), targets))
        config = EngineConfig(
            str(tmp_path / name), lora_modules=(LoraModule("one", str(folder)),), device="cpu"
        )
        adapters = read_adapters(config, hf_config, architecture)
        parts = checkpoint, hf_config, architecture, torch.float32, CPU

        def through(
            communicator: Communicator, parts: Any = parts, adapters: Any = adapters
        ) -> Tensor:
            loaded = native.load_shard(*parts, adapters=adapters, communicator=communicator)
            return chunked_logits(loaded, parity_tokens(loaded.vocab_size, ()), adapter=1)

        expected = through(SINGLE_RANK)
        assert (expected[0] - expected[1]).abs().max() > 0.1  # the adapter does something
        torch.testing.assert_close(together(2, through)[0], expected, atol=2e-4, rtol=1e-4)


def test_a_vocabulary_that_is_odd_ends_in_zeros(tmp_path: Path) -> None:
    """The last rank's rows are as many as the others'."""
    checkpoint, _, architecture = saved("LlamaConfig", tmp_path)
    parts = [
        read_weights(checkpoint, architecture, torch.float32, CPU, shard=Shard(rank, 3))
        for rank in range(3)
    ]
    heights = [len(one["embed_tokens"]) for one in parts]
    assert heights == [107, 107, 107]
    assert not parts[2]["embed_tokens"][106:].any()
    whole = read_weights(checkpoint, architecture, torch.float32, CPU)["embed_tokens"]
    assert torch.equal(torch.cat([one["embed_tokens"] for one in parts])[:320], whole)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("LlamaConfig", 3, "4 query heads and 2 key heads"),
        ("LlamaConfig", 8, "4 query heads cannot"),
        ("GptOssConfig", 5, "96 columns of an expert"),
        ("Gemma4, MoE next to an MLP", 2, "experts next to an MLP"),
        ("FalconH1Config", 2, "projections with multipliers"),
        ("Qwen3NextConfig", 4, "2 key heads of recurrent layers"),
        ("Mamba2Config", 4, "2 groups of B and C and 2 groups of gated norms"),
    ],
)
def test_uneven_shares_are_refused(tmp_path: Path, name: str, size: int, words: str) -> None:
    """The error contains the count and the number of ranks."""
    *_, architecture = saved(name, tmp_path)
    with pytest.raises(ModelRefused, match=words) as refused:
        check_tensor_parallel_size("tiny", architecture, size)
    assert f"--tensor-parallel-size {size}" in str(refused.value)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_side_by_side(size: int) -> None:
    """None twice, none missing; key heads are had by as many ranks as there are too few of."""
    for count in (1, 7, 8, 24):
        parts = [Shard(rank, size).indices(count) for rank in range(size)]
        assert [one for part in parts for one in part] == list(range(count))
    heads = [Shard(rank, 8).kv_head_indices(2) for rank in range(8)]
    assert [list(one) for one in heads] == [[0]] * 4 + [[1]] * 4
