"""Decoder architecture: the parameters that turn one block into a model of any family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...kernels.attention import AttentionShape
from ...kernels.elementwise import Activation, Gate
from ...kernels.experts import Scoring
from ...kernels.recurrence import GatedDelta, RecurrentShape


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: angles are position · `inv_freq`.

    Cosines and sines are multiplied by `attention_scaling`. A frequency of 0 rotates nothing.
    Element i of a head is paired with element i + R, for R frequencies; elements from 2·R on are
    not rotated. The frequencies hold for at most `max_positions`. Sequences that may grow beyond
    `original_positions` use `long_inv_freq` instead, from their first token on. With M-RoPE, `axes`
    gives the position (time, height or width) of each frequency; without it all use one.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    max_positions: int | None = None
    axes: tuple[int, ...] | None = None
    original_positions: int | None = None
    long_inv_freq: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: `num_experts_per_tok` of `num_experts` MLPs for each token.

    For `scoring`, the correction bias and the groups see `Routing`. A shared MLP of
    `shared_intermediate_size` processes every token, with its own sigmoid gate if
    `has_shared_gate`. With `scales_inputs` the router's weights multiply the experts' inputs
    instead of their outputs. With `has_own_norms` router and experts each read the residual through
    their own norm, the outputs of the experts and the shared MLP are normed, and each expert's
    output is multiplied by a stored number. The sum of experts and shared MLP is multiplied by
    `output_scale`. With a `latent_size` experts read and write latents of the hidden state.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    scoring: Scoring = "softmax"
    norm_topk_prob: bool = True
    has_biases: bool = False
    has_correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    num_best_of_group: int = 2
    routed_scaling_factor: float = 1.0
    router_jitter: float = 0.0
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False
    has_own_norms: bool = False
    scales_inputs: bool = False
    latent_size: int = 0
    output_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (MLA): widths of the latents, and of the heads projected from them.

    Queries are projected from latents of `query_rank`, or directly (0). In each head, `rope_dim`
    elements of query and key are rotated, neighbours together if `has_rope_pairs`; the rotary key
    is the same in all heads. With `has_bias` the projections to latents have biases.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    has_rope_pairs: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Indexer:
    """Indexer of sparse attention (DSA): heads of index queries, and one index key per token.

    Queries are projected from the latents of queries. In each head the first elements are rotated,
    as many as in a head of attention, neighbours together if `has_rope_pairs`.
    """

    num_heads: int
    head_dim: int
    has_rope_pairs: bool = False


# The spec of a layer without attention.
NO_ATTENTION = AttentionShape(0, 0, 0, 0, 1.0)
# A rope that rotates nothing, for layers without positions (NoPE).
NO_ROPE = Rope((0.0,))


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Recurrent mixer of a layer: projection, causal convolution, rule, gated norm, projection.

    The rule determines the parts of a token's projection, in this order. Gated DeltaNet: channels,
    gate, b and a. State space: gate, channels and dt. Without a rule: B, C and x, where B · x is
    convolved and multiplied by C. The rule's output is normed in `norm_groups` (0: not at all) and
    multiplied by SiLU(gate), before the norm unless `is_norm_first`. A group that all ranks share
    (`is_norm_shared`) is normed separately, and does not count.
    """

    shape: RecurrentShape
    norm_groups: int = 0
    is_norm_first: bool = False
    is_norm_shared: bool = False
    has_conv_bias: bool = False
    has_proj_bias: bool = False

    @property
    def inner_size(self) -> int:
        """Return the width of the rule's output for a token."""
        rule = self.shape.rule
        if isinstance(rule, GatedDelta):
            return rule.num_value_heads * rule.value_dim
        return self.shape.num_channels if rule is None else rule.num_heads * rule.head_dim

    @property
    def proj_sizes(self) -> tuple[int, ...]:
        """Return the widths of the parts of a token's projection."""
        channels, rule = self.shape.num_channels, self.shape.rule
        if rule is None:
            return channels, channels, channels
        if isinstance(rule, GatedDelta):
            return channels, self.inner_size, rule.num_value_heads, rule.num_value_heads
        return self.inner_size, channels, rule.num_heads


