"""Checkpoints of quantised weights: each form is read correctly, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.engine.families import build
from tests.engine.model.weights.quantised.checkpoints import FORMS, save, save_mxfp4
from tidemill import demo
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels import quantised
from tidemill.engine.kernels.communicator import Shard
from tidemill.engine.kernels.cpu import int8
from tidemill.engine.kernels.quantised import (
    Matrix,
    Quantised,
    as_tensor,
    quantise_fp8,
    quantise_rows_fp8,
)
from tidemill.engine.model import loading as model_loading
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf import dequantize
from tidemill.engine.model.hf.forward import TransformersNetwork
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.parity.drift import HELD_TEXT, MOST_TOKENS
from tidemill.engine.model.parity.logits import chunked_logits
from tidemill.engine.model.planning import plan_model
from tidemill.engine.model.tensor_parallel import check_tensor_parallel_size
from tidemill.engine.model.weights.checkpoint import WHOLE, find_checkpoint
from tidemill.engine.model.weights.quantised import formats, loading
from tidemill.engine.model.weights.quantised.quantization_config import read_quantization_config
from tidemill.engine.model.weights.weight_map import weights_of
from tidemill.engine.model.weights.weights import read_weights

CPU = torch.device("cpu")
IDS = torch.arange(3, 20)
# Forms with a group of each kind, and with two formats, of which all parts are dequantised.
DEQUANTISED = {"fp8, blocks", "gptq, sorted", "compressed W8A8", "modelopt mixed"}


def settings(folder: Path, **others: Any) -> EngineConfig:
    """Return settings that run a folder's model on the CPU."""
    return EngineConfig(str(folder), device="cpu", **{"dtype": "float32", **others})


@pytest.mark.parametrize(
    ("form", "keeps"),
    [
        *((form, True) for form in FORMS),
        *((form, False) for form in DEQUANTISED),
        *(pytest.param(form, False, marks=pytest.mark.long) for form in FORMS.keys() - DEQUANTISED),
    ],
)
def test_read_weights_are_the_dequantised_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, *, keeps: bool
) -> None:
    """Merged weights agree bit by bit in fp32; devices with such products keep them quantised.

    Single rows agree, too.
    """
    monkeypatch.setattr(loading, "has_quantised_linear", lambda *_: keeps)
    meant = save(form, tmp_path)
    hf_config = read_hf_config(str(tmp_path))
    checkpoint = find_checkpoint(str(tmp_path), read_quantization_config(hf_config, None))
    architecture = architecture_of(hf_config)
    weights = read_weights(checkpoint, architecture, torch.float32, CPU)
    for weight in weights_of(architecture):
        got = as_tensor(weights[weight.role])
        for part in weight.parts:
            assert torch.equal(part.place(got), meant[part.key].float()), part.key
    some = torch.tensor([5, 0, 5])
    for matrix in weights.values():
        if isinstance(matrix, Quantised):
            assert torch.equal(matrix.rows(some), matrix.dequantised()[some])
    # The last layer's values are not quantised, so neither are the merged ones.
    kept = {role for role, weight in weights.items() if isinstance(weight, Quantised)}
    made = {
        f"{i}.{role}"
        for i in range(4)
        for role in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    }
    assert kept == (made - {"3.qkv_proj"} if keeps else set())


