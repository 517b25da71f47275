"""Each family's config fills the whole block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.families import COMMON, FAMILIES, ROPE, VARIANTS, build, config_fields
from tests.long_parameters import with_long
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model import native
from tidemill.engine.model.config.architecture import Architecture
from tidemill.engine.model.config.hf_config import (
    ConfigFields,
    UnsupportedConfig,
    parse_hf_config,
    read_hf_config,
)
from tidemill.engine.model.families import family, registry
from tidemill.engine.model.families.family import DecoderSizes, Family, make_architecture
from tidemill.engine.model.families.left_out import LEFT_OUT
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.parity.logits import chunked_logits
from tidemill.engine.model.weights.checkpoint import find_checkpoint

ALL = [*FAMILIES, *VARIANTS]
CPU = torch.device("cpu")


def raw_config(name: str) -> dict[str, Any]:
    """Return transformers' config.json of a family or variant."""
    kind, differs = VARIANTS[name] if name in VARIANTS else (name, FAMILIES[name])
    raw: dict[str, Any] = json.loads(
        getattr(transformers, kind)(**config_fields(kind, differs)).to_json_string(use_diff=False)
    )
    return raw


def understood(folder: Path, raw: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config.json."""
    (folder / "config.json").write_text(json.dumps(raw))
    return architecture_of(read_hf_config(str(folder)))


@pytest.mark.parametrize("name", with_long(FAMILIES, VARIANTS))
def test_missing_fields_have_transformers_defaults(tmp_path: Path, name: str) -> None:
    """Field by field: the default of the family's class, or not understood."""
    raw = raw_config(name)
    num_understood = 0
    for key in raw.keys() - {"model_type"}:
        less = {other: value for other, value in raw.items() if other != key}
        try:
            got = understood(tmp_path, less)
        except UnsupportedConfig:
            continue
        num_understood += 1
        resolved = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert got == understood(tmp_path, json.loads(json.dumps(resolved, default=str))), key
    assert num_understood > len(raw) / 2


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_model_that_is_left_out_is_so_by_the_field_that_the_page_names(
    tmp_path: Path, kind: str
) -> None:
    """Which its family's others do without."""
    configs = (raw_config(name) for name in FAMILIES)
    raw = next(raw for raw in configs if raw["model_type"] == kind)
    understood(tmp_path, raw)
    _, field, value = LEFT_OUT[kind]
    with pytest.raises(UnsupportedConfig, match=field):
        understood(tmp_path, raw | {field: value})


@pytest.mark.parametrize("name", with_long(FAMILIES, VARIANTS))
def test_a_field_that_its_class_never_reads_is_ignored_by_name(tmp_path: Path, name: str) -> None:
    """A field that its class, or any class, may read is not passed over, unless it is empty."""
    raw = raw_config(name)
    expected = understood(tmp_path, raw)
    assert expected.ignored_fields == ()
    for off in (None, False, [], {}):
        assert understood(tmp_path, raw | {"is_decoder": off}) == expected
    for on in (True, 0.5, "yes", [1], 0):
        got = understood(tmp_path, raw | {"new_trick": on})
        assert (got, got.ignored_fields) == (expected, ("new_trick",))
        with pytest.raises(UnsupportedConfig, match="tie_last_hidden_states"):
            understood(tmp_path, raw | {"tie_last_hidden_states": on})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSSF"},
        {"index_topk_pattern": ["full", "shared", "full", "shared"]},
    ],
    ids=str,
)
def test_layers_share_selections_as_in_transformers(fields: dict[str, Any]) -> None:
    """A frequency, an offset and a pattern give the layers with an indexer of GLM-5."""
    raw = {**raw_config("GlmMoeDsaConfig"), "indexer_types": None, "index_topk_freq": None}
    architecture = architecture_of(parse_hf_config("tiny", raw | fields))
    kinds = transformers.GlmMoeDsaConfig(num_hidden_layers=4, **fields).indexer_types
    assert [block.indexer is not None for block in architecture.blocks] == [
        kind == "full" for kind in kinds
    ]


