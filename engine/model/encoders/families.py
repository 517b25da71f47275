"""The families that our encoder computes: a table of `model_type`, and how each fills the block.

An entry takes every field of its config that changes how the model computes. A field that it does
not take but transformers' class may read, or a value that it does not know, is `UnsupportedConfig`:
the model is left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import ModelRefused
from ...kernels.attention import AttentionShape
from ...kernels.elementwise import Activation, Gate
from ..config.architecture import Rope
from ..config.hf_config import (
    CONFIG,
    MISFITS,
    ConfigFields,
    UnsupportedConfig,
    parse_hf_config,
)
from ..config.rope import make_rope, read_rope
from .architecture import (
    EncoderArchitecture,
    EncoderBlock,
    EncoderNames,
    HeadLinear,
    HeadNorm,
    HeadPart,
)

FULL, SLIDING = "full_attention", "sliding_attention"
CURVES: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
# The modules of these activations.
_MODULES: dict[Activation, str] = {"gelu": "GELU", "silu": "SiLU"}
# The parts of masked language models: dense layer, norm, decoder and the decoder's bias.
_BERT_PREDICTIONS = (
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
_LM_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
# Fields about how vectors or scores are made of hidden states: no part of the network.
OF_ENDPOINTS = """
    classifier_from_token is_matryoshka is_original_qwen3_reranker matryoshka_dimensions method
    num_labels sbert_ce_default_activation_function sentence_transformers
""".split()
# Whatever the config contains, transformers' class uses these buckets and padding token 1.
MPNET_BUCKETS, MPNET_FIRST_POSITION = 32, 2


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family: fills the block from configs of one `model_type`.

    `defaults` replace missing fields, `renamed` are fields by the names that other families have
    for them.
    """

    class_name: str
    fill: Callable[[ConfigFields, EncoderSizes], EncoderArchitecture]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """Sizes that every family's config has."""

    class_name: str
    layers: int
    hidden: int
    heads: int
    positions: int
    vocab_size: int
    intermediate: int

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden // self.heads

    def shape(self, window: int = 0) -> AttentionShape:
        """Return a layer's attention: bidirectional, or `window` - 1 tokens to either side."""
        return AttentionShape(
            num_query_heads=self.heads,
            num_kv_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            scaling=self.head_dim**-0.5,
            window=window,
            is_causal=False,
        )


def architecture_of(
    name: str,
    raw: Mapping[str, Any],
    num_labels: int | None = None,
    *,
    is_per_token: bool = False,
    is_language: bool = False,
) -> EncoderArchitecture:
    """Return the architecture that a config describes; `UnsupportedConfig` if ours cannot run it.

    With `num_labels` it has the family's head for sequence classification, or for that of tokens,
    and with `is_language` that of a masked language model.
    """
    kind = raw.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise UnsupportedConfig(f"the engine's encoder does not implement model type {kind!r}")
    hf_config = parse_hf_config(name, raw)
    hf_config.check_class(family.class_name for family in FAMILIES.values())
    fields = ConfigFields(
        hf_config.where, raw, family.defaults, family.renamed, model_type=str(kind)
    )
    fields.allow("is_causal")
    try:
        architecture = family.fill(fields, _sizes(fields, family.class_name))
    except ModelRefused as exc:
        raise ModelRefused(f"{name}: {exc}") from exc
    except MISFITS as exc:
        raise UnsupportedConfig(f"{CONFIG} has values that contradict each other") from exc
    for key in (*OF_ENDPOINTS, "eos_token_id", "tie_word_embeddings"):
        fields.get(key)
    architecture = replace(architecture, ignored_fields=fields.check_all_read())
    if is_language:
        if not architecture.language_head:
            raise UnsupportedConfig(
                f"the engine does not implement the masked language model of {kind!r}"
            )
        return replace(architecture, head=architecture.language_head, head_pooling="tokens")
    if num_labels is None:
        return replace(architecture, head=())
    if is_per_token:
        architecture = replace(architecture, head=architecture.token_head, head_pooling="tokens")
    *parts, last = architecture.head
    assert isinstance(last, HeadLinear)
    return replace(architecture, head=(*parts, replace(last, outputs=num_labels)))


def _sizes(fields: ConfigFields, class_name: str) -> EncoderSizes:
    layers = fields.num_layers()
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise UnsupportedConfig(f"{heads} heads cannot share {hidden} numbers evenly")
    return EncoderSizes(
        class_name=class_name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        positions=fields.count("max_position_embeddings"),
        vocab_size=fields.count("vocab_size"),
        intermediate=fields.count("intermediate_size"),
    )


