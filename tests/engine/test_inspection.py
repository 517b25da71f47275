"""Inspection of a model: what it says before a load is what the load comes to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.engine.families import COMMON, FAMILIES, build
from tidemill import demo
from tidemill.engine.config import EngineConfig
from tidemill.engine.inspection import NO_TEMPLATE, ModelReport, inspect_model
from tidemill.engine.kernels.communicator import SINGLE_RANK
from tidemill.engine.model import native, transformers_model
from tidemill.engine.model.checkpoint import find_checkpoint
from tidemill.engine.model.families import architecture_of
from tidemill.engine.model.hf_config import read_hf_config
from tidemill.engine.model.model_plan import ModelPlan
from tidemill.engine.model.planning import plan_model
from tidemill.engine.model.weights import read_weights

CPU = torch.device("cpu")


def settings(folder: Path, **others: Any) -> EngineConfig:
    """Return settings by which a model is read on the CPU."""
    return EngineConfig(str(folder), device="cpu", dtype="float32", **others)


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


@pytest.mark.parametrize("name", FAMILIES)
def test_an_own_models_memory_is_what_it_takes_once_loaded(name: str, tmp_path: Path) -> None:
    """Its weights to the byte, and the pages of its keys and values."""
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
    assert plan.memory.kv_bytes_per_token * loaded.backend.page_size == loaded.page_bytes
    assert plan.memory.kv_cache_tokens > 0


def test_a_shared_models_memory_is_that_of_one_rank(tmp_path: Path) -> None:
    """Keys and values halve, and so does each matrix; only norms are everywhere."""
    build("LlamaConfig").save_pretrained(tmp_path)
    whole, half = planned(tmp_path).memory, planned(tmp_path, tensor_parallel_size=2).memory
    assert whole is not None
    assert half is not None
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert whole.weight_bytes * 0.5 < half.weight_bytes < whole.weight_bytes * 0.55


def test_so_is_the_memory_of_what_transformers_runs(tmp_path: Path) -> None:
    """Its layers are counted without a number of theirs, and it says why it is not our own."""
    config = transformers.Olmo2Config(**COMMON, unknown_field=True)
    network = transformers.Olmo2ForCausalLM(config)
    network.save_pretrained(tmp_path)
    plan = planned(tmp_path)
    assert (plan.runs, plan.class_name) == ("transformers", "Olmo2ForCausalLM")
    assert plan.why is not None
    assert not plan.takes_adapters
    assert plan.memory is not None
    assert plan.memory.weight_bytes == sum(one.numel() * 4 for one in network.parameters())
    loaded = transformers_model.load(settings(tmp_path), read_hf_config(str(tmp_path)), CPU)
    assert plan.memory.kv_bytes_per_token * loaded.backend.page_size == loaded.page_bytes


def test_a_model_that_fits_no_memory_is_no_refused_one(tmp_path: Path) -> None:
    """It may fit elsewhere."""
    report = report_of(demo_copy(tmp_path), kv_cache_memory=1)
    assert not report.is_refused
    assert report.plan is not None
    assert report.plan.memory is not None
    assert report.plan.memory.kv_cache_tokens == 0


def test_a_whole_model_has_its_parsers_and_misses_nothing() -> None:
    """The demo model calls tools as its template shows."""
    report = report_of(demo.MODEL_PATH)
    assert (report.runs, report.missing, report.faults) == ("native", (), ())
    assert (report.tool_call_parser, report.reasoning_parser) == ("hermes", None)
    assert report.plan is not None
    assert report.plan.tensor_parallel_sizes == (2,)
    assert "awq" in report.quantization_methods
    template = "{{ messages[0].content }}{{ '[THINK][TOOL_CALLS]' }}"
    inline = inspect_model(settings(demo.MODEL_PATH), chat_template=template)
    assert (inline.tool_call_parser, inline.reasoning_parser) == ("mistral", "mistral")


@pytest.mark.parametrize(
    ("without", "missing", "words"),
    [
        ("config.json", "config.json", "there is no config.json"),
        ("model.safetensors", "model.safetensors or model.safetensors.index.json", "holds neither"),
        ("tokenizer.json", "a tokenizer", "no tokenizer"),
    ],
)
def test_what_a_load_needs_is_missed(
    without: str, missing: str, words: str, tmp_path: Path
) -> None:
    """By its name, and the model would be refused."""
    report = report_of(demo_copy(tmp_path, without))
    assert report.runs == "refused"
    assert missing in report.missing
    assert words in str(report.why)


def test_without_a_template_only_conversations_are_missed(tmp_path: Path) -> None:
    """A base model is no broken one."""
    copy = demo_copy(tmp_path)
    path = copy / "tokenizer_config.json"
    said = json.loads(path.read_bytes())
    said.pop("chat_template", None)
    path.write_text(json.dumps(said))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    report = report_of(copy)
    assert (report.is_refused, report.missing) == (False, (NO_TEMPLATE,))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "no_such_type"}, "knows its model type 'no_such_type'"),
        ({"model_type": "gptj"}, "model type 'gptj' cannot be served: its class computes"),
        ({"hidden_size": 96}, "have other shapes"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
)
def test_a_refusal_has_its_reason(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    """That of the load, which reads no weights for it."""
    report = report_of(demo_copy(tmp_path, **config))
    assert report.runs == "refused"
    assert words in str(report.why)


def test_a_torn_config_is_told_by_its_name(tmp_path: Path) -> None:
    """And what to do."""
    (tmp_path / "config.json").write_text('{"model_type": ')
    report = report_of(tmp_path)
    assert "config.json is no whole JSON" in str(report.why)
    assert report.missing == ()