@pytest.mark.parametrize(
    "form", ["fp8, blocks", "compressed fp8, per row", "awq", "gptq, sorted", "compressed nvfp4"]
)
def test_a_rank_reads_its_share_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Rows as they are, columns where no group is cut: what it has stands for what is its own."""
    monkeypatch.setattr(loading, "has_quantised_linear", lambda *_: True)
    meant = save(form, tmp_path)
    hf_config = read_hf_config(str(tmp_path))
    checkpoint = find_checkpoint(str(tmp_path), read_quantization_config(hf_config, None))
    architecture = architecture_of(hf_config)
    for shard in (Shard(0, 2), Shard(1, 2)):
        weights = read_weights(checkpoint, architecture, torch.float32, CPU, shard=shard)
        assert isinstance(weights["0.qkv_proj"], Quantised)
        for weight in weights_of(architecture, shard=shard):
            got = as_tensor(weights[weight.role])
            for part in weight.parts:
                taken = tuple(slice(own.start, own.stop) for own in part.taken)
                assert torch.equal(part.place(got), meant[part.key].float()[taken]), part.key


@pytest.mark.parametrize("form", ["compressed fp8, per row", "gptq, sorted", "modelopt nvfp4"])
def test_a_quantised_model_gives_the_logits_of_its_dequantised_copy(
    tmp_path: Path, form: str
) -> None:
    """Our decoder passes the check against transformers' class, and a note contains the memory."""
    meant = save(form, tmp_path)
    loaded = load_model(settings(tmp_path))
    assert isinstance(loaded.network, Decoder)
    (note,) = loaded.notes
    assert "as much memory as unquantised ones" in note
    eager: Any = build("Qwen3Config")
    eager.load_state_dict(meant)
    with torch.inference_mode():
        expected = eager(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(chunked_logits(loaded, IDS)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "family", "expert"),
    [
        # As Qwen3-30B-A3B-FP8 has them, and MiniMax-M2 by the other names; and as llm-compressor
        # writes mixtures, Kimi K2 Thinking among them.
        ("fp8, blocks", "Qwen3MoeConfig", "mlp.experts.3.down_proj.weight_scale_inv"),
        ("compressed int4", "MixtralConfig", "block_sparse_moe.experts.3.w2.weight_packed"),
        ("modelopt nvfp4", "Qwen3MoeConfig", "mlp.experts.3.down_proj.weight_scale_2"),
    ],
)
def test_experts_are_quantised_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, family: str, expert: str
) -> None:
    """They give the logits of a dequantised copy, and stay quantised where that is multiplied."""
    meant = save(form, tmp_path / "own", family)
    assert f"model.layers.0.{expert}" in load_file(tmp_path / "own" / WHOLE)
    loaded = load_model(settings(tmp_path / "own"))
    assert isinstance(loaded.network, Decoder)
    build(family).save_pretrained(tmp_path / "copy")  # type: ignore[operator]
    save_file(meant, tmp_path / "copy" / WHOLE, metadata={"format": "pt"})
    eager: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = eager(input_ids=IDS[None], use_cache=False).logits[0].log_softmax(-1)
    got = chunked_logits(loaded, IDS)[0].log_softmax(-1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(loading, "has_quantised_linear", lambda *_: True)
    hf_config = read_hf_config(str(tmp_path / "own"))
    checkpoint = find_checkpoint(str(tmp_path / "own"), read_quantization_config(hf_config, None))
    weights = read_weights(checkpoint, architecture_of(hf_config), torch.float32, CPU)
    assert isinstance(weights["0.gate_up_proj"], Quantised)
    assert isinstance(weights["0.down_proj"], Quantised)


@pytest.mark.parametrize("family", ["MixtralConfig", "GraniteMoeConfig"])
def test_ranks_make_their_shares_fp8_by_the_scales_of_whole_rows(
    tmp_path: Path, family: str
) -> None:
    """Experts may be stored one by one, or as one tensor."""
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config = read_hf_config(str(tmp_path))
    architecture = architecture_of(hf_config)

    def read(method: str | None, shard: Shard) -> dict[str, Matrix]:
        checkpoint = find_checkpoint(str(tmp_path), read_quantization_config(hf_config, method))
        return read_weights(checkpoint, architecture, torch.float32, CPU, shard=shard)

    plain, made = (read(method, Shard()) for method in (None, "fp8"))
    for role in ("0.gate_up_proj", "0.down_proj"):
        expected = quantise_fp8(as_tensor(plain[role])).dequantised()
        torch.testing.assert_close(as_tensor(made[role]), expected)
    shares = [as_tensor(read("fp8", Shard(rank, 2))["0.down_proj"]) for rank in range(2)]
    torch.testing.assert_close(torch.cat(shares, dim=-1), as_tensor(made["0.down_proj"]))


@pytest.mark.parametrize("family", ["Qwen3Config", "MixtralConfig"])
def test_weights_are_made_fp8_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Each row has a scale, some rows at once; embedding, head and routers are unchanged."""
    monkeypatch.setattr(quantised, "ROWS_AT_ONCE", 40)
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    plain, made = (
        chunked_logits(load_model(settings(tmp_path, quantization=method)), IDS)
        for method in (None, "fp8")
    )
    weight = torch.randn(3, 50, 8)
    numbers, scales = quantise_rows_fp8(weight.view(150, 8), 8)
    got = quantise_fp8(weight)
    assert torch.equal(got.dequantised(), (numbers.float() * scales).view(3, 50, 8))
    apart = torch.linalg.vector_norm(plain - made) / torch.linalg.vector_norm(plain)
    assert 0.01 < apart < 0.3


def test_a_load_that_quantises_measures_the_drift(tmp_path: Path) -> None:
    """The log-probabilities of the plain model's likeliest tokens; on the text of its tokenizer."""
    copytree(demo.MODEL_PATH, tmp_path, dirs_exist_ok=True)
    models = [load_model(settings(tmp_path, quantization=method)) for method in (None, "fp8")]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(HELD_TEXT).ids[:MOST_TOKENS])
    plain, made = (chunked_logits(model, ids)[0].double().log_softmax(-1) for model in models)
    best = plain.argmax(-1)
    apart = (made - plain)[torch.arange(len(ids)), best].abs()
    same = (made.argmax(-1) == best).double().mean()
    assert not any("log-prob" in note for note in models[0].notes)
    (note,) = [note for note in models[1].notes if "log-prob" in note]
    assert note == (
        f"--quantization fp8 changes log-probabilities by {apart.mean():.3f} on average and "
        f"{apart.max():.2f} at most on {len(ids)} tokens of text, compared with float32; the "
        f"likeliest token is the same for {same:.1%}"
    )
    assert apart.max() > 0


