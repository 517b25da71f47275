"""The weights that are read; a model is never filled with anything else."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.families import COMMON, FAMILIES, ONLY_OURS, VARIANTS, build
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.families import registry
from tidemill.engine.model.hf.forward import TransformersNetwork
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.parity.logits import chunked_logits
from tidemill.engine.model.weights.checkpoint import INDEX, WHOLE

pytestmark = pytest.mark.usefixtures("proved")

LoadingInfo = dict[str, Tensor]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(name="saved", scope="module")
def fixture_saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a family's tiny model, saved once."""
    root = tmp_path_factory.mktemp("models")

    def save(family: str) -> Path:
        if not (root / family).exists():
            network: Any = build(family)
            network.save_pretrained(root / family)
        return root / family

    return save


@pytest.fixture(name="llama")
def fixture_llama(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a folder with a tiny Llama, which a test may damage."""
    return Path(shutil.copytree(saved("LlamaConfig"), tmp_path / "model"))


@pytest.fixture(autouse=True, params=["ours", "transformers"])
def _run_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with our decoder and with transformers' classes."""
    if request.param == "transformers":
        monkeypatch.setattr(registry, "FAMILIES", {})


def load(name: Path | str) -> LoadedModel:
    """Load a model in fp32."""
    model = load_model(EngineConfig(str(name), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder if registry.FAMILIES else TransformersNetwork)
    return model


def check_logits(model: LoadedModel, eager: Any) -> None:
    """Compare a model with the logits of transformers' own for the same weights."""
    ids = torch.arange(3, 20)
    with torch.inference_mode():
        expected = eager(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(chunked_logits(model, ids)[0], expected, atol=1e-4, rtol=1e-4)


def change_tensors(folder: Path, change: Callable[[LoadingInfo], LoadingInfo]) -> None:
    """Store other weights in a folder."""
    changed = change(load_file(folder / WHOLE))
    save_file(changed, folder / WHOLE, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    """Store another config in a folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def shard(folder: Path) -> list[str]:
    """Store the weights in two files with an index, and return the names of the two."""
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    file_of = {key: names[number % 2] for number, key in enumerate(tensors)}
    for name in names:
        part = {key: tensor for key, tensor in tensors.items() if file_of[key] == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return names


def without(*words: str) -> Callable[[LoadingInfo], LoadingInfo]:
    """Return a function that removes the tensors whose names contain a word."""
    return lambda tensors: {
        key: tensor for key, tensor in tensors.items() if not any(word in key for word in words)
    }


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_a_familys_saved_weights_are_complete(saved: Callable[[str], Path], family: str) -> None:
    """No tensor that transformers converts or ties counts as missing."""
    kind = VARIANTS[family][0] if family in VARIANTS else family
    if kind in ONLY_OURS and not registry.FAMILIES:
        with pytest.raises(ModelRefused):
            load(saved(family))
    else:
        check_logits(load(saved(family)), build(family))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: {f"net.{key}": tensor for key, tensor in tensors.items()},
            r"lack lm_head.weight, .* and 36 more.*they contain net\.lm_head\.weight, .*instead",
        ),
        (
            without("layers.2.mlp"),
            r"lack model\.layers\.2\.mlp\.down_proj\.weight, .*needs: a file",
        ),
        (without("lm_head"), r"lack lm_head\.weight, which LlamaForCausalLM needs"),
        (
            lambda tensors: {
                key: (50 * tensor).to(torch.int8) if tensor.ndim > 1 else tensor
                for key, tensor in tensors.items()
            },
            r"lm_head\.weight is stored as I8: quantised",
        ),
    ],
    ids=["prefix", "layer", "head", "quantised"],
)
def test_weights_that_lack_required_tensors_are_refused(
    llama: Path, change: Callable[[LoadingInfo], LoadingInfo], words: str
) -> None:
    """Never filled with random numbers: the first tensors are named and the rest counted."""
    change_tensors(llama, change)
    with pytest.raises(ModelRefused, match=words) as refused:
        load(llama)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "LlamaConfig",
            {"num_hidden_layers": 2},
            r"contain model\.layers\.2\..* and 15 more, which",
        ),
        (
            "LlamaConfig",
            {"intermediate_size": 128},
            r"shapes of its weights.*\[64, 96\] instead of \[64, 128\]",
        ),
        ("Qwen3Config", {"model_type": "llama"}, r"contain .*k_norm\.weight.*does not use.*wrong"),
        ("LlamaConfig", {"model_type": "qwen3"}, r"lack .*k_norm\.weight"),
        ("MixtralConfig", {"num_local_experts": 3}, r"shapes of its weights"),
    ],
    ids=["layers", "width", "norms", "no-norms", "experts"],
)
def test_another_models_config_over_the_weights_is_refused(
    saved: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    """Some have all required tensors, so that only surplus ones show it."""
    folder = Path(shutil.copytree(saved(family), tmp_path / "model"))
    change_config(folder, **changes)
    with pytest.raises(ModelRefused, match=words):
        load(folder)


def test_layers_too_many_show_in_a_base_models_weights_too(llama: Path) -> None:
    """Their names lack the prefix of what is served."""
    change_tensors(
        llama, lambda tensors: {key.removeprefix("model."): value for key, value in tensors.items()}
    )
    check_logits(load(llama), build("LlamaConfig"))
    change_config(llama, num_hidden_layers=2)
    with pytest.raises(ModelRefused, match=r"contain layers\.2\."):
        load(llama)


def test_tied_heads_and_training_heads_are_accepted(llama: Path) -> None:
    """A head that is the embedding need not be stored; one for a reward is not served."""
    change_config(llama, tie_word_embeddings=True)
    change_tensors(
        llama,
        lambda tensors: (
            without("lm_head")(tensors)
            | {
                "v_head.summary.weight": torch.ones(1, 64),
                "model.rotary_emb.inv_freq": torch.ones(8),
            }
        ),
    )
    eager: Any = build("LlamaConfig")
    eager.lm_head.weight = eager.model.embed_tokens.weight
    check_logits(load(llama), eager)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_stored_head_is_used_even_if_the_config_ties_it(llama: Path, *, is_equal: bool) -> None:
    """StoredTensor twice or stored another one: transformers believes the weights, too."""
    change_config(llama, tie_word_embeddings=True)
    eager: Any = build("LlamaConfig")
    if is_equal:
        head = eager.model.embed_tokens.weight
        eager.lm_head.weight = head
        change_tensors(llama, lambda tensors: tensors | {"lm_head.weight": head.clone()})
    check_logits(load(llama), eager)


def test_tied_weights_may_be_stored_as_either(llama: Path) -> None:
    """Some tools store only the head."""
    change_config(llama, tie_word_embeddings=True)
    change_tensors(llama, without("embed_tokens"))
    eager: Any = build("LlamaConfig")
    eager.model.embed_tokens.weight = eager.lm_head.weight
    check_logits(load(llama), eager)


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4", "Gemma4Unified", "Llava"])
def test_the_text_of_a_model_of_images_is_served_by_its_own_weights(
    tmp_path: Path, kind: str
) -> None:
    """They have another prefix there; towers are left out."""
    text = COMMON | {"num_hidden_layers": 2}
    if kind == "Llava":
        text["model_type"] = "llama"
    given: dict[str, Any] = {"text_config": text, "vision_config": VISION}
    if kind.startswith("Gemma4"):
        text |= {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        text |= {"hidden_size_per_layer_input": 0} if kind == "Gemma4" else {}
        given["vision_config"] = {"mm_embed_dim": 32} if kind == "Gemma4Unified" else VISION
        config: Any = getattr(transformers, f"{kind}Config")(**given)
    elif kind == "Gemma3":
        config = transformers.Gemma3Config(**given, mm_tokens_per_image=4)
    else:
        config = transformers.LlavaConfig(**given, image_token_index=5)
    torch.manual_seed(7)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    check_logits(load(tmp_path), whole)


class Payload:
    """Object that leaves a witness when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.witness,))


@pytest.mark.parametrize(
    "file",
    [
        "../outside/secret.bin",
        "../outside/secret.safetensors",
        "/etc/passwd",
        "model/../../outside/secret.safetensors",
        "pytorch_model.bin",
        "model.safetensors.pt",
        "",
        7,
        None,
    ],
    ids=str,
)
def test_an_index_names_safetensors_inside_the_folder_or_is_refused(
    llama: Path, tmp_path: Path, file: object
) -> None:
    """Whatever else it names is never opened, let alone unpickled."""
    shard(llama)
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (outside / "secret.bin", llama / "pytorch_model.bin", llama / "w.safetensors.pt"):
        path.write_bytes(pickle.dumps(Payload(tmp_path / "witness")))
    index = json.loads((llama / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], file)
    (llama / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match=r"names .*: only \.safetensors files inside"):
        load(llama)
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}', "\xff", "[" * 10**5]
)
def test_an_index_that_is_none_is_refused(llama: Path, text: str) -> None:
    """The error is one sentence, whatever the file's bytes are."""
    shard(llama)
    (llama / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(ModelRefused, match="is not a valid weight index"):
        load(llama)


def test_a_link_that_leaves_the_folder_is_not_followed(llama: Path, tmp_path: Path) -> None:
    """Neither of the weights themselves nor of a part of them; the folder itself may be a link."""
    (tmp_path / "link").symlink_to(llama)
    load(tmp_path / "link")
    outside = tmp_path / "elsewhere.safetensors"
    (llama / WHOLE).rename(outside)
    (llama / WHOLE).symlink_to(outside)
    with pytest.raises(ModelRefused, match=r"model\.safetensors links to .*elsewhere"):
        load(llama)


def test_files_that_are_missing_or_torn_are_named(llama: Path) -> None:
    """An interrupted copy leaves such files."""
    first, second = shard(llama)
    check_logits(load(llama), build("LlamaConfig"))
    whole = (llama / second).read_bytes()
    for torn in (b"", whole[:-1], b"\x00" * 64):
        (llama / second).write_bytes(torn)
        with pytest.raises(ModelRefused, match=f"{second} is truncated or not a safetensors file"):
            load(llama)
    (llama / second).unlink()
    with pytest.raises(ModelRefused, match=f"lacks {second} .1 of the 2 weight files"):
        load(llama)
    (llama / first).unlink()
    (llama / INDEX).unlink()
    (llama / "model.bin").touch()
    with pytest.raises(ModelRefused, match=r"neither .* \(it contains model\.bin\)"):
        load(llama)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("adapter_config.json", "pass its base model with --model"),
        ("shard-00001-model-00001-of-00001.safetensors", "distributed checkpoint"),
    ],
)
def test_files_that_transformers_would_read_differently_are_refused(
    llama: Path, file: str, words: str
) -> None:
    """An adapter would be left out, or applied, by what else is installed."""
    (llama / file).write_text("{}")
    with pytest.raises(ModelRefused, match=words):
        load(llama)


