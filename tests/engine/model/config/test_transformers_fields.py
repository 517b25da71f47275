"""Config fields that transformers never reads: the table of words, and ignored fields."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from bench import transformers_fields as tables
from tests.engine.families import FAMILIES as DECODER_CONFIGS
from tests.engine.families import build, config_fields
from tests.engine.model.encoders.small_encoders import loaded, save
from tests.engine.model.families.test_families import raw_config
from tests.engine.model.published import BENCHMARK, OTHERS
from tests.engine.model.published_families import BY_FAMILY
from tests.engine.model.published_fields import DECODERS, DRAFTS, ENCODERS
from tests.engine.model.published_states import STATES
from tidemill.engine.config import EngineConfig
from tidemill.engine.model.config.hf_config import UnsupportedConfig, parse_hf_config
from tidemill.engine.model.config.transformers_fields import FILE, is_class_of, may_read
from tidemill.engine.model.encoders import families as encoders
from tidemill.engine.model.families.registry import FAMILIES, architecture_of
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.decoder import Decoder

# One published config of each of most types.
OF_TYPES = {
    parse_hf_config(name, raw).model_type: raw
    for name, (raw, _) in (BENCHMARK | OTHERS | BY_FAMILY | STATES).items()
}
# Classes of others, of which configs are made.
OTHER_TYPES = (
    *("BambaConfig", "FalconH1Config", "GemmaConfig", "Gemma2Config", "GlmConfig"),
    *("Glm4MoeLiteConfig", "GraniteMoeConfig", "GraniteMoeHybridConfig", "Lfm2Config"),
    *("Lfm2MoeConfig", "Mamba2Config", "MinistralConfig", "Mistral4Config", "MixtralConfig"),
    "Phi3Config",
)
# Types with images, whose classes' defaults are a whole config.
SEEING = sorted(kind for kind in FAMILIES.keys() - OF_TYPES if "_vl" in kind)
# What real files hold that no code reads: of older versions, of tokenizers, and of training.
HARMLESS: dict[str, Any] = {
    "_flash_attn_2_enabled": True,
    "_model_name_or_path": "x",
    "mask_value": -1e9,
    "output_past": True,
    "seed": 7,
    "tokenizer": "x",
    "unk_token_id": 0,
    "use_bfloat16": True,
}
# What is read, and changes nothing that is computed here.
WITHOUT_EFFECT: dict[str, Any] = {
    "_attn_implementation": "sdpa",
    "architectures": None,
    "gradient_checkpointing": True,
    "language": "english",
    "model_name": "x",
    "name": "Bert",
    "num_labels": 3,
}
HARMFUL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 9,
    "is_causal": False,
    "is_encoder_decoder": True,
    "per_layer_config": {"0": {"head_dim": 8}},
}


def test_the_table_is_that_of_the_installed_transformers() -> None:
    """`python -m bench.transformers_fields --write` updates it."""
    made = tables.as_text(tables.table())
    assert made == FILE.read_text(encoding="utf-8"), "python -m bench.transformers_fields --write"


@pytest.mark.parametrize("folder", ["llama", "nemotron_h", "gemma4", "xlm_roberta", "gpt2"])
def test_the_table_has_every_field_that_code_reads_by_name(folder: str) -> None:
    """Python's own parser finds attributes of configs, and the names passed to `getattr`."""
    root = Path(transformers.__file__).parent
    [path] = (root / "models" / folder).glob("modeling_*.py")
    kinds = {"gemma4": "gemma4_text", "xlm_roberta": "xlm-roberta"}
    fields = set(_read_by_name(ast.parse(path.read_text(encoding="utf-8"))))
    assert len(fields) > 10
    assert [one for one in fields if not may_read(kinds.get(folder, folder), one)] == []


