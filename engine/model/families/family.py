"""Entries of families: what each is made of, and what most of them share."""

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

    `class_name` is the class in transformers. `head_dim` is for configs without one, where it is
    not the hidden size by heads. `defaults` are transformers' for other fields left out, `renamed`
    are fields by the names that most families have for them. With `sorts_rows` rows of
    adapters would have to be sorted into the merged weights.
    """

    class_name: str
    fill: Callable[[ConfigFields, DecoderSizes], Architecture]
    head_dim: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    sorts_rows: bool = False

    @property
    def has_text_class(self) -> bool:
        """Say whether a class in transformers runs its text alone."""
        return not self.class_name.endswith("ForConditionalGeneration")

    @property
    def takes_adapters(self) -> bool:
        """Say whether adapters are served: they fit, and there is a class to prove them by."""
        return self.has_text_class and not self.sorts_rows


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
    **others: Any,
) -> Architecture:
    """Return an architecture; `windows`, `ropes` and `experts` are told layer by layer.

    The defaults are those of most families: one rope of base `theta`, full attention, an MLP with
    SiLU. `key_heads` and `tie_word_embeddings` hold where the config leaves them out; `others` are
    fields of `Architecture`.
    """
    if gate is None:
        fields.allow("hidden_act", "silu", "swish")
    key_heads = fields.count("num_key_value_heads", key_heads)
    if sizes.heads % key_heads:
        raise UnsupportedConfig(f"{sizes.heads} heads do not share {key_heads} key heads evenly")
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
        rms_norm_eps=fields.number("rms_norm_eps"),
        gate=gate or SILU,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=tie_word_embeddings),
        eos_token_ids=fields.get("eos_token_id"),
        **others,
    )


def uniform_windows(fields: ConfigFields, sizes: DecoderSizes) -> list[int]:
    """Return one window for all layers; 0 is none."""
    window = fields.get("sliding_window")
    return [0 if window is None else fields.count("sliding_window")] * sizes.layers


def windows_by_layer(
    fields: ConfigFields, sizes: DecoderSizes, window: int, *, every: int
) -> list[int]:
    """Return the windows by `layer_types`; without them all slide but one of `every`."""
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(sizes.layers)]
    if len(kinds) != sizes.layers or not {*kinds} <= {FULL, SLIDING}:
        raise UnsupportedConfig(f"{fields.where} says layer_types {kinds!r}")
    return [window if kind == SLIDING else 0 for kind in kinds]


def count_experts(fields: ConfigFields) -> int:
    """Return how many experts there are, by either of the two names of that field."""
    told = {fields.get(key) for key in ("num_experts", "num_local_experts")} - {None}
    if len(told) != 1:
        raise UnsupportedConfig(f"{fields.where} says not how many experts there are")
    return fields.count("num_experts", fields.get("num_local_experts"))


def optional_number(fields: ConfigFields, key: str, default: float | None) -> float | None:
    """Return where numbers are capped; null says nowhere."""
    return None if fields.get(key, default) is None else fields.number(key, default)


def attention_biases(
    fields: ConfigFields, key: str = "attention_bias", *, default: bool = False
) -> dict[str, Any]:
    """Return what one flag says of the biases of all projections of attention."""
    is_biased = fields.flag(key, default=default)
    return {"qkv_bias": is_biased, "o_proj_bias": is_biased}


def _padded(rope: Rope, head_dim: int) -> Rope:
    """Return a rope of pairs for all of a head, of whose numbers it turns the first."""
    missing = head_dim // 2 - len(rope.inv_freq)
    if not missing or rope == NO_ROPE:
        return rope
    if rope.attention_scaling != 1:
        raise UnsupportedConfig("its rope scales the pairs that it turns and leaves others")
    return replace(rope, inv_freq=(*rope.inv_freq, *(0.0,) * missing))


def ropes_by_window(
    fields: ConfigFields,
    sizes: DecoderSizes,
    windows: Sequence[int],
    thetas: tuple[float, float],
    kinds: Mapping[str, str],
    *,
    partial: float | None = None,
) -> list[Rope]:
    """Return the ropes of layers with a window and without: only the latter are stretched.

    Without any parameters a `partial` share of each head is turned.
    """
    nothing = {} if partial is None else {"partial_rotary_factor": partial}
    nested = dict(fields.get("rope_parameters") or {FULL: nothing, SLIDING: nothing})
    near = dict(nested.pop(SLIDING, None) or {})
    far = {**(nested.pop(FULL, None) or {}), **(fields.get("rope_scaling") or {})}
    if nested:
        raise UnsupportedConfig("its ropes are told in another way than by kind of layer")
    first, second = (
        make_rope(said, sizes.head_dim, sizes.positions, theta, kinds)
        for said, theta in zip((near, far), thetas, strict=True)
    )
    return [first if window else second for window in windows]