def _make(
    fields: ConfigFields, sizes: EncoderSizes, names: EncoderNames, **others: Any
) -> EncoderArchitecture:
    """Return an architecture; the defaults are BERT's."""
    default = {
        "max_positions": sizes.positions,
        "blocks": (EncoderBlock(sizes.shape()),) * sizes.layers,
        "activation": _curve(fields, "hidden_act"),
        "token_head": (HeadLinear("classifier", sizes.hidden, 0),),
    }
    if "layer_norm_eps" not in others:
        default["layer_norm_eps"] = fields.number("layer_norm_eps", 1e-12)
    return EncoderArchitecture(
        class_name=sizes.class_name,
        names=names,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        **{**default, **others},
    )


def _language_head(
    fields: ConfigFields,
    sizes: EncoderSizes,
    words: str,
    parts: tuple[str, str, str, str],
    *,
    curve: Activation = "gelu",
    eps: float | None = None,
) -> tuple[HeadPart, ...]:
    """Return the head of a masked language model; empty for an activation without a module.

    `parts` are the names of its dense layer, its norm, its decoder and the bias of the decoder. The
    decoder's weights are those of the word embeddings `words`, unless they are not tied.
    """
    dense, norm, decoder, bias = parts
    if curve not in _MODULES:
        return ()
    last = HeadLinear(words, sizes.hidden, sizes.vocab_size, bias_name=bias)
    if not fields.flag("tie_word_embeddings", default=True):
        last = HeadLinear(decoder, sizes.hidden, sizes.vocab_size)
    eps = fields.number("layer_norm_eps", 1e-12) if eps is None else eps
    return (
        HeadLinear(dense, sizes.hidden, sizes.hidden, _MODULES[curve]),
        HeadNorm(norm, sizes.hidden, eps),
        last,
    )


def _bert(fields: ConfigFields, sizes: EncoderSizes) -> EncoderArchitecture:
    fields.allow("position_embedding_type", "absolute")
    return _make(
        fields,
        sizes,
        _bert_names("bert"),
        num_positions=sizes.positions,
        num_types=fields.count("type_vocab_size", 2),
        head=(
            HeadLinear("bert.pooler.dense", sizes.hidden, sizes.hidden, "Tanh"),
            HeadLinear("classifier", sizes.hidden, 0),
        ),
        language_head=_language_head(
            fields,
            sizes,
            "bert.embeddings.word_embeddings",
            _BERT_PREDICTIONS,
            curve=_curve(fields, "hidden_act"),
        ),
    )


def _roberta(fields: ConfigFields, sizes: EncoderSizes) -> EncoderArchitecture:
    fields.allow("position_embedding_type", "absolute")
    first = _first_position(fields)
    return _make(
        fields,
        sizes,
        _bert_names("roberta"),
        num_positions=sizes.positions,
        first_position=first,
        max_positions=sizes.positions - first,
        num_types=fields.count("type_vocab_size", 2),
        head=_two_layers(sizes),
        language_head=_language_head(fields, sizes, "roberta.embeddings.word_embeddings", _LM_HEAD),
    )


def _mpnet(fields: ConfigFields, sizes: EncoderSizes) -> EncoderArchitecture:
    fields.allow("relative_attention_num_buckets", MPNET_BUCKETS)
    names = replace(
        _bert_names("mpnet"),
        token_type_embeddings="",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        o_proj="attention.attn.o",
        post_attention_norm="attention.LayerNorm",
        position_bias="encoder.relative_attention_bias",
    )
    return _make(
        fields,
        sizes,
        names,
        num_positions=sizes.positions,
        first_position=MPNET_FIRST_POSITION,
        max_positions=sizes.positions - MPNET_FIRST_POSITION,
        num_buckets=MPNET_BUCKETS,
        head=_two_layers(sizes),
        language_head=_language_head(fields, sizes, "mpnet.embeddings.word_embeddings", _LM_HEAD),
    )