NOT_UNDERSTOOD: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"hidden_act": "relu"}, "relu") for name in ("LlamaConfig", "Phi3Config")),
    ("MixtralConfig", {"hidden_act": "gelu"}, "gelu"),
    ("Gemma2Config", {"hidden_activation": "silu"}, "silu"),
    ("GemmaConfig", {"hidden_act": "silu"}, "silu"),
    *(
        (name, {"use_bidirectional_attention": True}, "bidirectional")
        for name in ("GemmaConfig", "Gemma2Config", "Gemma3TextConfig")
    ),
    ("Gemma3TextConfig", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("Gemma4TextConfig", {"hidden_size_per_layer_input": 8}, "per-layer inputs"),
    ("Gemma4TextConfig", {"per_layer_config": True}, "contradict each other"),
    ("DeepseekV32Config", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("DeepseekV32Config", {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
    ("DeepseekV32Config", {"index_head_dim": 4}, "index_head_dim 4"),
    ("GlmMoeDsaConfig", {"indexer_types": ["shared", *["full"] * 3]}, "indexer_types"),
    ("GlmMoeDsaConfig", {"indexer_types": None, "index_topk_pattern": "FSX"}, "indexer_types"),
    ("GlmMoeDsaConfig", {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ("GPT2Config", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("Gemma4TextConfig", {"num_kv_shared_layers": 2}, "keys and values of others"),
    ("LlamaConfig", {"sliding_window": 12}, "sliding_window"),
    ("LlamaConfig", {"attention_chunk_size": 16}, "attention_chunk_size"),
    ("Qwen3Config", {"is_causal": False}, "is_causal"),
    ("Qwen3Config", {"draft_vocab_size": 32}, "draft_vocab_size"),
    ("Qwen3Config", {"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
    ("Phi3Config", {"full_attn_mod": 2}, "full_attn_mod"),
    ("Qwen3Config", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
    ("Qwen3Config", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("Qwen2Config", {"layer_types": ["sliding_attention"] * 4}, "no window"),
    ("MistralConfig", {"sliding_window": "12"}, "sliding_window"),
    ("LlamaConfig", {"num_key_value_heads": 3}, "evenly"),
    ("LlamaConfig", {"attention_bias": "yes"}, "attention_bias"),
    ("LlamaConfig", {"rms_norm_eps": "x"}, "rms_norm_eps"),
    ("LlamaConfig", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("LlamaConfig", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("LlamaConfig", {"rope_parameters": ROPE | {"rope_type": "spiral"}}, "spiral"),
    ("LlamaConfig", {"rope_parameters": ROPE | {"rope_type": "yarn", "alpha": 1}}, "alpha"),
    ("LlamaConfig", {"rope_parameters": ROPE | {"rope_type": "linear"}}, "factor"),
    ("LlamaConfig", {"rope_parameters": {"full_attention": ROPE}}, "full_attention"),
    ("Phi3Config", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2}}, "linear"),
    (
        "Phi3Config",
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.35}},
        "rotates 5 of the 16",
    ),
    ("Gemma3TextConfig", {"rope_parameters": ROPE}, "kind of layer"),
    ("MixtralConfig", {"num_experts": 3}, "number of experts"),
    ("Dots1Config", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("HunYuanMoEV1Config", {"moe_intermediate_size": [96, 48] * 2}, "moe_intermediate_size"),
    ("HunYuanMoEV1Config", {"num_shared_expert": [2] * 4}, "num_shared_expert"),
    ("MiMoV2FlashConfig", {"layernorm_epsilon": 1e-6}, "layernorm_epsilon"),
    ("NemotronConfig", {"kv_channels": 32}, "kv_channels"),
    ("PhimoeConfig", {"expert_intermediate_size": 48}, "expert_intermediate_size"),
    ("LlamaConfig", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ("LlamaConfig", {"is_encoder_decoder": True}, "is_encoder_decoder"),
]


@pytest.mark.parametrize(("name", "differs", "words"), NOT_UNDERSTOOD, ids=str)
def test_unsupported_fields_of_an_entry_are_not_understood(
    tmp_path: Path, name: str, differs: dict[str, Any], words: str
) -> None:
    """No field that the family's config may have is ignored silently."""
    raw = raw_config(name) | differs
    if "3" in words:
        raw.pop("partial_rotary_factor", None)
    with pytest.raises(UnsupportedConfig, match=words):
        understood(tmp_path, raw)


@pytest.mark.parametrize("dtype", ["int8", "float64", "bogus", ["bfloat16"], 7])
def test_a_dtype_that_weights_are_not_served_in_is_not_understood(
    tmp_path: Path, dtype: object
) -> None:
    """It is not treated as fp32, unlike a missing dtype."""
    for key in ("dtype", "torch_dtype"):
        raw = {name: value for name, value in raw_config("LlamaConfig").items() if name != "dtype"}
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: dtype}))
        with pytest.raises(UnsupportedConfig, match="dtype"):
            _ = read_hf_config(str(tmp_path)).dtype
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_hf_config(str(tmp_path)).dtype is None


@pytest.mark.parametrize(
    ("name", "differs", "words"),
    [
        ("LlamaConfig", {"hidden_size": "x"}, "hidden_size 'x'; it must be a whole number"),
        ("LlamaConfig", {"vocab_size": True}, "vocab_size True"),
        ("LlamaConfig", {"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ("LlamaConfig", {"num_hidden_layers": 10**6}, "no model has more than"),
    ],
)
def test_impossible_models_are_refused(
    tmp_path: Path, name: str, differs: dict[str, Any], words: str
) -> None:
    """The error names the model, whichever implementation would have run it."""
    with pytest.raises(ModelRefused, match=rf"^{tmp_path}: config.json has .*{words}"):
        understood(tmp_path, raw_config(name) | differs)


OLD_SPELLINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("LlamaConfig", {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    (
        "LlamaConfig",
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    ),
    (
        "Qwen2Config",
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 1e6,
        },
    ),
    (
        "Phi3Config",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.5] * 4,
                "long_factor": [2.0] * 4,
            },
        },
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 256,
            "short_factor": [1.5] * 4,
            "long_factor": [2.0] * 4,
        },
    ),
    (
        "MistralConfig",
        {
            "rope_theta": 1e4,
            "rope_scaling": {
                "type": "su",
                "original_max_position_embeddings": 64,
                "short_factor": [1.5] * 8,
                "long_factor": [2.0] * 8,
            },
        },
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "short_factor": [1.5] * 8,
            "long_factor": [2.0] * 8,
        },
    ),
    (
        "Gemma3TextConfig",
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
]


@pytest.mark.parametrize(("name", "old", "new"), OLD_SPELLINGS)
def test_older_files_say_the_same_in_other_words(
    tmp_path: Path, name: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    """transformers reads them in the same way."""
    raw = raw_config(name)
    raw.pop("rope_parameters")
    raw.pop("layer_types", None)
    got = understood(tmp_path, raw | old)
    resolved = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert got == understood(tmp_path, json.loads(json.dumps(resolved, default=str)))
    outside = {key: value for key, value in old.items() if key.startswith("original")}
    assert got == understood(tmp_path, raw | outside | {"rope_parameters": new})
    plain = understood(tmp_path, raw)
    assert [block.rope for block in got.blocks] != [block.rope for block in plain.blocks]


def test_layers_slide_by_any_of_the_ways_to_say_so(tmp_path: Path) -> None:
    """Windows are set by kinds, by a pattern, or from a layer on, unless they are disabled."""

    def windows(name: str, **differs: Any) -> list[int]:
        raw = {key: value for key, value in raw_config(name).items() if key != "layer_types"}
        made = understood(tmp_path, raw | differs)
        return [block.attention.window for block in made.blocks]

    assert windows("Gemma3TextConfig", sliding_window_pattern=2) == [12, 0, 12, 0]
    assert windows("Gemma3TextConfig", sliding_window_pattern=3) == [12, 12, 0, 12]
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows("Gemma2Config", layer_types=kinds) == [0, 12, 0, 12]
    qwen = {"sliding_window": 12, "max_window_layers": 3}
    assert windows("Qwen2Config", use_sliding_window=True, **qwen) == [0, 0, 0, 12]
    assert windows("Qwen2Config", **qwen) == [0, 0, 0, 0]
    assert windows("Qwen3MoeConfig", sliding_window=12, use_sliding_window=True) == [12] * 4
    assert windows("Qwen3MoeConfig", sliding_window=12) == [0] * 4


def test_the_text_of_a_model_of_images_is_described_by_its_part(tmp_path: Path) -> None:
    """Parts may leave out their family's defaults, as Gemma 3's does."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    raw = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    hf_config = read_hf_config(str(tmp_path))
    assert hf_config.is_multimodal
    assert hf_config.dtype == torch.bfloat16
    got = architecture_of(hf_config)
    resolved = transformers.Gemma3TextConfig(**text).to_dict()
    assert got == understood(tmp_path, json.loads(json.dumps(resolved, default=str)))


def test_a_new_family_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed-OSS is a Llama with one more switch for a bias."""

    def seed_oss(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
        return make_architecture(
            fields,
            sizes,
            qkv_bias=fields.flag("attention_bias", default=True),
            o_proj_bias=fields.flag("attention_out_bias"),
            mlp_bias=fields.flag("mlp_bias"),
        )

    entry = Family("SeedOssForCausalLM", seed_oss, head_dim=128)
    monkeypatch.setitem(registry.FAMILIES, "seed_oss", entry)
    config = transformers.SeedOssConfig(**COMMON, attention_out_bias=True)
    torch.manual_seed(7)
    eager: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    eager.save_pretrained(tmp_path)
    hf_config = read_hf_config(str(tmp_path))
    architecture = architecture_of(hf_config)
    checkpoint = find_checkpoint(str(tmp_path))
    loaded = native.load(checkpoint, hf_config, architecture, torch.float32, CPU)
    assert native.check_parity(checkpoint, hf_config, architecture, loaded).holds


def changed(architecture: Architecture, **fields: Any) -> Architecture:
    """Return an architecture whose layers have other attention specs."""
    blocks = tuple(
        replace(block, attention=replace(block.attention, **fields))
        for block in architecture.blocks
    )
    return replace(architecture, blocks=blocks)


MUTATIONS: dict[str, tuple[str, Any]] = {
    "a wider window": ("MistralConfig", lambda a: changed(a, window=13)),
    "a smaller window": ("MistralConfig", lambda a: changed(a, window=11)),
    "no window in one layer": (
        "Gemma3, near and far",
        lambda a: replace(a, blocks=(a.blocks[1], *a.blocks[1:])),
    ),
    "no softcap of scores": ("Gemma2Config", lambda a: changed(a, softcap=0.0)),
    "no softcap of logits": ("Gemma2Config", lambda a: replace(a, logit_softcap=None)),
    "another scaling": ("Gemma2, other scores", lambda a: changed(a, scaling=0.25)),
    "no offset of norms": ("GemmaConfig", lambda a: replace(a, norm_offset=0.0)),
    "a little offset": ("GemmaConfig", lambda a: replace(a, norm_offset=1.0 + 2**-9)),
    "another scale": ("GemmaConfig", lambda a: replace(a, embedding_scale=8.03125)),
    "another epsilon": ("Qwen3Config", lambda a: replace(a, rms_norm_eps=1e-4)),
    "another curve": ("GemmaConfig", lambda a: replace(a, gate=family.SILU)),
    "another limit": ("GptOssConfig", lambda a: replace(a, gate=replace(a.gate, limit=0.5))),
    "no lift": ("GptOssConfig", lambda a: replace(a, gate=replace(a.gate, beta=0.0))),
    "other steepness": ("GptOssConfig", lambda a: replace(a, gate=replace(a.gate, alpha=1.7))),
    "far as near": (
        "Gemma3, near and far",
        lambda a: replace(
            a, blocks=tuple(replace(block, rope=a.blocks[0].rope) for block in a.blocks)
        ),
    ),
    "a longer turn": (
        "Llama, yarn rope",
        lambda a: replace(
            a,
            blocks=tuple(
                replace(block, rope=replace(block.rope, attention_scaling=1.0))
                for block in a.blocks
            ),
        ),
    ),
    "shares as they are": (
        "MixtralConfig",
        lambda a: replace(
            a,
            blocks=tuple(
                replace(block, experts=replace(block.experts, norm_topk_prob=False))
                for block in a.blocks
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_number_of_an_architecture_counts(tmp_path: Path, name: str) -> None:
    """The check distinguishes the right number from one that is slightly off."""
    family, mutate = MUTATIONS[name]
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config = read_hf_config(str(tmp_path))
    right = architecture_of(hf_config)
    wrong = mutate(right)
    assert wrong != right
    checkpoint = find_checkpoint(str(tmp_path))
    for architecture, holds in ((right, True), (wrong, False)):
        loaded = native.load(checkpoint, hf_config, architecture, torch.float32, CPU)
        parity = native.check_parity(checkpoint, hf_config, architecture, loaded)
        assert parity.holds is holds, parity


@pytest.mark.long  # test_parity.py has those of each family
def test_numbers_are_finite_where_nothing_was_mutated(tmp_path: Path) -> None:
    """Every family and variant answers with numbers in bf16, too."""
    for name in ALL:
        folder = tmp_path / name.replace(" ", "")
        build(name).save_pretrained(folder)  # type: ignore[operator]
        hf_config = read_hf_config(str(folder))
        loaded = native.load(
            find_checkpoint(str(folder)),
            hf_config,
            architecture_of(hf_config),
            torch.bfloat16,
            CPU,
        )
        assert chunked_logits(loaded, torch.arange(40)).isfinite().all(), name
