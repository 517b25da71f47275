"""CLIP and SigLIP: a tower of texts and one of images, whose vectors are in the same space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...errors import ModelRefused
from ...kernels.attention import AttentionShape
from ...kernels.elementwise import Activation
from ..config.hf_config import CONFIG, MISFITS, ConfigFields, UnsupportedConfig, parse_hf_config
from .architecture import EncoderArchitecture, EncoderBlock, EncoderNames, HeadLinear
from .families import CURVES

_CURVES: Mapping[str, Activation] = {**CURVES, "quick_gelu": "gelu_sigmoid"}
# Before transformers 4.31 all configs of CLIP had this token as the end of a text.
_OLD_END = 2
_MOST_PATCHES = 2**14
_LAYERS = {"num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_IMAGES = {**_LAYERS, "hidden_size": 768, "image_size": 224, "patch_size": 16, "num_channels": 3}
_SIGLIP = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_CLIP = {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
_TEXTS = {**_LAYERS, "vocab_size": 49_408, "max_position_embeddings": 77, "eos_token_id": 49_407}


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """A family of one `model_type`: its class, and the defaults of the configs of both towers."""

    class_name: str
    texts: dict[str, Any]
    images: dict[str, Any]


FAMILIES = {
    "clip": TowerFamily(
        "CLIPModel",
        _TEXTS | _CLIP | {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
        _IMAGES | _CLIP | {"patch_size": 32},
    ),
    "siglip": TowerFamily(
        "SiglipModel",
        _TEXTS
        | _SIGLIP
        | {"hidden_size": 768, "vocab_size": 32_000, "max_position_embeddings": 64},
        _IMAGES | _SIGLIP,
    ),
}


class ImagePatches(NamedTuple):
    """The squares of `patch` pixels of an image, which has `side` pixels per side.

    CLIP's images also have a class token, whose last hidden state becomes the vector.
    """

    side: int
    patch: int
    has_class_token: bool

    @property
    def num_patches(self) -> int:
        """Return the number of patches of an image."""
        return (self.side // self.patch) ** 2

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of an image."""
        return self.num_patches + self.has_class_token


@dataclass(frozen=True, slots=True)
class TextForm:
    """The form in which a tower was trained to read a text's tokens.

    The vector is that of its first `end` token, None being the token of the highest ID. Without one
    it is that of its first token. With `length`, a text is padded to that number of tokens instead,
    and the vector is that of the last one.
    """

    end: int | None = None
    length: int | None = None

    def read(self, token_ids: list[int], padding: int) -> list[int]:
        """Return the tokens up to the one whose vector is that of the text."""
        if self.length is not None:
            return [*token_ids, *[padding] * (self.length - len(token_ids))]
        end = max(token_ids) if self.end is None else self.end
        return token_ids[: token_ids.index(end) + 1 if end in token_ids else 1]


@dataclass(frozen=True, slots=True)
class TwoTowers:
    """The architectures of both towers; the text's `head` and `projection` give the vectors."""

    kind: Literal["clip", "siglip"]
    class_name: str
    texts: EncoderArchitecture
    images: EncoderArchitecture
    patches: ImagePatches
    text_form: TextForm
    projection: HeadLinear | None


def read_two_towers(name: str, raw: Mapping[str, Any]) -> TwoTowers:
    """Return the towers that a config describes; `ModelRefused` names what is not supported."""
    kind = str(raw.get("model_type"))
    family, hf_config = FAMILIES[kind], parse_hf_config(name, raw)
    try:
        hf_config.check_class([family.class_name])
        return _clip(raw, family) if kind == "clip" else _siglip(raw, family)
    except (UnsupportedConfig, *MISFITS) as exc:
        why = exc if isinstance(exc, UnsupportedConfig) else "values that contradict each other"
        raise ModelRefused(f"{name}: {CONFIG}: {why}") from exc


def _clip(raw: Mapping[str, Any], family: TowerFamily) -> TwoTowers:
    whole = ConfigFields(CONFIG, raw)
    texts, images = _parts(whole, family)
    width = whole.count("projection_dim", 512)
    for part in (texts, images):
        part.get("projection_dim")  # of towers that are served alone
    whole.get("logit_scale_init_value")
    text = _texts(texts, family.class_name, HeadLinear("text_projection", 0, width, has_bias=False))
    image, patches = _images(images, family.class_name, has_class_token=True)
    end = texts.get("eos_token_id")
    if type(end) is not int:
        raise UnsupportedConfig(f"its text_config has unsupported eos_token_id {end!r}")
    for part in (whole, texts, images):
        part.check_all_read()
    return TwoTowers(
        kind="clip",
        class_name=family.class_name,
        texts=text,
        images=image,
        patches=patches,
        text_form=TextForm(end=None if end == _OLD_END else end),
        projection=HeadLinear("visual_projection", image.hidden_size, width, has_bias=False),
    )