def _distilbert(fields: ConfigFields, sizes: EncoderSizes) -> EncoderArchitecture:
    fields.get("sinusoidal_pos_embds")  # only its initialisation
    fields.get("tie_weights_")
    names = EncoderNames(
        base_model_prefix="distilbert",
        word_embeddings="embeddings.word_embeddings",
        position_embeddings="embeddings.position_embeddings",
        token_type_embeddings="",
        embedding_norm="embeddings.LayerNorm",
        layer="transformer.layer.{}",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        o_proj="attention.out_lin",
        post_attention_norm="sa_layer_norm",
        up_proj=("ffn.lin1",),
        down_proj="ffn.lin2",
        post_mlp_norm="output_layer_norm",
    )
    return _make(
        fields,
        sizes,
        names,
        num_positions=sizes.positions,
        layer_norm_eps=1e-12,
        activation=_curve(fields, "activation"),
        head=(
            HeadLinear("pre_classifier", sizes.hidden, sizes.hidden, "ReLU"),
            HeadLinear("classifier", sizes.hidden, 0),
        ),
        language_head=_language_head(
            fields,
            sizes,
            "distilbert.embeddings.word_embeddings",
            ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
            curve=_curve(fields, "activation"),
            eps=1e-12,
        ),
    )


def _nomic_bert(fields: ConfigFields, sizes: EncoderSizes) -> EncoderArchitecture:
    fields.allow("head_dim", sizes.head_dim)
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 1000.0, {"default": "default"})
    names = EncoderNames(
        base_model_prefix="nomic_bert",
        word_embeddings="embeddings.word_embeddings",
        position_embeddings="",
        token_type_embeddings="embeddings.token_type_embeddings",
        embedding_norm="emb_ln",
        layer="encoder.layers.{}",
        qkv=("attn.Wqkv",),
        o_proj="attn.out_proj",
        post_attention_norm="norm1",
        up_proj=("mlp.fc12", "mlp.fc11"),
        down_proj="mlp.fc2",
        post_mlp_norm="norm2",
    )
    return _make(
        fields,
        sizes,
        names,
        blocks=(EncoderBlock(sizes.shape(), rope),) * sizes.layers,
        activation=Gate(_curve(fields, "hidden_act")),
        num_types=fields.count("type_vocab_size", 2),
        qkv_bias=False,
        o_proj_bias=False,
        mlp_bias=False,
        head=(
            HeadLinear("nomic_bert.pooler.dense", sizes.hidden, sizes.hidden, "Tanh"),
            HeadLinear("classifier", sizes.hidden, 0),
        ),
    )


def _modernbert(fields: ConfigFields, sizes: EncoderSizes) -> EncoderArchitecture:
    for key in (  # training, and other implementations
        *("deterministic_flash_attn", "sparse_prediction", "initializer_cutoff_factor"),
        *("sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad"),
        *("cls_token_id", "layer_norm_eps", "position_embedding_type"),
    ):
        fields.get(key)
    eps, has_bias = fields.number("norm_eps", 1e-5), fields.flag("norm_bias")
    # Half of the configured window on either side; the token itself is added.
    window = fields.count("local_attention", 128) // 2 + 1
    kinds, ropes = _layer_kinds(fields, sizes), _modernbert_ropes(fields, sizes)
    blocks = tuple(
        EncoderBlock(sizes.shape(window if kind == SLIDING else 0), ropes[kind]) for kind in kinds
    )
    qkv_bias, has_head_bias = fields.flag("attention_bias"), fields.flag("classifier_bias")
    names = EncoderNames(
        base_model_prefix="model",
        word_embeddings="embeddings.tok_embeddings",
        position_embeddings="",
        token_type_embeddings="",
        embedding_norm="embeddings.norm",
        layer="layers.{}",
        qkv=("attn.Wqkv",),
        o_proj="attn.Wo",
        post_attention_norm="mlp_norm",
        up_proj=("mlp.Wi",),
        down_proj="mlp.Wo",
        post_mlp_norm="attn_norm",
        final_norm="final_norm",
    )
    if (activation := _curve(fields, "classifier_activation")) != "gelu":
        raise UnsupportedConfig(f"{CONFIG} has unsupported classifier_activation {activation!r}")
    common = (
        HeadLinear("head.dense", sizes.hidden, sizes.hidden, "GELU", has_head_bias),
        HeadNorm("head.norm", sizes.hidden, eps, has_bias),
    )
    head = (*common, HeadLinear("classifier", sizes.hidden, 0))
    has_decoder_bias = fields.flag("decoder_bias", default=True)
    is_tied = fields.flag("tie_word_embeddings", default=True)
    words = "model.embeddings.tok_embeddings" if is_tied else "decoder"
    decoder = HeadLinear(
        *(words, sizes.hidden, sizes.vocab_size),
        has_bias=has_decoder_bias,
        bias_name="decoder.bias",
    )
    return _make(
        fields,
        sizes,
        names,
        blocks=blocks,
        layer_norm_eps=eps,
        activation=Gate(_curve(fields, "hidden_activation")),
        is_pre_norm=True,
        qkv_bias=qkv_bias,
        o_proj_bias=qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        norm_bias=has_bias,
        head_pooling="mean" if fields.get("classifier_pooling", "cls") == "mean" else "cls",
        head=head,
        token_head=head,
        language_head=(*common, decoder),
    )


