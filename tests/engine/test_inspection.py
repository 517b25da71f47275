"""Inspection of a model: its report before a load matches the load."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from torch import Tensor

from tests.engine import vision_models
from tests.engine.families import COMMON, build
from tests.engine.model.weights.quantised.checkpoints import quantise
from tidemill import demo
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.inspection import NO_TEMPLATE, ModelReport, inspect_model
from tidemill.engine.kernels import backends
from tidemill.engine.kernels.communicator import SINGLE_RANK
from tidemill.engine.kernels.cpu import int8
from tidemill.engine.model import loading, native, planning
from tidemill.engine.model.config.hf_config import parse_hf_config, read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf import model as transformers_model
from tidemill.engine.model.model_plan import ModelPlan
from tidemill.engine.model.planning import plan_model
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.model.weights.quantised.quantization_config import QuantizationConfig
from tidemill.engine.model.weights.weights import read_weights

CPU = torch.device("cpu")
# One model per layout of weights: merged, biased, tied, positional, with experts or windows.
LAYOUTS = (
    *("LlamaConfig", "Phi3Config", "Gemma3TextConfig", "GPT2Config", "GptOssConfig"),
    *("Glm4MoeConfig", "MiMoV2FlashConfig", "BambaConfig", "Mamba2Config"),
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def settings(folder: Path, **others: Any) -> EngineConfig:
    """Return settings for reading a model on the CPU."""
    return EngineConfig(str(folder), device="cpu", **{"dtype": "float32", **others})


def planned(folder: Path, **others: Any) -> ModelPlan:
    """Return the plan of a model."""
    return plan_model(settings(folder, **others))


def demo_copy(folder: Path, without: str = "", **config: Any) -> Path:
    """Return a copy of the demo model without one file, and with other fields in its config."""
    copy = folder / "model"
    shutil.copytree(demo.MODEL_PATH, copy)
    if without:
        (copy / without).unlink()
    path = copy / "config.json"
    if config:
        path.write_text(json.dumps(json.loads(path.read_bytes()) | config))
    return copy


def report_of(folder: Path, **others: Any) -> ModelReport:
    """Return the report on a folder."""
    return inspect_model(settings(folder, **others))


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_memory_of_our_models_equals_loaded_memory(name: str, tmp_path: Path) -> None:
    """The weights match to the byte, and so do the pages of keys and values."""
    build(name).save_pretrained(tmp_path)
    hf_config, checkpoint = read_hf_config(str(tmp_path)), find_checkpoint(str(tmp_path))
    architecture = architecture_of(hf_config)
    plan = planned(tmp_path)
    assert (plan.runs, plan.class_name) == ("native", architecture.class_name)
    assert plan.memory is not None
    weights = read_weights(checkpoint, architecture, torch.float32, CPU)
    stored = sum(weight.nbytes for weight in weights.values() if isinstance(weight, Tensor))
    assert plan.memory.weight_bytes == stored
    parts = (checkpoint, hf_config, architecture, torch.float32, CPU)
    loaded = native.load_shard(*parts, communicator=SINGLE_RANK)
    assert plan.memory.kv_bytes_per_token == loaded.token_bytes
    assert plan.memory.kv_cache_tokens > 0
    assert plan.memory.state_bytes_per_sequence == loaded.row_bytes
    assert bool(plan.memory.state_rows) == bool(loaded.row_bytes)


def test_a_config_alone_gives_the_size_of_its_weights(tmp_path: Path) -> None:
    """Qwen3-8B's published config gives 8,190,735,360 weights."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_model(EngineConfig(str(tmp_path), device="cpu", dtype="bfloat16"))
    assert report.runs == "refused"
    assert "has neither" in str(report.why)
    assert report.plan is not None
    assert report.plan.memory is not None
    assert report.plan.memory.weight_bytes == 2 * 8_190_735_360
    assert report.plan.memory.kv_bytes_per_token == 147_456
    assert report.plan.tensor_parallel_sizes == (2, 4, 8)


def test_memory_of_a_sharded_model_is_per_rank(tmp_path: Path) -> None:
    """Keys, values and each matrix halve; only norms are on every rank."""
    build("LlamaConfig").save_pretrained(tmp_path)
    whole, half = planned(tmp_path).memory, planned(tmp_path, tensor_parallel_size=2).memory
    assert whole is not None
    assert half is not None
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert whole.weight_bytes * 0.5 < half.weight_bytes < whole.weight_bytes * 0.55


def test_a_vision_model_includes_the_memory_of_its_tower(tmp_path: Path) -> None:
    """The memory of its text model is added."""
    network = vision_models.build("gemma3")
    vision_models.save(network, tmp_path)
    plan = planned(tmp_path)
    assert plan.takes_images
    assert plan.memory is not None
    assert plan.memory.weight_bytes == sum(one.numel() * 4 for one in network.parameters())
    (tmp_path / "preprocessor_config.json").unlink()
    blind = planned(tmp_path)
    assert not blind.takes_images
    assert "without images" in blind.notes[0]