class Multiplier(NamedTuple):
    """Factor of `num_rows` rows of a weight from `first` on; 0 means all rows."""

    role: str
    factor: float
    first: int = 0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: attention or a `recurrence`, or neither, and MLPs; `experts` instead of one MLP.

    With both attention and a recurrence, both read the same normed input and their outputs are
    added. Weights are multiplied by `multipliers` when they are loaded.

    With `has_keys_as_values` the values are the keys before their norm and rope. With a `latent`
    the shape is that of absorbed queries; if it selects tokens, an `indexer` does, or else that of
    an earlier layer. With `has_unit_qk_norm` heads are normed without a weight
    after the rope; `query_scaling` multiplies queries by
    1 + beta · ln(1 + (position + 1) // positions).
    """

    attention: AttentionShape
    rope: Rope
    experts: Experts | None = None
    has_keys_as_values: bool = False
    recurrence: Recurrence | None = None
    has_mlp: bool = True
    latent: Latent | None = None
    indexer: Indexer | None = None
    has_unit_qk_norm: bool = False
    query_scaling: tuple[float, int] | None = None
    multipliers: tuple[Multiplier, ...] = ()

    @property
    def has_attention(self) -> bool:
        """Return whether it has attention."""
        return self.attention != NO_ATTENTION

    @property
    def has_mixer(self) -> bool:
        """Return whether it mixes tokens."""
        return self.has_attention or self.recurrence is not None


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms before and after attention and MLP; empty means no norm."""

    input: str = "input_layernorm"
    post_attention: str = ""
    pre_feedforward: str = "post_attention_layernorm"
    post_feedforward: str = ""


SANDWICH = NormNames(
    post_attention="post_attention_layernorm",
    pre_feedforward="pre_feedforward_layernorm",
    post_feedforward="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Weight names in a family's checkpoints, where families differ.

    Layers' names begin with `layers` and their number. If `gate_up` has one name, the MLP has no
    gate. One name in `qkv` is one tensor of all three, grouped by key head if `has_qkv_groups`: its
    queries, key and value. The gate of attention outputs is stored in the queries' tensor, each
    head's below its query, or as `output_gate`. With `has_rope_pairs` neighbouring elements of a
    head are rotated together; with `is_transposed` matrices are `[I, O]`. The names of an expert
    are gate, up and down. With `stacked_experts` all experts are in one tensor each, of transposed
    matrices, with gate and up as halves of one or interleaved; "rows" means not transposed, with
    the first and last names of `expert`. Shared experts' names begin with `experts`, or with the
    parent's name if theirs begins with a dot. Experts without a gate have no name for it.
    A recurrent mixer's projections `in_proj` are one tensor per part, or one of all, or by key
    heads (`has_in_proj_groups`) one of the first two parts and one of the last two.
    Tensors whose names begin with one of `mtp` predict more than one token; transformers' class
    leaves them out as well.
    """

    embed_tokens: str = "model.embed_tokens"
    embed_positions: str = ""
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layers: str = "model.layers"
    norms: NormNames = NormNames()
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    has_qkv_groups: bool = False
    output_gate: str = ""
    has_rope_pairs: bool = False
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    o_proj: str = "o_proj"
    sinks: str = "sinks"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down_proj: str = "down_proj"
    is_transposed: bool = False
    experts: str = "mlp"
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    correction_bias_axes: tuple[int, ...] = ()
    shared_experts: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked_experts: Literal["halves", "interleaved", "rows"] | None = None
    recurrence: str = "linear_attn"
    in_proj: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    has_in_proj_groups: bool = False
    conv: str = "conv1d"
    gate_norm: str = "norm"
    out_proj: str = "out_proj"
    mtp: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """Return the prefix of all names but the head's."""
        return self.norm.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder: embedding, blocks, final norm and head; `names.norms` places the norms.

    `class_name` is the family's class in transformers. `norm_offset` is added to all weights of
    norms, which are RMSNorms, or with `has_layer_norm` LayerNorms. With `is_parallel` a layer's
    attention and MLP read the same residual; their outputs are multiplied by `residual_scale`. QK
    norm is per head, or with `has_wide_qk_norm` over all heads together; with `is_qk_norm_late` it
    follows the rope. Without a gate the MLP is up, activation and down. `first_position` is the row
    of position 0 in a table of `num_positions`, which only learned positions have.
    `query_scaling` (Ministral 3) multiplies queries by 1 + beta · ln(1 + position // positions).
    `value_scale` is a factor of values, `has_value_norm` an RMS norm of each of their heads without
    a weight. With `has_layer_scalar` each layer's sum with the residual is multiplied by a stored
    number. With `has_output_gate` the attention output is multiplied by the sigmoid of a gate that
    is projected with the queries. The weights of `num_mtp_layers` after the last layer, which
    predict more than one token, are left out.
    `max_positions` is the longest context; `eos_token_ids` is the config's: an id, a list of ids,
    or None. No code of the class reads the config's `ignored_fields`.
    """

    class_name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_positions: int
    blocks: tuple[Block, ...]
    rms_norm_eps: float
    gate: Gate | Activation
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    has_layer_norm: bool = False
    has_norm_bias: bool = False
    has_qk_norm: bool = False
    has_wide_qk_norm: bool = False
    is_qk_norm_late: bool = False
    is_parallel: bool = False
    num_positions: int = 0
    first_position: int = 0
    query_scaling: tuple[float, int] | None = None
    value_scale: float = 1.0
    has_value_norm: bool = False
    has_layer_scalar: bool = False
    has_output_gate: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    num_mtp_layers: int = 0
    names: WeightNames = WeightNames()
    eos_token_ids: object = None
    ignored_fields: tuple[str, ...] = field(default=(), compare=False)

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Return the attention specs of the layers, in order."""
        return tuple(block.attention for block in self.blocks if block.has_attention)

    @property
    def recurrent_shapes(self) -> tuple[RecurrentShape, ...]:
        """Return the state shapes of recurrent layers, in order."""
        return tuple(block.recurrence.shape for block in self.blocks if block.recurrence)

    @property
    def original_positions(self) -> int | None:
        """Return the longest sequence that uses the ropes' short frequencies.

        None if there are no long ones.
        """
        several = [block.rope.original_positions for block in self.blocks]
        return min((one for one in several if one is not None), default=None)

    @property
    def max_intermediate_size(self) -> int:
        """Return the widest intermediate size of a token, all of its experts together."""
        mixed = [
            block.experts.num_experts_per_tok * block.experts.intermediate_size
            + block.experts.shared_intermediate_size
            for block in self.blocks
            if block.experts
        ]
        return max([self.intermediate_size, *mixed])
