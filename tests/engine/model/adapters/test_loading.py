"""Matching adapters have their ranks and scales; others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.adapters import ALL, halves, write_adapter
from tests.engine.families import build
from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.adapters import patterns
from tidemill.engine.model.adapters.loading import Adapter, read_adapters
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.loading import load_model

Modules = dict[str, tuple[Tensor, Tensor]]
TENSORS = "adapter_model.safetensors"


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Qwen3."""
    folder = tmp_path_factory.mktemp("model")
    build("Qwen3Config").save_pretrained(folder)  # type: ignore[operator]
    return folder


def modules_of(*targets: str, rank: int = 4) -> Modules:
    """Return the halves of an adapter of the tiny Qwen3."""
    return halves(build("Qwen3Config"), targets or ALL, rank=rank)


def read(model: Path, folder: Path, **settings: Any) -> Adapter:
    """Read one adapter of a model."""
    config = EngineConfig(str(model), lora_modules=(LoraModule("own", str(folder)),), **settings)
    hf_config = read_hf_config(str(model))
    (adapter,) = read_adapters(config, hf_config, architecture_of(hf_config))
    return adapter


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Write an adapter's tensors again, changed."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    return folder


def test_ranks_and_scales_are_those_of_each_module(model: Path, tmp_path: Path) -> None:
    """A pattern is the end of a name; what none of them is has the adapter's own."""
    modules = modules_of("q_proj", "down_proj", rank=4) | modules_of("v_proj", rank=2)
    folder = write_adapter(
        tmp_path,
        modules,
        r=4,
        lora_alpha=8,
        rank_pattern={"v_proj": 2},
        alpha_pattern={r"layers\.1\..*\.q_proj": 3, "mlp.down_proj": 1},
    )
    found = read(model, folder).modules
    scales = {name.removeprefix("model.layers."): module.scale for name, module in found.items()}
    assert scales["0.self_attn.q_proj"] == 2
    assert scales["0.self_attn.v_proj"] == 4
    assert scales["1.self_attn.q_proj"] == 0.75
    assert scales["3.mlp.down_proj"] == 0.25
    assert {len(module.down) for module in found.values()} == {2, 4}


def test_a_scale_may_go_by_the_root_of_the_rank(model: Path, tmp_path: Path) -> None:
    """rsLoRA uses this scale."""
    folder = write_adapter(tmp_path, modules_of("q_proj"), lora_alpha=6, use_rslora=True)
    assert {module.scale for module in read(model, folder).modules.values()} == {3}