def test_a_tower_is_counted_once_if_quantized_weights_stay_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text takes the size of its files; a rank has the whole tower and a part of the text."""
    network = vision_models.build("mistral3").to(torch.bfloat16)
    vision_models.save(network, tmp_path)
    quantise("fp8, per tensor", tmp_path, "vision_tower", "multi_modal_projector")
    monkeypatch.setattr(planning, "has_quantised_linear", lambda *_: True)
    stored = (tmp_path / "model.safetensors").stat().st_size
    whole, half = (
        planned(tmp_path, dtype="bfloat16", tensor_parallel_size=size) for size in (1, 2)
    )
    assert whole.takes_images
    assert whole.memory is not None
    assert half.memory is not None
    tower = 2 * sum(
        own.numel()
        for part in ("vision_tower", "multi_modal_projector")
        for own in getattr(network.model, part).parameters()
    )
    assert whole.memory.weight_bytes == stored
    assert half.memory.weight_bytes == (stored - tower) // 2 + tower


def test_weights_that_are_still_on_the_hub_are_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only small files are fetched for a plan."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    shutil.copytree(demo.MODEL_PATH, snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = EngineConfig("org/name", device="cpu", dtype="float32", kv_cache_memory=2**24)
    here = inspect_model(config)
    (snapshot / "model.safetensors").unlink()
    absent = inspect_model(config)
    assert here.plan is not None
    assert absent.plan is not None
    assert (here.runs, here.plan.notes) == ("native", ())
    assert absent.runs == "native"
    assert "a load downloads them" in absent.plan.notes[0]
    assert absent.plan.memory == here.plan.memory


@pytest.mark.skipif(not int8.supports(torch.bfloat16), reason="no AVX512-VNNI here")
def test_quantized_weights_take_the_size_of_the_served_type(tmp_path: Path) -> None:
    """They are quantized to int8 on this CPU; embedding, norms and head do not change."""
    build("LlamaConfig").save_pretrained(tmp_path)
    plain = EngineConfig(str(tmp_path), device="cpu", dtype="bfloat16")
    whole = plan_model(plain).memory
    quantized = plan_model(replace(plain, quantization="int8")).memory
    assert whole is not None
    assert quantized is not None
    assert whole.weight_bytes * 0.5 < quantized.weight_bytes < whole.weight_bytes * 0.8


def test_dequantized_weights_are_noted_as_at_load(tmp_path: Path) -> None:
    """CPUs have no kernels for 4-bit weights."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    plan = planned(demo_copy(tmp_path, "model.safetensors", quantization_config=awq))
    assert plan.notes == loading.notes_on_quantization(
        QuantizationConfig("awq"), torch.float32, CPU
    )
    assert "they take as much memory as unquantised ones" in plan.notes[0]


def test_a_missing_gpu_has_a_plan_without_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan assumes kernels of a supported GPU, which use quantized weights directly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    uncached = backends._capability.__wrapped__
    monkeypatch.setattr(backends, "_capability", uncached)
    build("LlamaConfig").save_pretrained(tmp_path)
    here = EngineConfig(str(tmp_path), device="cpu", dtype="bfloat16")
    there = replace(here, device="cuda")
    on_cpu, on_gpu = plan_model(here).memory, plan_model(there).memory
    assert on_cpu is not None
    assert on_gpu == replace(on_cpu, kv_cache_tokens=None, state_rows=None)
    plan = plan_model(replace(there, quantization="fp8", kv_cache_dtype="fp8"))
    assert (plan.device.type, plan.notes) == ("cuda", ())
    assert plan.memory is not None
    assert plan.memory.weight_bytes < 0.8 * on_cpu.weight_bytes
    assert plan.memory.kv_bytes_per_token * 2 == on_cpu.kv_bytes_per_token
    with pytest.raises(ModelRefused, match="int8 is for CPUs"):
        plan_model(replace(there, quantization="int8"))


def test_nothing_is_drafted_for_a_model_with_recurrent_layers(tmp_path: Path) -> None:
    """The report names the reason without a tokenizer, too."""
    build("Mamba2Config").save_pretrained(tmp_path)
    assert report_of(tmp_path).why_no_drafts == "recurrent layers cannot forget a draft"


