"""Usual models: the shapes of published models that GPU kernels are compiled for.

Each is a decoder with one layer of each kind that its model has: kernels are compiled by shape, and
a model's layers of one kind have the same shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..kernels.attention import AttentionShape
from ..kernels.elementwise import Activation, Gate
from ..kernels.recurrence import GatedDelta, RecurrentShape, StateSpace
from .config.architecture import (
    NO_ATTENTION,
    NO_ROPE,
    SANDWICH,
    Architecture,
    Block,
    Experts,
    Latent,
    Recurrence,
    Rope,
    WeightNames,
)
from .families.gemma import GEMMA4_NAMES

MAX_POSITIONS = 8192


def decoder(
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    width: int,
    vocabulary: int,
    *,
    gate: Gate | Activation | None = None,
    window: int = 0,
    turned: int | None = None,
    softcap: float = 0.0,
    experts: Experts | None = None,
    has_sinks: bool = False,
    **fields: Any,
) -> Architecture:
    """Return a decoder of one layer, or with a `window` of one layer of each kind."""
    full = AttentionShape(*heads, width, width, width**-0.5, 0, softcap, has_sinks)
    rope = Rope((1.0,) * ((turned or width) // 2))
    shapes = [full, replace(full, window=window)] if window else [full]
    return Architecture(
        class_name="",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        max_positions=MAX_POSITIONS,
        blocks=tuple(Block(shape, rope, experts) for shape in shapes),
        rms_norm_eps=1e-6,
        gate=gate or Gate(),
        tie_word_embeddings=True,
        **fields,
    )


GEMMA: dict[str, Any] = {
    "gate": Gate("gelu_tanh"),
    "norm_offset": 1.0,
    "names": WeightNames(norms=SANDWICH),
    "embedding_scale": 48.0,
}


def gemma4(
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    full_heads: tuple[int, int],
    experts: Experts | None = None,
) -> Architecture:
    """Return a Gemma 4: its full-attention layers have heads of 512 and one key head."""
    architecture = decoder(
        hidden,
        inner,
        heads,
        256,
        262_144,
        window=1024,
        experts=experts,
        has_qk_norm=True,
        has_value_norm=True,
        has_layer_scalar=True,
        logit_softcap=30.0,
        **{**GEMMA, "norm_offset": 0.0, "names": GEMMA4_NAMES},
    )
    full, sliding = architecture.blocks
    shape = AttentionShape(*full_heads, 512, 512, 1.0)
    full = Block(shape, Rope((1.0,) * 256), experts, has_keys_as_values=True)
    return replace(architecture, blocks=(full, sliding))


def latent_decoder(
    hidden: int, inner: int, heads: int, vocabulary: int, *, latent: Latent, experts: Experts
) -> Architecture:
    """Return a decoder of one layer with latent attention (MLA)."""
    architecture = decoder(hidden, inner, (heads, 1), latent.nope_dim, vocabulary, experts=experts)
    rank = latent.kv_rank
    shape = AttentionShape(heads, 1, rank + latent.rope_dim, rank, 0.1, has_latent_values=True)
    rope = Rope((1.0,) * (latent.rope_dim // 2))
    return replace(architecture, blocks=(Block(shape, rope, experts, latent=latent),))


def hybrid_decoder(
    architecture: Architecture, recurrence: Recurrence, *, has_mlp: bool
) -> Architecture:
    """Return a decoder with a recurrent layer before its own."""
    (block,) = architecture.blocks
    first = replace(block, attention=NO_ATTENTION, rope=NO_ROPE, recurrence=recurrence)
    return replace(architecture, blocks=(replace(first, has_mlp=has_mlp), block))


def mamba2(heads: int, width: int, groups: int, state: int) -> Recurrence:
    """Return a Mamba-2 layer with a convolution of four taps."""
    rule = StateSpace(heads, width, groups, state)
    shape = RecurrentShape(sum(rule.widths), 4, rule=rule)
    return Recurrence(shape, groups, has_conv_bias=True)


_DELTA = GatedDelta(16, 32, 128, 128)
GATED_DELTA_NET = Recurrence(
    RecurrentShape(sum(_DELTA.widths), 4, rule=_DELTA), 32, is_norm_first=True
)
# The sizes that kernels depend on; models of the same sizes use the same kernels.
USUAL_MODELS = {
    "Qwen3-0.6B": decoder(1024, 3072, (16, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-4B": decoder(2560, 9728, (32, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-14B": decoder(5120, 17_408, (40, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-32B": decoder(5120, 25_600, (64, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-30B-A3B": decoder(
        2048, 6144, (32, 4), 128, 151_936, has_qk_norm=True, experts=Experts(128, 8, 768)
    ),
    "Qwen2.5-0.5B": decoder(896, 4864, (14, 2), 64, 151_936, qkv_bias=True),
    "Qwen2.5-1.5B": decoder(1536, 8960, (12, 2), 128, 151_936, qkv_bias=True),
    "Qwen2.5-7B": decoder(3584, 18_944, (28, 4), 128, 152_064, qkv_bias=True),
    "Llama-3.2-1B": decoder(2048, 8192, (32, 8), 64, 128_256),
    "Llama-3.2-3B": decoder(3072, 8192, (24, 8), 128, 128_256),
    "Llama-3-8B": decoder(4096, 14_336, (32, 8), 128, 128_256),
    "Llama-3-70B": decoder(8192, 28_672, (64, 8), 128, 128_256),
    "Mistral-7B": decoder(4096, 14_336, (32, 8), 128, 32_768, window=4096),
    "Mixtral-8x7B": decoder(
        4096, 14_336, (32, 8), 128, 32_000, experts=Experts(8, 2, 14_336, norm_topk_prob=True)
    ),
    "Phi-4-mini": decoder(3072, 8192, (24, 8), 128, 200_064, turned=96),
    "Gemma-3-4B": decoder(
        2560, 10_240, (8, 4), 256, 262_208, window=1024, has_qk_norm=True, **GEMMA
    ),
    "Gemma-2-9B": decoder(
        3584, 14_336, (16, 8), 256, 256_000, window=4096, softcap=50.0, logit_softcap=30.0, **GEMMA
    ),
    "Gemma-4-12B": gemma4(3840, 15_360, (16, 8), (16, 1)),
    "Gemma-4-26B-A4B": gemma4(
        2816,
        2112,
        (16, 8),
        (16, 2),
        Experts(128, 8, 704, shared_intermediate_size=2112, has_own_norms=True),
    ),
    "Gemma-4-31B": gemma4(5376, 21_504, (32, 16), (32, 4)),
    "DeepSeek-V2-Lite": latent_decoder(
        2048,
        10_944,
        16,
        102_400,
        latent=Latent(0, 512, 128, 64, 128),
        experts=Experts(64, 6, 1408, norm_topk_prob=False, shared_intermediate_size=2816),
    ),
    "DeepSeek-V3": latent_decoder(
        7168,
        18_432,
        128,
        129_280,
        latent=Latent(1536, 512, 128, 64, 128),
        experts=Experts(
            256,
            8,
            2048,
            "sigmoid",
            has_correction_bias=True,
            num_groups=8,
            topk_groups=4,
            routed_scaling_factor=2.5,
            shared_intermediate_size=2048,
        ),
    ),
    "GLM-4.7-Flash": latent_decoder(
        2048,
        10_240,
        20,
        154_880,
        latent=Latent(768, 512, 192, 64, 256),
        experts=Experts(
            64,
            4,
            1536,
            "sigmoid",
            has_correction_bias=True,
            routed_scaling_factor=1.8,
            shared_intermediate_size=1536,
        ),
    ),
    "Qwen3-Next-80B-A3B": hybrid_decoder(
        decoder(
            2048,
            5120,
            (16, 2),
            256,
            151_936,
            turned=64,
            norm_offset=1.0,
            has_qk_norm=True,
            has_output_gate=True,
            experts=Experts(512, 10, 512, shared_intermediate_size=512, has_shared_gate=True),
        ),
        GATED_DELTA_NET,
        has_mlp=True,
    ),
    "Nemotron-Nano-9B-v2": hybrid_decoder(
        decoder(
            4480,
            15_680,
            (40, 8),
            128,
            131_072,
            names=WeightNames(gate_up=("up_proj",), in_proj=("in_proj",)),
            gate="relu2",
        ),
        mamba2(128, 80, 8, 128),
        has_mlp=False,
    ),
    "Granite-4.0-H-Small": hybrid_decoder(
        decoder(
            4096,
            1536,
            (32, 8),
            128,
            100_352,
            names=WeightNames(in_proj=("in_proj",)),
            experts=Experts(72, 10, 768, shared_intermediate_size=1536),
        ),
        mamba2(128, 64, 1, 128),
        has_mlp=True,
    ),
    "gpt-oss-20b": decoder(
        2880,
        2880,
        (64, 8),
        64,
        201_088,
        gate=Gate(alpha=1.702, limit=7.0, beta=1.0),
        window=128,
        has_sinks=True,
        experts=Experts(32, 4, 2880, "softmax_chosen", has_biases=True),
        qkv_bias=True,
        o_proj_bias=True,
        names=WeightNames(router="router", stacked_experts="interleaved"),
    ),
}