def test_a_config_does_not_choose_the_files_to_read(llama: Path) -> None:
    """The name that it may give is not looked at."""
    change_config(llama, transformers_weights="other.safetensors")
    load(llama)


@pytest.fixture(name="hub")
def fixture_hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, offline, with `tiny/llama` in two files as links to blobs, one shared."""
    repository = tmp_path / "hub" / "models--tiny--llama"
    snapshot = repository / "snapshots" / COMMIT
    shared = tmp_path / "hub" / "blobs" / "ab"
    for folder in (snapshot, repository / "blobs", repository / "refs", shared):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    shard(llama)
    for number, path in enumerate(sorted(llama.iterdir())):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        if number == 2:
            (repository / "blobs/2").rename(shared / "2")
            (repository / "blobs/2").symlink_to("../../blobs/ab/2")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_the_hubs_cache_is_read_by_its_links(hub: Path) -> None:
    """The model's id and its folder both work, through links to the blobs."""
    load("tiny/llama")
    load(hub)


def test_a_hub_model_is_held_to_the_same(hub: Path, tmp_path: Path) -> None:
    """Its index may name nothing outside, and its tensors must be all there."""
    index = json.loads((hub / INDEX).read_text())
    (hub / INDEX).unlink()
    named = index | {"weight_map": {"a": "../../../../outside.safetensors"}}
    (hub / INDEX).write_text(json.dumps(named))
    with pytest.raises(ModelRefused, match=r"tiny/llama: .* names '\.\./"):
        load("tiny/llama")
    first = next(iter(index["weight_map"].values()))
    (hub / INDEX).write_text(json.dumps(index | {"weight_map": {"a": first}}))
    with pytest.raises(ModelRefused, match=r"tiny/llama: its weights lack"):
        load("tiny/llama")
    (hub / first).unlink()
    (hub / first).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").touch()
    with pytest.raises(ModelRefused, match="links to"):
        load("tiny/llama")