def test_the_memory_of_models_run_by_transformers_is_planned(tmp_path: Path) -> None:
    """Its layers are counted without their numbers, and the report says why it is not ours."""
    config = transformers.Olmo2Config(**COMMON, attention_chunk_size=16)
    network = transformers.Olmo2ForCausalLM(config)
    network.save_pretrained(tmp_path)
    plan = planned(tmp_path)
    assert (plan.runs, plan.class_name) == ("transformers", "Olmo2ForCausalLM")
    assert plan.why is not None
    assert not plan.takes_adapters
    assert plan.memory is not None
    assert plan.memory.weight_bytes == sum(one.numel() * 4 for one in network.parameters())
    loaded = transformers_model.load(settings(tmp_path), read_hf_config(str(tmp_path)), CPU)
    assert plan.memory.kv_bytes_per_token == loaded.token_bytes


def test_media_that_transformers_text_class_cannot_read_are_noted(tmp_path: Path) -> None:
    """Gemma 4 E2B reads images and recordings, its larger versions images only."""
    text = COMMON | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 8}
    parts = {"text_config": text, "vision_config": {"patch_size": 16}}
    raw = {"model_type": "gemma4", **parts, "audio_config": {"model_type": "gemma4_audio"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = planned(tmp_path)
    assert plan.runs == "transformers"
    assert "this model is served without images and recordings: tran" in plan.notes[-1]
    (note,) = loading.notes_on_media(parse_hf_config("", raw | {"audio_config": None}))
    assert "without images: tran" in note


def test_a_model_that_is_too_large_is_not_refused(tmp_path: Path) -> None:
    """It may fit on another machine."""
    report = report_of(demo_copy(tmp_path), kv_cache_memory=1)
    assert not report.is_refused
    assert report.plan is not None
    assert report.plan.memory is not None
    assert report.plan.memory.kv_cache_tokens == 0


def test_a_complete_model_has_its_parsers_and_no_missing_files() -> None:
    """The demo model calls tools in the format of its template."""
    report = report_of(demo.MODEL_PATH)
    assert (report.runs, report.missing, report.faults) == ("native", (), ())
    assert (report.tool_call_parser, report.reasoning_parser) == ("hermes", None)
    assert report.plan is not None
    assert report.plan.tensor_parallel_sizes == (2,)
    assert "awq" in report.quantization_methods
    template = "{{ messages[0].content }}{{ '[THINK][TOOL_CALLS]' }}"
    inline = inspect_model(settings(demo.MODEL_PATH), chat_template=template)
    assert (inline.tool_call_parser, inline.reasoning_parser) == ("mistral", "mistral")
    config = settings(demo.MODEL_PATH, tool_call_parser="dots")
    other = inspect_model(config, chat_template=template)
    assert (other.tool_call_parser, other.plan and other.plan.notes) == (
        "mistral",
        ("--tool-call-parser: vLLM's 'dots' is not supported: 'mistral' replaces it",),
    )


@pytest.mark.parametrize(
    ("without", "missing", "words"),
    [
        ("config.json", "config.json", "it has no config.json"),
        ("model.safetensors", "model.safetensors or model.safetensors.index.json", "has neither"),
        ("tokenizer.json", "a tokenizer", "no tokenizer"),
    ],
)
def test_files_that_a_load_needs_are_reported_missing(
    without: str, missing: str, words: str, tmp_path: Path
) -> None:
    """The report lists the file, and the model would be refused."""
    report = report_of(demo_copy(tmp_path, without))
    assert report.runs == "refused"
    assert missing in report.missing
    assert words in str(report.why)


def test_without_a_template_only_chat_is_unavailable(tmp_path: Path) -> None:
    """A base model is not a broken model."""
    copy = demo_copy(tmp_path)
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    report = report_of(copy)
    assert (report.is_refused, report.missing) == (False, (NO_TEMPLATE,))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "no_such_type"}, "knows its model type 'no_such_type'"),
        ({"model_type": "gptj"}, "model type 'gptj' is not supported: its class has"),
        ({"hidden_size": 96}, "the shapes of its weights do not match"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
)
def test_a_refused_model_has_a_reason(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    """It is the load's reason, which needs no weights."""
    report = report_of(demo_copy(tmp_path, **config))
    assert report.runs == "refused"
    assert words in str(report.why)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "new", "auto_map": {"AutoConfig": "its.Config"}}, "is never run"),
        ({"model_type": "wav2vec2"}, "speech model"),
        ({"model_type": "vit", "vocab_size": None}, "only models that read tokens"),
        ({"model_type": "bart"}, "is an encoder-decoder"),
    ],
)
def test_a_refused_embedding_model_has_a_reason(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Such a model would need transformers, because the engine lacks its class."""
    report = report_of(demo_copy(tmp_path, architectures=["NewModel"], **config))
    assert (report.gives, report.runs) == ("vectors or scores", "refused")
    assert words in str(report.why)


def test_a_truncated_config_is_named(tmp_path: Path) -> None:
    """The reason also says what to do."""
    (tmp_path / "config.json").write_text('{"model_type": ')
    report = report_of(tmp_path)
    assert "config.json is truncated or not valid JSON" in str(report.why)
    assert report.missing == ()