def _layer_kinds(fields: ConfigFields, sizes: EncoderSizes) -> list[str]:
    every = fields.count("global_attn_every_n_layers", 3)
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if layer % every else FULL for layer in range(sizes.layers)]
    if len(kinds) != sizes.layers or not {*kinds} <= {FULL, SLIDING}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    return list(kinds)


def _modernbert_ropes(fields: ConfigFields, sizes: EncoderSizes) -> dict[str, Rope]:
    """Return the ropes of both kinds of layers."""
    nested = dict(fields.get("rope_parameters") or {})
    thetas = {
        FULL: fields.number("global_rope_theta", 160_000.0),
        SLIDING: fields.number("local_rope_theta", 10_000.0),
    }
    if set(nested) - set(thetas):
        raise UnsupportedConfig("its ropes are not given by kind of layer")
    return {
        kind: make_rope(
            nested.get(kind) or {}, sizes.head_dim, sizes.positions, theta, {"default": "default"}
        )
        for kind, theta in thetas.items()
    }


def _first_position(fields: ConfigFields) -> int:
    """Return the row of a sequence's first token in the position table, after that of padding."""
    padding = fields.get("pad_token_id", 1)
    if type(padding) is not int or padding < 0:
        raise UnsupportedConfig(f"{fields.where} has unsupported pad_token_id {padding!r}")
    return padding + 1


def _two_layers(sizes: EncoderSizes) -> tuple[HeadPart, ...]:
    """Return the head of RoBERTa and its successors."""
    return (
        HeadLinear("classifier.dense", sizes.hidden, sizes.hidden, "Tanh"),
        HeadLinear("classifier.out_proj", sizes.hidden, 0),
    )


def _curve(fields: ConfigFields, key: str) -> Activation:
    name = fields.get(key, "gelu")
    if name not in CURVES:
        raise UnsupportedConfig(f"{fields.where} has unsupported {key} {name!r}")
    return CURVES[name]


def _bert_names(base: str) -> EncoderNames:
    return EncoderNames(
        base_model_prefix=base,
        word_embeddings="embeddings.word_embeddings",
        position_embeddings="embeddings.position_embeddings",
        token_type_embeddings="embeddings.token_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        layer="encoder.layer.{}",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        o_proj="attention.output.dense",
        post_attention_norm="attention.output.LayerNorm",
        up_proj=("intermediate.dense",),
        down_proj="output.dense",
        post_mlp_norm="output.LayerNorm",
    )


_BERT = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}
_ROBERTA = {**_BERT, "vocab_size": 50_265}
_DISTILBERT = {**_BERT, "num_hidden_layers": 6}
_NOMIC = {**_BERT, "vocab_size": 30_528, "max_position_embeddings": 2048, "hidden_act": "silu"}
_MPNET = {**_BERT, "vocab_size": 30_527}
_MODERN = {
    "vocab_size": 50_368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
}
_DISTILBERT_FIELDS = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
}
FAMILIES = {
    "bert": EncoderFamily("BertModel", _bert, _BERT),
    "camembert": EncoderFamily("CamembertModel", _roberta, _ROBERTA),
    "distilbert": EncoderFamily("DistilBertModel", _distilbert, _DISTILBERT, _DISTILBERT_FIELDS),
    "modernbert": EncoderFamily("ModernBertModel", _modernbert, _MODERN),
    "mpnet": EncoderFamily("MPNetModel", _mpnet, _MPNET),
    "nomic_bert": EncoderFamily("NomicBertModel", _nomic_bert, _NOMIC),
    "roberta": EncoderFamily("RobertaModel", _roberta, _ROBERTA),
    "xlm-roberta": EncoderFamily("XLMRobertaModel", _roberta, _ROBERTA),
}