def _siglip(raw: Mapping[str, Any], family: TowerFamily) -> TwoTowers:
    whole = ConfigFields(CONFIG, raw)
    texts, images = _parts(whole, family)
    if not images.flag("vision_use_head", default=True):
        raise UnsupportedConfig("its vision_config has unsupported vision_use_head false")
    image, patches = _images(images, family.class_name, has_class_token=False)
    hidden = texts.count("hidden_size")
    width = texts.count("projection_size", hidden)
    if width != image.hidden_size:
        raise UnsupportedConfig(
            f"its texts have {width} dimensions and its images {image.hidden_size}"
        )
    text = _texts(texts, family.class_name, HeadLinear("text_model.head", 0, width))
    texts.get("eos_token_id")
    for part in (whole, texts, images):
        part.check_all_read()
    return TwoTowers(
        kind="siglip",
        class_name=family.class_name,
        texts=text,
        images=image,
        patches=patches,
        text_form=TextForm(length=text.max_positions),
        projection=None,
    )


def _parts(whole: ConfigFields, family: TowerFamily) -> tuple[ConfigFields, ConfigFields]:
    """Return the configs of texts and images.

    Their older names take precedence, with the defaults of the class, as in transformers.
    """
    texts, images = (
        ConfigFields(
            f"its {name}",
            (whole.get(name) or {})
            | (defaults | old if (old := whole.get(f"{name}_dict")) else {}),
            defaults,
        )
        for name, defaults in (("text_config", family.texts), ("vision_config", family.images))
    )
    for part in (whole, texts, images):
        part.get("tie_word_embeddings")  # of all configs; there is nothing to tie
    return texts, images


def _texts(fields: ConfigFields, class_name: str, head: HeadLinear) -> EncoderArchitecture:
    positions = fields.count("max_position_embeddings")
    names = _names(
        "text_model",
        word_embeddings="embeddings.token_embedding",
        position_embeddings="embeddings.position_embedding",
        final_norm="final_layer_norm",
    )
    tower = _tower(fields, class_name, names, is_causal=head.name == "text_projection")
    return replace(
        tower,
        vocab_size=fields.count("vocab_size"),
        num_positions=positions,
        max_positions=positions,
        head=(replace(head, inputs=tower.hidden_size),),
    )


def _images(
    fields: ConfigFields, class_name: str, *, has_class_token: bool
) -> tuple[EncoderArchitecture, ImagePatches]:
    side, patch = fields.count("image_size"), fields.count("patch_size")
    fields.allow("num_channels", 3)
    patches = ImagePatches(side, patch, has_class_token)
    if not 0 < patches.num_patches <= _MOST_PATCHES:
        raise UnsupportedConfig(f"its images of {side} pixels cannot have patches of {patch}")
    names = _names("vision_model", position_embeddings="embeddings.position_embedding")
    names = replace(names, final_norm="post_layernorm")
    tower = _tower(fields, class_name, names, is_causal=False)
    return replace(tower, max_positions=patches.num_tokens), patches


def _tower(
    fields: ConfigFields, class_name: str, names: EncoderNames, *, is_causal: bool
) -> EncoderArchitecture:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise UnsupportedConfig(f"{heads} heads cannot share {hidden} numbers evenly")
    curve = fields.get("hidden_act")
    if curve not in _CURVES:
        raise UnsupportedConfig(f"{fields.where} has unsupported hidden_act {curve!r}")
    shape = AttentionShape(
        num_query_heads=heads,
        num_kv_heads=heads,
        key_dim=hidden // heads,
        value_dim=hidden // heads,
        scaling=(hidden // heads) ** -0.5,
        window=0,
        is_causal=is_causal,
    )
    return EncoderArchitecture(
        class_name=class_name,
        names=names,
        vocab_size=1,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        max_positions=1,
        blocks=(EncoderBlock(shape),) * fields.num_layers(),
        layer_norm_eps=fields.number("layer_norm_eps"),
        activation=_CURVES[curve],
        is_pre_norm=True,
        has_first_norm=True,
    )


def _names(prefix: str, **others: str) -> EncoderNames:
    return EncoderNames(
        base_model_prefix=prefix,
        **{"word_embeddings": "", "final_norm": "", **others},
        token_type_embeddings="",
        embedding_norm="encoder.layers.0.layer_norm1",
        layer="encoder.layers.{}",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o_proj="self_attn.out_proj",
        post_attention_norm="layer_norm2",
        up_proj=("mlp.fc1",),
        down_proj="mlp.fc2",
        post_mlp_norm="layer_norm1",
    )
