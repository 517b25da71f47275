"""What a decoder is made of: the numbers by which one block becomes a model of any family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kernels.attention import AttentionShape
from engine.kernels.blocks import Gate


@dataclass(frozen=True, slots=True)
class Rope:
    """How a position turns a head: by position · frequency, cosines and sines times `scale`.

    Of each head number i turns with number i + R, for R frequencies; what is above 2·R stays. With
    a `reach` the frequencies hold for so many positions only. `axes` says of each frequency by
    which of three positions it turns, of time, height and width; without them all turn by one.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    reach: int | None = None
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """`chosen` of `count` MLPs of `width` a token, weighted by a softmax over all or the chosen."""

    count: int
    chosen: int
    width: int
    softmax: Literal["all", "chosen"] = "all"
    is_renormalised: bool = True
    has_biases: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """One layer; without `experts` it has one MLP."""

    attention: AttentionShape
    rope: Rope
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """What a family's checkpoints call the parts of a layer where families differ.

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

    `title` is how transformers calls the family's class. `norm_offset` is added to all weights of
    norms. With sandwich norms, what attention and MLP give is normed before it is added.
    `max_positions` are those that it can tell apart, `eos_token_ids` what its config has for the
    end: an id, a list of ids, or None.
    """

    title: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    max_positions: int
    blocks: tuple[Block, ...]
    eps: float
    gate: Gate
    is_tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    has_head_norms: bool = False
    has_sandwich_norms: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    names: Names = Names()
    eos_token_ids: object = None

    @property
    def widest(self) -> int:
        """Return the widest inner width that a token goes through, all of its experts together."""
        mixed = [
            block.experts.chosen * block.experts.width for block in self.blocks if block.experts
        ]
        return max([self.inner_size, *mixed])