def _read_by_name(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            config, name, *_ = node.args
            if _is_config(config) and isinstance(name, ast.Constant):
                yield str(name.value)


def _is_config(node: ast.expr) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "config"


@pytest.mark.parametrize(
    "name",
    ["LlamaConfig", "Gemma3TextConfig", "GptOssConfig", "FalconConfig", "NemotronHConfig"],
)
def test_the_table_has_every_field_that_a_network_reads_as_it_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All reads are recorded, from construction to logits, and in a KV cache."""
    read = set()
    getter = PreTrainedConfig.__getattribute__

    def recorded(self: PreTrainedConfig, key: str) -> Any:
        read.add(key)
        return getter(self, key)

    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", recorded)
    network: Any = build(name)
    with torch.inference_mode():
        network(torch.arange(2, 40)[None], use_cache=True)
    monkeypatch.undo()
    kind = network.config.model_type
    fields = {key for key in read if not key.startswith("__")} - {"auto_map"}  # for custom code
    assert len(fields) > 30
    assert [key for key in fields if not may_read(kind, key)] == []


@pytest.mark.parametrize("name", DECODER_CONFIGS)
@torch.inference_mode()
def test_a_network_is_the_same_whatever_other_types_fields_say(name: str) -> None:
    """All fields of other types' config classes that this one's code does not read are ignored."""
    plain: Any = build(name)
    kind, token_ids = plain.config.model_type, torch.arange(2, 40)[None]
    more = {field: 3 for field in fields_of_others() if not may_read(kind, field)}
    assert len(more) > 100
    config = type(plain.config)(**(more | config_fields(name, DECODER_CONFIGS[name])))
    network = type(plain)._from_config(config, attn_implementation="eager").eval()
    network.load_state_dict(plain.state_dict())
    expected = plain(token_ids, use_cache=True).logits
    assert torch.equal(network(token_ids, use_cache=True).logits, expected)


@cache
def fields_of_others() -> frozenset[str]:
    """Return the fields of all config classes that the tests build."""
    kinds = (getattr(transformers, name) for name in DECODER_CONFIGS)
    return frozenset(field.name for kind in kinds for field in fields(kind))


@pytest.mark.parametrize("name", DECODERS)
def test_fields_of_a_published_decoder_are_ignored(name: str) -> None:
    """The config is understood as it is published, and without them is the same."""
    raw, fields = DECODERS[name]
    architecture = architecture_of(parse_hf_config(name, raw))
    assert set(fields) <= set(architecture.ignored_fields)
    ignored = architecture.ignored_fields
    less = {key: value for key, value in raw.items() if key not in ignored}
    assert architecture_of(parse_hf_config(name, less)) == architecture


@pytest.mark.parametrize("name", ENCODERS)
def test_fields_of_a_published_encoder_are_ignored(name: str) -> None:
    """Fields of models for vectors and scores are ignored, too."""
    raw, fields = ENCODERS[name]
    architecture = encoders.architecture_of(name, raw)
    assert set(fields) - {"position_embedding_type"} == set(architecture.ignored_fields)
    less = {key: value for key, value in raw.items() if key not in architecture.ignored_fields}
    assert encoders.architecture_of(name, less) == architecture


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_under_a_known_type_is_not_taken_for_a_model(name: str) -> None:
    """Its class is none of transformers', or it has fields that only drafts have."""
    with pytest.raises(UnsupportedConfig):
        architecture_of(parse_hf_config(name, DRAFTS[name]))


def test_every_class_of_an_own_type_is_known_by_its_name() -> None:
    """The classes are those of transformers' own tables, except decision heads."""
    tasks = [names for key, names in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES")]
    unknown = set()
    for families in (FAMILIES, encoders.FAMILIES):
        own = [family.class_name for family in families.values()]
        named = {task.get(kind) for task in tasks for kind in families}
        unknown |= {one for one in named if isinstance(one, str) and not is_class_of(one, own)}
    assert {one for one in unknown if not one.endswith(("Config", "ForDecision"))} == set()
    assert is_class_of("LLaMAForCausalLM", ["LlamaForCausalLM"])
    assert is_class_of("Ernie4_5_ForCausalLM", ["Ernie4_5ForCausalLM"])


def with_fields(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose text has more fields; `architectures` belong to the whole."""
    whole = {key: fields[key] for key in fields.keys() & {"architectures"}}
    text = {key: value for key, value in fields.items() if key not in whole}
    if "text_config" in raw:
        return raw | whole | {"text_config": raw["text_config"] | text}
    return raw | fields


def config_of(kind: str) -> dict[str, Any]:
    """Return a config of a type or a class."""
    if kind in OF_TYPES:
        return OF_TYPES[kind]
    if kind not in SEEING:
        return raw_config(kind)
    raw: dict[str, Any] = json.loads(
        transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False)
    )
    return raw


@pytest.mark.parametrize("kind", [*OF_TYPES, *OTHER_TYPES, *SEEING])
def test_fields_that_are_never_read_leave_every_type_its_own_network(kind: str) -> None:
    """A field that is read and changes the result leaves it to transformers."""
    raw = config_of(kind)
    expected = architecture_of(parse_hf_config(kind, raw))
    got = architecture_of(parse_hf_config(kind, with_fields(raw, HARMLESS | WITHOUT_EFFECT)))
    assert got == expected
    assert set(got.ignored_fields) - set(expected.ignored_fields) == set(HARMLESS)
    for key, value in HARMFUL.items():
        if key == "per_layer_config" and kind.startswith("gemma4"):
            continue  # which has one
        with pytest.raises(UnsupportedConfig, match=key):
            architecture_of(parse_hf_config(kind, with_fields(raw, {key: value})))


def test_every_type_of_decoder_is_tried() -> None:
    """A new family comes with a config."""
    made = {raw_config(name)["model_type"] for name in OTHER_TYPES}
    assert not FAMILIES.keys() - OF_TYPES - made - {*SEEING}


@pytest.mark.parametrize("kind", encoders.FAMILIES)
def test_so_it_does_every_type_of_encoder(kind: str) -> None:
    """A config with only its type has its class's defaults."""
    raw = {"model_type": kind}
    expected = encoders.architecture_of(kind, raw)
    got = encoders.architecture_of(kind, raw | HARMLESS | WITHOUT_EFFECT)
    assert (got, set(got.ignored_fields)) == (expected, set(HARMLESS))
    harmful = {key: value for key, value in HARMFUL.items() if key != "is_causal"}
    for key, value in (harmful | {"is_causal": True, "is_decoder": True}).items():
        if kind in ("distilbert", "modernbert", "mpnet", "nomic_bert") and key == "is_decoder":
            continue  # which their classes do not read
        with pytest.raises(UnsupportedConfig, match=key):
            encoders.architecture_of(kind, raw | {key: value})


@pytest.mark.parametrize("name", ["Qwen2Config", "FalconConfig", "NemotronHConfig"])
def test_a_model_with_ignored_fields_is_proved_against_transformers(
    tmp_path: Path, name: str
) -> None:
    """Its class has the fields, and gives the same logits; a note names them."""
    build(name).save_pretrained(tmp_path)  # type: ignore[operator]
    path = tmp_path / "config.json"
    more = HARMLESS | WITHOUT_EFFECT | {"use_qk_norm": True, "clip_qkv": 0.1}
    raw = {key: value for key, value in json.loads(path.read_bytes()).items() if key not in more}
    rope = raw.get("rope_parameters")
    if rope is not None:
        more["rope_parameters"] = rope | {"finetuned": True, "attn_factor": None}
    path.write_text(json.dumps(raw | more))
    model = load_model(EngineConfig(str(tmp_path), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    [note] = model.notes
    assert "clip_qkv" in note
    assert ("rope_parameters.finetuned" in note) == (rope is not None)
    assert note.endswith("never reads")


def test_an_encoder_with_ignored_fields_is_proved_too(tmp_path: Path) -> None:
    """Every XLM-R file has such fields."""
    save(tmp_path, "XLMRoberta", output_past=True, pooler_type="x")
    [note] = loaded(tmp_path).notes
    assert note.startswith("config.json: ignored output_past and pooler_type, which transformers'")
