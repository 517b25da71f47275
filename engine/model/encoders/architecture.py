"""Encoder architecture: the numbers by which one block becomes a model of any family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...kernels.attention import AttentionShape
from ...kernels.elementwise import Activation, Gate
from ..config.architecture import Rope


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    """One layer; without a rope, only the embedding depends on positions."""

    attention: AttentionShape
    rope: Rope | None = None


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Weight names in a family's checkpoints; a layer's begin with `layer` and its number.

    All names begin with `base_model_prefix` in the checkpoint of a model with a head.
    `post_attention_norm` follows attention, `post_mlp_norm` the MLP. In a pre-norm family the
    latter is the next layer's first norm, and after the last layer `final_norm`.
    """

    base_model_prefix: str
    word_embeddings: str
    position_embeddings: str
    token_type_embeddings: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    o_proj: str
    post_attention_norm: str
    up_proj: tuple[str, ...]
    down_proj: str
    post_mlp_norm: str
    final_norm: str = ""
    position_bias: str = ""


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """One step of a head: `activation(weight x + bias)`; the activation is a class of torch.nn.

    The bias is stored as `bias_name`, if that is set.
    """

    name: str
    inputs: int
    outputs: int
    activation: str = "Identity"
    has_bias: bool = True
    bias_name: str = ""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """One step of a head: the norm by mean and variance."""

    name: str
    width: int
    eps: float
    has_bias: bool = True


HeadPart = HeadLinear | HeadNorm


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """An encoder: embeddings, blocks, and the classifier on top of them.

    Post-norm: norms follow the residual addition. With `is_pre_norm` they precede attention and
    MLP, and the first layer has none before its attention, unless it `has_first_norm`, which is
    then the norm of the embeddings, and no part of the residual. The MLP is up, `activation` and
    down; a gated activation joins two up projections. Position p has row p + `first_position` of
    the position embeddings; without `num_positions` there are none. With `num_buckets` all layers
    share a relative position bias of that many. `head` is the family's own for sequence
    classification, over the vectors of `head_pooling`, or of each token; the outputs of its last
    part are the labels. `token_head` is that for token classification, `language_head` that of a
    masked language model, empty if the engine does not implement it.
    `max_positions` is the longest context. No code of the class reads the config's
    `ignored_fields`.
    """

    class_name: str
    names: EncoderNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_positions: int
    blocks: tuple[EncoderBlock, ...]
    layer_norm_eps: float
    activation: Gate | Activation
    num_positions: int = 0
    first_position: int = 0
    num_types: int = 0
    num_buckets: int = 0
    is_pre_norm: bool = False
    has_first_norm: bool = False
    qkv_bias: bool = True
    o_proj_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    head_pooling: Literal["cls", "mean", "tokens"] = "cls"
    head: tuple[HeadPart, ...] = ()
    token_head: tuple[HeadPart, ...] = ()
    language_head: tuple[HeadPart, ...] = ()
    ignored_fields: tuple[str, ...] = field(default=(), compare=False)
