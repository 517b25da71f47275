"""Entries of families: their parts, and the code that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...kernels.attention import AttentionShape
from ...kernels.elementwise import Activation, Gate
from ..config.architecture import (
    NO_ROPE,
    Architecture,
    Block,
    Experts,
    Rope,
    WeightNames,
)
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import make_rope, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
SILU, GELU = Gate("silu"), Gate("gelu_tanh")


class DecoderSizes(NamedTuple):
    """Sizes that every family's config has."""

    class_name: str
    layers: int
    hidden: int
    heads: int
    head_dim: int
    positions: int


@dataclass(frozen=True, slots=True)
class Family:
    """A family: fills the block from configs of one `model_type`.

    `class_name` is the class in transformers. `head_dim` is for configs without one, if it is not
    the hidden size divided by heads. `defaults` are transformers' for missing fields, `renamed` are
    fields by the names that most families have for them. With `sorts_rows`, adapters' rows would
    have to be sorted into the merged weights.
    """

    class_name: str
    fill: Callable[[ConfigFields, DecoderSizes], Architecture]
    head_dim: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    sorts_rows: bool = False

    @property
    def has_text_class(self) -> bool:
        """Return whether a class in transformers runs its text model alone."""
        return not self.class_name.endswith("ForConditionalGeneration")

    @property
    def takes_adapters(self) -> bool:
        """Return whether adapters are supported: they fit, and there is a class to check them."""
        return self.has_text_class and not self.sorts_rows


def read_query_scaling(parameters: dict[str, Any]) -> tuple[float, int] | None:
    """Return and remove the scaling of queries by their positions from a rope's parameters."""
    beta = parameters.pop("llama_4_scaling_beta", None)
    parameters.pop("max_position_embeddings", None)
    if beta is None:
        return None
    original = parameters.get("original_max_position_embeddings")
    if type(original) is not int:
        raise UnsupportedConfig("its rope sets llama_4_scaling_beta without original positions")
    return float(beta), original


def make_architecture(
    fields: ConfigFields,
    sizes: DecoderSizes,
    *,
    key_heads: int | None = None,
    scaling: float | None = None,
    softcap: float = 0.0,
    has_sinks: bool = False,
    windows: Sequence[int] | None = None,
    ropes: Sequence[Rope] | None = None,
    theta: float = 10_000.0,
    experts: Sequence[Experts | None] | None = None,
    gate: Gate | Activation | None = None,
    intermediate_size: int | None = None,
    tie_word_embeddings: bool = False,
    eps: float | None = None,
    **others: Any,
) -> Architecture:
    """Return an architecture; `windows`, `ropes` and `experts` have one entry per layer.

    The defaults are those of most families: one rope of base `theta`, full attention, an MLP with
    SiLU. `key_heads`, `tie_word_embeddings` and `eps` replace missing fields; `others` are fields
    of `Architecture`.
    """
    if gate is None:
        fields.allow("hidden_act", "silu", "swish")
    key_heads = fields.count("num_key_value_heads", key_heads)
    if sizes.heads % key_heads:
        raise UnsupportedConfig(f"{sizes.heads} heads cannot share {key_heads} key heads evenly")
    if ropes is None:
        ropes = [read_rope(fields, sizes.head_dim, sizes.positions, theta)] * sizes.layers
    names = others.get("names", WeightNames())
    if names.has_rope_pairs:
        ropes = [_padded(rope, sizes.head_dim) for rope in ropes]
    shapes = [
        AttentionShape(
            num_query_heads=sizes.heads,
            num_kv_heads=key_heads,
            key_dim=sizes.head_dim,
            value_dim=sizes.head_dim,
            scaling=sizes.head_dim**-0.5 if scaling is None else scaling,
            window=window,
            softcap=softcap,
            has_sinks=has_sinks,
        )
        for window in windows or [0] * sizes.layers
    ]
    blocks = map(Block, shapes, ropes, experts or [None] * sizes.layers)
    return Architecture(
        class_name=sizes.class_name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=sizes.hidden,
        intermediate_size=intermediate_size or fields.count("intermediate_size"),
        max_positions=min(rope.max_positions or sizes.positions for rope in ropes),
        blocks=tuple(blocks),
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        gate=gate or SILU,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=tie_word_embeddings),
        eos_token_ids=fields.get("eos_token_id"),
        **others,
    )


def uniform_windows(fields: ConfigFields, sizes: DecoderSizes) -> list[int]:
    """Return the window of all layers; 0 is none."""
    window = fields.get("sliding_window")
    return [0 if window is None else fields.count("sliding_window")] * sizes.layers


def windows_by_layer(
    fields: ConfigFields, sizes: DecoderSizes, window: int, *, every: int
) -> list[int]:
    """Return the windows by `layer_types`; without it every layer slides except one of `every`."""
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(sizes.layers)]
    if len(kinds) != sizes.layers or not {*kinds} <= {FULL, SLIDING}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    return [window if kind == SLIDING else 0 for kind in kinds]


def count_experts(fields: ConfigFields) -> int:
    """Return the number of experts, by either name of that field."""
    counts = {fields.get(key) for key in ("num_experts", "num_local_experts")} - {None}
    if len(counts) != 1:
        raise UnsupportedConfig(f"{fields.where} has no unambiguous number of experts")
    return fields.count("num_experts", fields.get("num_local_experts"))


def optional_number(fields: ConfigFields, key: str, default: float | None) -> float | None:
    """Return the cap of some numbers; null means none."""
    return None if fields.get(key, default) is None else fields.number(key, default)


def attention_biases(
    fields: ConfigFields, key: str = "attention_bias", *, default: bool = False
) -> dict[str, Any]:
    """Return one flag for the biases of all attention projections."""
    is_biased = fields.flag(key, default=default)
    return {"qkv_bias": is_biased, "o_proj_bias": is_biased}


def _padded(rope: Rope, head_dim: int) -> Rope:
    """Return a rope that rotates pairs of neighbours in the first part of each head."""
    missing = head_dim // 2 - len(rope.inv_freq)
    if not missing or rope == NO_ROPE:
        return rope
    if rope.attention_scaling != 1:
        raise UnsupportedConfig("its rope scales only a part of each head")
    axes = None if rope.axes is None else (*rope.axes, *(0,) * missing)
    return replace(rope, inv_freq=(*rope.inv_freq, *(0.0,) * missing), axes=axes)


def ropes_by_window(
    fields: ConfigFields,
    sizes: DecoderSizes,
    windows: Sequence[int],
    thetas: tuple[float, float],
    kinds: Mapping[str, str],
    *,
    partial: float | None = None,
) -> list[Rope]:
    """Return the ropes of layers with a window and without; only the latter are stretched.

    Without any parameters a `partial` share of each head is rotated, rounded up to pairs.
    """
    nothing = {} if partial is None else {"partial_rotary_factor": partial}
    nested = dict(fields.get("rope_parameters") or {FULL: nothing, SLIDING: nothing})
    near = dict(nested.pop(SLIDING, None) or {})
    far = {**(nested.pop(FULL, None) or {}), **(fields.get("rope_scaling") or {})}
    if nested:
        raise UnsupportedConfig("its ropes are not given by kind of layer")
    first, second = (
        make_rope(
            parameters,
            sizes.head_dim,
            sizes.positions,
            theta,
            kinds,
            may_be_odd=partial is not None,
        )
        for parameters, theta in zip((near, far), thetas, strict=True)
    )
    return [first if window else second for window in windows]
