"""Decoder architecture: the numbers by which one block becomes a model of any family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..kernels.attention import AttentionShape
from ..kernels.elementwise import Gate


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: angles are position · `inv_freq`.

    Cosines and sines are multiplied by `attention_scaling`.
    Number i of a head pairs with number i + R, for R frequencies; numbers above 2·R stay. The
    frequencies hold for at most `max_positions`. M-RoPE: `axes` has each frequency's position, of
    time, height and width; without it all use one.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    max_positions: int | None = None
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: `num_experts_per_tok` of `num_experts` MLPs for each token.

    Their weights are a softmax over the router's logits of all experts or of the chosen ones.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    softmax: Literal["all", "chosen"] = "all"
    norm_topk_prob: bool = True
    has_biases: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """One layer; without `experts` it has one MLP."""

    attention: AttentionShape
    rope: Rope
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Weight names in a family's checkpoints, where families differ.

    An expert's are gate, up and down; with `stacked_experts` all experts lie in one tensor each, by
    transposed matrices with gate and up interleaved.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    experts: str = "mlp"
    router: str = "gate"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked_experts: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder: embedding, blocks, final norm, head; every norm is an RMSNorm.

    `class_name` is the family's class in transformers. `norm_offset` is added to all weights of
    norms. With sandwich norms the outputs of attention and MLP are normed before they are added.
    `max_positions` is the longest context; `eos_token_ids` is the config's: an id, a list of ids,
    or None.
    """

    class_name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_positions: int
    blocks: tuple[Block, ...]
    rms_norm_eps: float
    gate: Gate
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    has_qk_norm: bool = False
    has_sandwich_norms: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    names: WeightNames = WeightNames()
    eos_token_ids: object = None

    @property
    def max_intermediate_size(self) -> int:
        """Return the widest inner width that a token goes through, all of its experts together."""
        mixed = [
            block.experts.num_experts_per_tok * block.experts.intermediate_size
            for block in self.blocks
            if block.experts
        ]
        return max([self.intermediate_size, *mixed])