@pytest.mark.skipif(not int8.supports(torch.bfloat16), reason="no AVX512-VNNI here")
@pytest.mark.parametrize(("family", "most"), [("Qwen3Config", 0.1), ("MixtralConfig", 0.3)])
def test_weights_are_made_int8_for_a_cpu(tmp_path: Path, family: str, most: float) -> None:
    """The check passes and logits stay close; rounding routes some tokens to other experts."""
    build(family).to(torch.bfloat16).save_pretrained(tmp_path)
    plain, made = (
        load_model(settings(tmp_path, dtype="bfloat16", quantization=method))
        for method in (None, "int8")
    )
    assert isinstance(made.network, Decoder)
    assert isinstance(made.network._layers[0].out_proj, int8.Int8Linear)
    assert plain.notes == ()
    (note,) = made.notes
    drift = re.match(r"--quantization int8 changes log-probabilities by (0\.\d+) ", note)
    assert drift
    assert float(drift[1]) < most
    expected, got = (chunked_logits(model, IDS).float() for model in (plain, made))
    apart = torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected)
    assert 0.001 < apart < most


def test_int8_is_refused_where_nothing_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error contains an alternative for the dtype, the processor, or the device."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    monkeypatch.setattr(int8, "HAS_INT8_PRODUCT", True)
    monkeypatch.setattr(int8, "HAS_PAIR_PRODUCT", True)
    with pytest.raises(ModelRefused, match="runs in float32: add --dtype bfloat16"):
        load_model(settings(tmp_path, quantization="int8"))
    monkeypatch.setattr(int8, "HAS_INT8_PRODUCT", False)
    with pytest.raises(ModelRefused, match="requires a processor with AVX512-VNNI"):
        load_model(settings(tmp_path, quantization="int8"))
    with pytest.raises(ModelRefused, match="on a GPU use --quantization fp8"):
        model_loading.check_int8("m", torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised with bitsandbytes, but only fp8, compressed"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "has unsupported fmt 'e5m2'"),
        ({"quant_method": "gptq", "bits": 3}, "has unsupported bits 3"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
            "with NVIDIA's ModelOpt (NVFP4_AWQ), but",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "has unsupported group_size 32",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "has unsupported quantized_layers None",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}},
            },
            "quantized_layers: a has unsupported {'quant_algo': 'W4A16_AWQ'}",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_awq"},
            "has unsupported packing_format 'auto_round:llm_awq'",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 2}}},
            "extra_config: a has unsupported bits 2",
        ),
        ({"quant_method": "gptq"}, "does not set bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "has unsupported dynamic"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "has unsupported group_size 0"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "has unsupported version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "has unsupported zero_point"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            "has unsupported config_groups {}",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "marlin-24",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}},
            },
            "a has unsupported weights with 8 bits, type 'int', format 'marlin-24'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    kind: {
                        "format": f"{kind}-pack-quantized",
                        "weights": {"num_bits": 4, "type": "float"},
                    }
                    for kind in ("mxfp4", "nvfp4")
                },
            },
            "has 2 kinds of weights that are stored alike",
        ),
        ("?", "quantised with ?"),
    ],
)
def test_unsupported_methods_are_refused_by_name(
    tmp_path: Path, quantization: Any, words: str
) -> None:
    """The error comes before anything is read."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    change(tmp_path, quantization_config=quantization)
    with pytest.raises(ModelRefused, match="use the unquantised model") as refused:
        load_model(settings(tmp_path))
    assert words in str(refused.value)


def test_modelopts_own_file_describes_its_weights(tmp_path: Path) -> None:
    """Older exports leave config.json as it was; a file without an algorithm says nothing."""
    save("modelopt", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = tmp_path / "hf_quant_config.json"
    for algorithm, method in (("FP8", "modelopt"), (None, None)):
        own.write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        read = read_quantization_config(read_hf_config(str(tmp_path)), None)
        assert (read and read.method) == method
    own.write_text("{}")
    with pytest.raises(ModelRefused, match=r"hf_quant_config.json has no valid quantization"):
        read_hf_config(str(tmp_path))


def test_8_bit_integers_are_dequantised_on_every_device(tmp_path: Path) -> None:
    """No kernel multiplies them."""
    products = {"gptq, 8 bits": "", "compressed W8A8": "", "gptq": "gptq"}
    products["compressed W4A8"] = "compressed-tensors"
    for form, product in products.items():
        save(form, tmp_path / form)
        read = read_quantization_config(read_hf_config(str(tmp_path / form)), None)
        assert read is not None
        assert read.product == product


def test_a_plan_for_a_gpu_contains_the_bytes_of_the_files(tmp_path: Path) -> None:
    """Weights of four bits stay so; those that no kernel multiplies take two bytes each."""
    planned = {}
    for form in ("modelopt nvfp4", "compressed W8A8"):
        save(form, tmp_path / form)
        config = EngineConfig(str(tmp_path / form), device="cuda", dtype="bfloat16")
        memory = plan_model(config).memory
        assert memory is not None
        planned[form] = memory.weight_bytes
    assert planned["modelopt nvfp4"] == (tmp_path / "modelopt nvfp4" / WHOLE).stat().st_size
    assert planned["compressed W8A8"] > planned["modelopt nvfp4"]


def test_the_requested_method_must_match_the_weights(tmp_path: Path) -> None:
    """None are quantised twice, and nothing is passed over."""
    save("awq", tmp_path)
    load_model(settings(tmp_path, quantization="awq"))
    with pytest.raises(ModelRefused, match="quantised with awq: leave the flag out"):
        load_model(settings(tmp_path, quantization="fp8"))
    change(tmp_path, quantization_config=None)
    with pytest.raises(ModelRefused, match="has no quantization_config: leave the flag out"):
        load_model(settings(tmp_path, quantization="gptq"))


@pytest.mark.parametrize(
    ("form", "family"),
    [
        ("awq", "Qwen3Config"),
        ("gptq, sorted", "Qwen3Config"),
        ("compressed int4, zeros", "Qwen3Config"),
        ("fp8, blocks", "MixtralConfig"),
        ("mxfp4", "GptOssConfig"),
    ],
)
def test_quantised_weights_are_dequantised_for_models_of_transformers(
    tmp_path: Path, form: str, family: str
) -> None:
    """No library of the format is used; a note contains the memory."""
    save(form, tmp_path, family)
    expected = chunked_logits(load_model(settings(tmp_path)), IDS)
    change(tmp_path, attention_chunk_size=7)
    loaded = load_model(settings(tmp_path))
    assert isinstance(loaded.network, TransformersNetwork)
    assert "and are dequantised for transformers" in loaded.notes[1]
    torch.testing.assert_close(chunked_logits(loaded, IDS), expected, atol=1e-4, rtol=1e-4)


def test_models_of_transformers_are_refused_if_dequantised_weights_are_missing_or_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the tensor or the bytes; fp8 is not applied at load for it."""
    save("awq", tmp_path)
    change(tmp_path, attention_chunk_size=7)
    with monkeypatch.context() as patch:
        patch.setattr(dequantize, "free_bytes", lambda _: 1000)
        with pytest.raises(ModelRefused, match=r"take 658,176 bytes, .* where 1,000 are free"):
            load_model(settings(tmp_path))
    tensors = load_file(tmp_path / WHOLE)
    del tensors[f"{UP}.scales"]
    save_file(tensors, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=rf"lack {UP}\.scales, which Qwen3ForCausalLM needs"):
        load_model(settings(tmp_path))
    change(tmp_path, quantization_config=None)
    with pytest.raises(
        ModelRefused, match="quantising weights to fp8 requires the engine's own decoder"
    ):
        load_model(settings(tmp_path, quantization="fp8"))