@pytest.mark.parametrize(
    ("targets", "fields"),
    [
        (ALL, {"target_modules": "all-linear"}),
        (("q_proj", "k_proj"), {"target_modules": r".*self_attn\.[qk]_proj"}),
        (("q_proj", "v_proj"), {"target_modules": ["self_attn.q_proj", "v_proj"]}),
        (ALL[:4], {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"}),
        (("q_proj",), {"target_modules": list(ALL), "exclude_modules": list(ALL[1:])}),
    ],
)
def test_modules_are_meant_by_ends_of_names_or_by_a_pattern(
    model: Path, tmp_path: Path, targets: tuple[str, ...], fields: dict[str, Any]
) -> None:
    """PEFT reads each form in the same way."""
    modules = modules_of(*targets)
    assert read(model, write_adapter(tmp_path, modules, **fields)).modules.keys() == modules.keys()


@pytest.mark.parametrize(
    ("layers", "fields"),
    [
        ({1}, {"layers_to_transform": 1}),
        ({0, 3}, {"layers_to_transform": [0, 3], "layers_pattern": "layers"}),
        ({2}, {"layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]}),
    ],
)
def test_modules_may_be_those_of_some_layers(
    model: Path, tmp_path: Path, layers: set[int], fields: dict[str, Any]
) -> None:
    """Others are adapted nowhere."""
    modules = {
        name: pair
        for name, pair in modules_of("q_proj").items()
        if int(name.split(".")[2]) in layers
    }
    assert read(model, write_adapter(tmp_path, modules, **fields)).modules.keys() == modules.keys()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "has unsupported peft_type 'IA3': only LoRA is supported"),
        ({"use_dora": True}, "has unsupported use_dora: DoRA also changes the magnitude"),
        ({"bias": "lora_only"}, "has unsupported bias 'lora_only': biases are not adapted"),
        ({"lora_bias": True}, "has unsupported lora_bias: biases are not adapted"),
        (
            {"modules_to_save": ["lm_head"]},
            "has unsupported modules_to_save: it replaces whole modules",
        ),
        (
            {"trainable_token_indices": [5]},
            "has unsupported trainable_token_indices: it changes embeddings",
        ),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "has unsupported target_parameters"),
        ({"layer_replication": [[0, 4]]}, "has unsupported layer_replication"),
        (
            {"init_lora_weights": "pissa"},
            "has unsupported init_lora_weights 'pissa': its initialisation changes",
        ),
        ({"task_type": "SEQ_CLS"}, "only adapters for text generation"),
        ({"alora_invocation_tokens": [1]}, "activation by tokens in the prompt"),
        ({"brand_new_trick": 7}, "has unsupported brand_new_trick"),
        ({"r": 0}, "has unsupported r 0"),
        ({"r": 1024}, "has unsupported r 1024; ranks are 1 to 512"),
        ({"r": None}, "does not set r"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern of 'q_proj' '2'"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern '\(', which is not a valid pattern"),
        ({"alpha_pattern": [1]}, r"alpha_pattern \[1\]"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"lora_alpha": "8"}, "has unsupported lora_alpha '8'"),
        ({"lora_alpha": float("inf")}, "has unsupported lora_alpha inf"),
        ({"target_modules": 7}, "has unsupported target_modules 7"),
        ({"target_modules": "["}, r"target_modules '\[', which is not a valid pattern"),
        ({"layers_to_transform": "1"}, "has unsupported layers_to_transform '1'"),
        ({"target_modules": ["q_proj", "v_proj"]}, "lacks the tensors of model.layers.0.self_a"),
        ({"target_modules": ["k_proj"]}, "lacks the tensors"),
        ({"layers_to_transform": [0]}, "contains tensors of model.layers.1.self_attn.q_proj"),
        ({"r": 8}, r"lora_A.weight has shape \[4, 64\] instead of \[8, 64\]"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(
    model: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    """The error contains the field, the adapter's name and its path."""
    folder = write_adapter(tmp_path, modules_of("q_proj"), **fields)
    with pytest.raises(ModelRefused, match=words) as refused:
        read(model, folder)
    assert str(refused.value).startswith(f"adapter own ({folder}): ")


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{FIRST}.lora_B.weight"), "lacks model.layers.0.self_attn.q_proj.lora_B"),
        (lambda t: t.clear(), "contains no tensors"),
        (
            lambda t: t.update({f"{FIRST}.lora_magnitude_vector": torch.ones(64)}),
            "which belongs to DoRA",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.embed_tokens.lora_embedding_A": t[
                        f"{FIRST}.lora_A.weight"
                    ].clone()
                }
            ),
            "an adapter of embeddings",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}),
            "not part of a LoRA adapter",
        ),
        (
            lambda t: t.update({"q_proj.lora_A.weight": torch.ones(2, 2)}),
            "not part of a LoRA adapter",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}),
            "adapts lm_head: only adapters of attention",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(
                        4, 64
                    )
                }
            ),
            r"adapts model\.layers\.9\.self_attn\.q_proj, which Qwen3ForCausalLM .* another model",
        ),
        (
            lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(4, 32)}),
            r"has shape \[4, 32\] instead of \[4, 64\]: it was trained for another model",
        ),
        (
            lambda t: t.update({f"{FIRST}.lora_A.weight": torch.full((4, 64), torch.nan)}),
            "lora_A.weight contains NaN",
        ),
        (
            lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}),
            "is stored as I8",
        ),
        (
            lambda t: t.update({f"{FIRST}.lora_A.weight": torch.full((4, 64), 1e6)}),
            r"q_proj adds numbers up to .* but trained adapters add less than 10,000",
        ),
    ],
    ids=range(12),
)
def test_tensors_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    """Missing, left over, of another shape or kind, or no numbers."""
    folder = changed(write_adapter(tmp_path, modules_of("q_proj")), change)
    with pytest.raises(ModelRefused, match=words):
        read(model, folder)


