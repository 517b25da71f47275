"""What an encoder is made of: the numbers by which one block becomes a model of any family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kernels.attention import AttentionShape
from engine.kernels.blocks import Curve, Gate
from engine.model.architecture import Rope


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    """One layer; without a rope positions are told by the embedding alone."""

    attention: AttentionShape
    rope: Rope | None = None


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """What a family's checkpoints call the parts; a layer's are below `layer`, with its number.

    `base` is what all names begin with in the checkpoint of a model with a head. `attended_norm` is
    the norm after attention, `mixed_norm` the one after the MLP; where norms come before both,
    that of the next layer, named by `mixed_norm`, or the last one, `final_norm`.
    """

    base: str
    words: str
    positions: str
    types: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    output: str
    attended_norm: str
    up: tuple[str, ...]
    down: str
    mixed_norm: str
    final_norm: str = ""


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A part of a head: `activation(weight x + bias)`; the activation is a class of torch.nn."""

    name: str
    inputs: int
    outputs: int
    activation: str = "Identity"
    has_bias: bool = True


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A part of a head: the norm by mean and variance."""

    name: str
    width: int
    eps: float
    has_bias: bool = True


HeadPart = HeadLinear | HeadNorm


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """An encoder: embeddings, blocks, and what a classifier makes of them.

    Norms come after what they norm was added, or with `is_pre_norm` before it is computed; the
    first layer then has none before its attention. The MLP is up, `end` and down: a gate joins what
    two products give, a curve bends what one gives. A position's row of its table is
    `first_position` further on; no table has 0 `num_positions`. `head` is the family's own for
    sequence classification, over the vectors that `head_pooling` gives; its last part's outputs are
    the labels. `max_positions` are those that it can tell apart.
    """

    title: str
    names: EncoderNames
    vocab_size: int
    hidden_size: int
    inner_size: int
    max_positions: int
    blocks: tuple[EncoderBlock, ...]
    eps: float
    end: Gate | Curve
    num_positions: int = 0
    first_position: int = 0
    num_types: int = 0
    is_pre_norm: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    head_pooling: Literal["cls", "mean"] = "cls"
    head: tuple[HeadPart, ...] = ()