def test_tensors_that_lack_or_are_others_are_refused(tmp_path: Path) -> None:
    """A scale that was not copied, words in place of floats, groups of another size."""
    save("gptq", tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    key = "model.layers.1.mlp.up_proj"
    lacking = {name: tensor for name, tensor in tensors.items() if name != f"{key}.scales"}
    with_words = {**tensors, f"{key}.scales": tensors[f"{key}.scales"].view(torch.int16)}
    halved = {**tensors, f"{key}.scales": tensors[f"{key}.scales"][:1].contiguous()}
    for wrong, words in (
        (lacking, f"lack {key}.scales"),
        (with_words, f"{key}.scales is stored as I16"),
        (halved, "shapes of its weights do not match"),
    ):
        save_file(wrong, tmp_path / WHOLE, metadata={"format": "pt"})
        with pytest.raises(ModelRefused, match=words):
            load_model(settings(tmp_path))


def test_biases_are_left_out_that_are_zero_and_have_no_place(tmp_path: Path) -> None:
    """AutoGPTQ adds one to every matrix; any other bias does not fit the model."""
    save("gptq", tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    bias = torch.zeros(96)
    tensors["model.layers.1.mlp.up_proj.bias"] = bias
    save_file(tensors, tmp_path / WHOLE, metadata={"format": "pt"})
    assert isinstance(load_model(settings(tmp_path)).network, Decoder)
    bias[5] = 1
    save_file(tensors, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"up_proj\.bias.* does not use"):
        load_model(settings(tmp_path))


def test_fp8_weights_that_contain_nan_are_refused(tmp_path: Path) -> None:
    """Some kernels would not notice them."""
    save("fp8, per tensor", tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 4] = 255
    save_file(tensors, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match="up_proj: its fp8 numbers contain NaN"):
        load_model(settings(tmp_path))


# Of one layer of openai/gpt-oss-20b and 120b, by model.safetensors.index.json, with this model's
# sizes: hidden 64, intermediate 96, 4 experts, heads of 64.
PUBLISHED = {
    "input_layernorm.weight": (64,),
    "mlp.experts.down_proj_bias": (4, 64),
    "mlp.experts.down_proj_blocks": (4, 64, 3, 16),
    "mlp.experts.down_proj_scales": (4, 64, 3),
    "mlp.experts.gate_up_proj_bias": (4, 192),
    "mlp.experts.gate_up_proj_blocks": (4, 192, 2, 16),
    "mlp.experts.gate_up_proj_scales": (4, 192, 2),
    "mlp.router.bias": (4,),
    "mlp.router.weight": (4, 64),
    "post_attention_layernorm.weight": (64,),
    "self_attn.k_proj.bias": (32,),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.o_proj.bias": (64,),
    "self_attn.o_proj.weight": (64, 64),
    "self_attn.q_proj.bias": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.sinks": (4,),
    "self_attn.v_proj.bias": (32,),
    "self_attn.v_proj.weight": (32, 64),
}


def test_gpt_oss_is_served_as_published(tmp_path: Path) -> None:
    """Our decoder gives the same greedy tokens as transformers with its own dequantised weights."""
    save_mxfp4(tmp_path)
    stored, layer = load_file(tmp_path / WHOLE), "model.layers.0."
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items() if layer in key}
    assert shapes == {layer + key: shape for key, shape in PUBLISHED.items()}
    loaded = load_model(settings(tmp_path))
    assert isinstance(loaded.network, Decoder)
    eager: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    ids = IDS.tolist()
    with torch.inference_mode():
        for _ in range(20):
            logits = eager(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            ids.append(int(logits[-1].argmax()))
    got = chunked_logits(loaded, torch.tensor(ids[:-1]))[0]
    assert got[len(IDS) - 1 :].argmax(-1).tolist() == ids[len(IDS) :]
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(got.log_softmax(-1), expected, atol=1e-4, rtol=1e-4)


def test_experts_stay_in_mxfp4_where_a_device_multiplies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them stay, or a rank's share that ends between groups of 32 inputs."""
    monkeypatch.setattr(loading, "has_quantised_linear", lambda *_: True)
    meant = save_mxfp4(tmp_path)
    hf_config = read_hf_config(str(tmp_path))
    checkpoint = find_checkpoint(str(tmp_path), read_quantization_config(hf_config, None))
    architecture = architecture_of(hf_config)
    for shard in (Shard(), Shard(0, 3), Shard(2, 3)):
        weights = read_weights(checkpoint, architecture, torch.float32, CPU, shard=shard)
        kept = {role for role, weight in weights.items() if isinstance(weight, Quantised)}
        experts = {f"{i}.{role}" for i in range(4) for role in ("gate_up_proj", "down_proj")}
        assert kept == experts
        for weight in weights_of(architecture, shard=shard):
            for part in weight.parts:
                taken = tuple(slice(own.start, own.stop) for own in part.taken)
                got = part.place(as_tensor(weights[weight.role]))
                expected = meant[part.key].float()[taken]
                assert torch.equal(got.reshape(expected.shape), expected), part.key
    with pytest.raises(ModelRefused, match=r"size 2: 96 columns of an expert \(with 32 per"):
        check_tensor_parallel_size("m", architecture, 2, checkpoint.quantization)


EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(name="mxfp4", scope="module")
def fixture_mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with experts in mxfp4, which tests copy."""
    folder = tmp_path_factory.mktemp("mxfp4")
    save_mxfp4(folder)
    return folder


@pytest.mark.parametrize(
    ("piece", "change_piece", "words"),
    [
        ("blocks", None, f"lack {EXPERTS}, which GptOssForCausalLM needs"),
        ("scales", None, f"lack {EXPERTS}_scales"),
        ("scales", lambda scales: scales[..., :2], f"shapes of its weights .*{EXPERTS}_scales"),
        (
            "blocks",
            lambda blocks: blocks.half(),
            f"lack {EXPERTS}, which .*{EXPERTS}_blocks instead",
        ),
        (
            "scales",
            lambda scales: scales.half(),
            f"{EXPERTS}_scales is stored as F16, but must be U8",
        ),
        ("scales", lambda scales: scales | 255, f"{EXPERTS}: its scales reach 2[*][*]128"),
        ("scales", lambda scales: scales & 0, f"{EXPERTS}: its scales are 0"),
    ],
)
def test_experts_in_mxfp4_that_are_torn_are_refused(
    mxfp4: Path,
    tmp_path: Path,
    piece: str,
    change_piece: Callable[[Tensor], Tensor] | None,
    words: str,
) -> None:
    """The error names the missing or wrong tensor."""
    copytree(mxfp4, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / WHOLE)
    own = tensors.pop(f"{EXPERTS}_{piece}")
    if change_piece is not None:
        tensors[f"{EXPERTS}_{piece}"] = change_piece(own).contiguous()
    save_file(tensors, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=words):
        load_model(settings(tmp_path))


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "key", "change_scales", "words"),
    [
        ("awq", "scales", torch.zeros_like, "up_proj: its scales are 0 or negative"),
        ("gptq", "scales", torch.neg, "up_proj: its scales are 0 or negative"),
        ("compressed int4", "weight_scale", torch.zeros_like, "its scales are 0 or negative"),
        ("compressed fp8, per row", "weight_scale", torch.neg, "it has negative scales"),
        (
            "fp8, per tensor",
            "weight_scale_inv",
            torch.zeros_like,
            "scales of 0 for numbers other than",
        ),
        ("fp8, blocks", "weight_scale_inv", torch.zeros_like, "scales of 0 for numbers other than"),
        ("gptq", "scales", lambda scales: scales * torch.nan, "scales contains NaN or infinity"),
        (
            "modelopt nvfp4",
            "weight_scale",
            lambda scales: (scales.view(torch.uint8) | 127).view(torch.float8_e4m3fn),
            "up_proj: its scales contain NaN",
        ),
        (
            "modelopt nvfp4",
            "weight_scale",
            lambda scales: (scales.view(torch.uint8) | 128).view(torch.float8_e4m3fn),
            "up_proj: it has negative scales",
        ),
        ("modelopt nvfp4", "weight_scale", torch.zeros_like, "up_proj: its scales are 0"),
        (
            "compressed nvfp4",
            "weight_global_scale",
            torch.zeros_like,
            "its weight_global_scale is 0 or negative",
        ),
        ("compressed mxfp4", "weight_scale", torch.zeros_like, "up_proj: its scales are 0"),
        ("compressed W4A8", "weight", lambda own: own * 2, "its numbers need more than 4 bits"),
        ("fp8, per tensor", "weight_scale_inv", lambda one: one * 1e30, "contains numbers up to"),
    ],
)
def test_scales_that_no_weight_was_quantised_by_are_refused(
    tmp_path: Path, name: str, key: str, change_scales: Callable[[Tensor], Tensor], words: str
) -> None:
    """The dequantised weights would be 0, or a scale would be 0 for other numbers."""
    save(name, tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    tensors[f"{UP}.{key}"] = change_scales(tensors[f"{UP}.{key}"]).contiguous()
    save_file(tensors, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=words):
        load_model(settings(tmp_path))


def test_scales_that_some_tools_write_are_taken(tmp_path: Path) -> None:
    """Some scales are below 0, as in AutoRound, and a row of fp8 is 0 with a scale of 0."""
    save("gptq", tmp_path / "gptq")
    tensors = load_file(tmp_path / "gptq" / WHOLE)
    tensors[f"{UP}.scales"][0, ::2] *= -1
    save_file(tensors, tmp_path / "gptq" / WHOLE, metadata={"format": "pt"})
    save("compressed fp8, per row", tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / WHOLE)
    tensors[f"{UP}.weight"].view(torch.uint8)[3] = 0
    tensors[f"{UP}.weight_scale"][3] = 0
    save_file(tensors, tmp_path / "fp8" / WHOLE, metadata={"format": "pt"})
    for folder in ("gptq", "fp8"):
        assert isinstance(load_model(settings(tmp_path / folder)).network, Decoder)


@pytest.mark.parametrize(
    ("name", "quantization", "key"),
    [
        ("gptq, sorted", {}, "g_idx"),
        ("compressed int4", {"actorder": "group"}, "weight_g_idx"),
    ],
)
def test_sorted_inputs_without_their_groups_are_refused(
    tmp_path: Path, name: str, quantization: dict[str, Any], key: str
) -> None:
    """In stored order, inputs would get the scales of others."""
    save(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if quantization:
        config["config_groups"]["group_0"]["weights"] |= quantization
    change(tmp_path, quantization_config=config)
    tensors = load_file(tmp_path / WHOLE)
    less = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    save_file(less, tmp_path / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=rf"lack .*\.{key}"):
        load_model(settings(tmp_path))


def change(folder: Path, **changes: Any) -> None:
    """Store another config in a folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_words_hold_every_number_where_a_side_is_not_a_multiple_of_eight() -> None:
    """A file with fewer words has the wrong shape, which a plan reports before a load."""
    awq = formats.Awq(32).tensor_specs((100, 64), lambda _: False)
    gptq = formats.Gptq(32, 1).tensor_specs((64, 100), lambda _: False)
    assert (awq["qweight"].shapes, awq["qzeros"].shapes) == (((64, 13),), ((2, 13),))
    assert (gptq["qweight"].shapes, gptq["qzeros"].shapes) == (((13, 64),), ((4, 8),))