def test_a_folder_without_an_adapter_is_refused_with_the_missing_file(
    model: Path, tmp_path: Path
) -> None:
    """A pickle is not read."""
    with pytest.raises(ModelRefused, match=r"has no adapter_config\.json"):
        read(model, tmp_path)
    folder = write_adapter(tmp_path, modules_of("q_proj"))
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(ModelRefused, match="a pickle may run any code"):
        read(model, folder)
    (folder / TENSORS).write_bytes(b"torn")
    with pytest.raises(ModelRefused, match="is truncated or not a safetensors file"):
        read(model, folder)
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(ModelRefused, match="is not valid JSON"):
        read(model, folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelRefused, match="is not a JSON object"):
        read(model, folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "(.|.)*[!?]"},
        {"exclude_modules": "(.|.)*[!?]"},
        {"rank_pattern": {"(.|.)*[!?]": 4}},
        {"alpha_pattern": {"(.|.)*[!?]": 4}},
        {"layers_to_transform": [0], "layers_pattern": "(.|.)*[!?]"},
        {"rank_pattern": {f"a{index}": 4 for index in range(10_000)}},
    ],
    ids=["targets", "excluded", "ranks", "alphas", "layers", "many"],
)
def test_patterns_that_take_for_ever_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Whichever field they are in, and however little each of many takes."""
    monkeypatch.setattr(patterns, "BUDGET_SECONDS", 0.05)
    folder = write_adapter(tmp_path, modules_of("q_proj"), **fields)
    with pytest.raises(ModelRefused, match=r"adapter own .* which takes too long to match"):
        read(model, folder)


def test_the_pattern_that_spun_is_matched_in_no_time(model: Path, tmp_path: Path) -> None:
    """It matches no module, as no name ends with an a."""
    folder = write_adapter(tmp_path, modules_of("q_proj"), target_modules="(.*)*(a+)+$")
    with pytest.raises(ModelRefused, match="does not target"):
        read(model, folder)


def test_a_pattern_may_look_ahead(model: Path, tmp_path: Path) -> None:
    """Tools that train models of text and images write such ones."""
    modules = modules_of("q_proj", "v_proj")
    fields = r"^(?!.*(visual|aligner)).*\.(q_proj|v_proj)(?=$)"
    folder = write_adapter(tmp_path, modules, target_modules=fields)
    assert read(model, folder).modules.keys() == modules.keys()


@pytest.mark.parametrize("file", [TENSORS, "adapter_config.json"])
def test_links_that_lead_outside_are_not_followed(model: Path, tmp_path: Path, file: str) -> None:
    """Links within the folder are followed."""
    folder = write_adapter(tmp_path / "own", modules_of("q_proj"))
    (folder / file).rename(folder / "other")
    (folder / file).symlink_to("other")
    assert read(model, folder).name == "own"
    (folder / file).unlink()
    (folder / "other").rename(tmp_path / "other")
    (folder / file).symlink_to(tmp_path / "other")
    with pytest.raises(ModelRefused, match=rf"{file} links to .*, outside the adapter's folder"):
        read(model, folder)


def test_a_rank_may_be_bounded(model: Path, tmp_path: Path) -> None:
    """The error contains the flag."""
    folder = write_adapter(tmp_path, modules_of("q_proj"))
    assert read(model, folder, max_lora_rank=4).name == "own"
    with pytest.raises(ModelRefused, match="its rank is 4, above --max-lora-rank 3"):
        read(model, folder, max_lora_rank=3)


def test_experts_are_not_adapted(tmp_path: Path) -> None:
    """Attention in the same layers is adapted."""
    network = build("Qwen3MoeConfig")
    network.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    folder = write_adapter(tmp_path / "own", halves(network, ALL[:4]))
    assert len(read(tmp_path / "model", folder).modules) == 16

    def adapt_experts(tensors: dict[str, Tensor]) -> None:
        name = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"
        tensors[name] = torch.ones(4, 64)

    changed(folder, adapt_experts)
    with pytest.raises(ModelRefused, match=r"mlp\.experts\.0\.up_proj: only adapters of attention"):
        read(tmp_path / "model", folder)


def test_a_model_that_transformers_runs_has_no_adapters(model: Path, tmp_path: Path) -> None:
    """The refusal says why it runs it."""
    folder = write_adapter(tmp_path / "own", modules_of("q_proj"))
    fields = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"attention_chunk_size": 7}))
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    config = EngineConfig(str(tmp_path), lora_modules=(LoraModule("own", str(folder)),))
    with pytest.raises(
        ModelRefused, match=r"transformers runs this model \(.*attention_chunk_size.*adapters"
    ):
        load_model(config)
