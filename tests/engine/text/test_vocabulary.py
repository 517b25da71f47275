"""Vocabularies from tokenizer files are cached: loaded unchanged, or created again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.engine.scripted_model import END, TURN_END, pretrained_tokenizer, sentencepiece_tokenizer
from tidemill import demo
from tidemill.engine.text.chat_template import ChatTemplate
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.vocabulary import (
    Vocabulary,
    load_vocabulary,
    recall_vocabulary,
    vocabulary_of,
)
from tidemill.protocol.contract import EngineError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXTS = [
    "",
    "A text, 1 line.\n",
    " a  b",
    "héllo €😀",
    f"a{TURN_END}b{END}",
    "<s>a</s>",
    "<é>a<x> b",
]


def with_added_tokens() -> Any:
    """Return a tokenizer with added tokens of every sort and two templates."""
    pretrained = pretrained_tokenizer()
    pretrained.add_tokens(
        [AddedToken("<é>", special=False, lstrip=True), AddedToken("b", rstrip=True)]
    )
    pretrained.add_special_tokens({"pad_token": "<x>"})
    pretrained.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "x"}
    return pretrained


def that_splits_markup() -> Any:
    """Return a tokenizer that treats special tokens in a text as text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(pretrained_tokenizer().backend_tokenizer.to_str()),
        eos_token=TURN_END,
        split_special_tokens=True,
    )


def of_unigrams() -> Any:
    """Return a tokenizer like T5's, whose tokens have fractional scores."""
    vocab = [("<unk>", 0.0), ("▁", -1 / 3), ("a", -2.0000001), ("▁a", -0.1), ("b", -7e-30)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def word_pieces() -> Any:
    """Return a tokenizer whose texts are decoded by transformers."""
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


KINDS = [
    pretrained_tokenizer,
    sentencepiece_tokenizer,
    with_added_tokens,
    that_splits_markup,
    of_unigrams,
]


@pytest.fixture(name="cache", autouse=True)
def fixture_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty cache for the test."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def saved(make: Callable[[], Any], folder: Path) -> Path:
    """Return a folder that contains a tokenizer."""
    make().save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Vocabulary:
    """Return the vocabulary that transformers loads from a folder."""
    return load_vocabulary(str(folder), folder)


def recalled(folder: Path) -> Vocabulary | None:
    """Return the cached vocabulary of a folder."""
    return recall_vocabulary(str(folder), folder)


@pytest.mark.parametrize("make", KINDS)
def test_a_cached_vocabulary_equals_the_original(make: Callable[[], Any], tmp_path: Path) -> None:
    """Every part and everything derived is equal: IDs, texts, pieces, bounds and prompts."""
    folder = saved(make, tmp_path / "model")
    assert recalled(folder) is None
    cold, warm = loaded(folder), recalled(folder)
    assert warm is not None
    assert warm.pretrained is None
    assert replace(warm, backend=None) == replace(cold, backend=None, pretrained=None)
    assert warm.backend.to_str() == cold.backend.to_str()
    ours, theirs = Tokenizer(warm), Tokenizer(cold)
    for text in TEXTS:
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.text(ids) == theirs.text(ids)
        assert ours.least_tokens(text) == theirs.least_tokens(text)
    ids = range(cold.highest_id + 10)
    assert [ours.piece(i) for i in ids] == [theirs.piece(i) for i in ids]
    assert [ours.is_special(i) for i in ids] == [theirs.is_special(i) for i in ids]


def test_one_of_several_templates_is_cached(tmp_path: Path) -> None:
    """It is the template that transformers uses."""
    folder = saved(with_added_tokens, tmp_path / "model")
    cold, warm = loaded(folder), recalled(folder)
    assert warm is not None
    assert warm.chat_template == {"default": "{{ messages[0].content }}", "tool_use": "x"}
    assert ChatTemplate(warm)._special_tokens == ChatTemplate(cold)._special_tokens


def test_several_templates_need_a_default() -> None:
    """The error names the existing ones."""
    vocabulary = replace(vocabulary_of(pretrained_tokenizer()), chat_template={"rag": "x"})
    with pytest.raises(EngineError, match="rag"):
        ChatTemplate(vocabulary)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: replaced(folder / "tokenizer.json", "[", "[ "),
        lambda folder: replaced(folder / "tokenizer_config.json", "{", "{ "),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        lambda folder: (folder / "chat_template.jinja").unlink(),
        lambda folder: (folder / "special_tokens_map.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: written(folder / "additional_chat_templates/rag.jinja"),
    ],
    ids=["tokenizer", "config", "template", "no template", "map", "model", "templates"],
)
def test_any_change_of_its_files_is_noticed(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    """Changes are an additional byte, an additional file and a missing file."""
    folder = saved(pretrained_tokenizer, tmp_path / "model")
    loaded(folder)
    assert recalled(folder) is not None
    change(folder)
    assert recalled(folder) is None


def replaced(path: Path, old: str, new: str) -> None:
    """Write a file's text again with its first `old` replaced by `new`."""
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")


def written(path: Path) -> None:
    """Write a small file into a folder that may not exist."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")


def test_the_name_and_the_versions_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers treats some names differently, and so may every version."""
    folder = saved(pretrained_tokenizer, tmp_path / "model")
    loaded(folder)
    assert recall_vocabulary("another", folder) is None
    monkeypatch.setattr(
        "tidemill.engine.text.vocabulary.package_versions", lambda *_: "transformers=9"
    )
    assert recalled(folder) is None


def test_weights_are_ignored(tmp_path: Path) -> None:
    """They contain no tokenizer, and they are large."""
    folder = saved(pretrained_tokenizer, tmp_path / "model")
    loaded(folder)
    (folder / "model.safetensors").write_bytes(b"x")
    assert recalled(folder) is not None


def test_files_that_change_while_they_are_read_are_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown which of the two states was read."""
    folder = saved(pretrained_tokenizer, tmp_path / "model")
    load = transformers.AutoTokenizer.from_pretrained

    def slowly(*args: Any, **options: Any) -> Any:
        vocabulary = load(*args, **options)
        replaced(folder / "tokenizer.json", "[", "[ ")
        return vocabulary

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", slowly)
    loaded(folder)
    assert recalled(folder) is None


@pytest.mark.parametrize("settings", ['{"vocab_file": "/etc/passwd"}', "[]", "{", "[" * 100_000])
def test_a_config_that_may_name_other_files_is_read_by_transformers(
    settings: str, tmp_path: Path
) -> None:
    """They may change unnoticed, and broken files must be reported each time."""
    folder = saved(pretrained_tokenizer, tmp_path / "model")
    config = folder / "tokenizer_config.json"
    if settings.endswith("}"):
        config.write_text(json.dumps(json.loads(config.read_text()) | json.loads(settings)))
        loaded(folder)
    else:
        config.write_text(settings)
        with pytest.raises(EngineError, match="has no tokenizer that can be loaded"):
            loaded(folder)
    assert recalled(folder) is None


@pytest.mark.parametrize(
    ("name", "whose"), [("tekken.json", "Mistral's"), ("tokenizer.model", "SentencePiece's")]
)
def test_a_tokenizer_in_another_format_only_is_refused_by_its_file(
    name: str, whose: str, tmp_path: Path
) -> None:
    """transformers' errors name packages to install, or nothing."""
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / name).write_text("{}")
    with pytest.raises(EngineError, match=rf"it has only {name}, in {whose} format: fetch tok"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tokenizer_config.json", '{"vocab": "VOCAB", "merges": "MERGES"}'),
        ("tokenizer_config.json", '{"init_inputs": ["VOCAB", "MERGES"]}'),
        ("special_tokens_map.json", '{"vocab_file": "VOCAB", "merges_file": "MERGES"}'),
        ("special_tokens_map.json", '{"vocab": "VOCAB", "merges": "MERGES"}'),
    ],
)
def test_a_tokenizer_of_files_elsewhere_is_read_by_transformers(
    name: str, settings: str, tmp_path: Path
) -> None:
    """Any of its arguments in a config may name them."""
    model = json.loads(pretrained_tokenizer().backend_tokenizer.to_str())["model"]
    elsewhere = {"VOCAB": tmp_path / "vocab.json", "MERGES": tmp_path / "merges.txt"}
    elsewhere["VOCAB"].write_text(json.dumps(model["vocab"]))
    elsewhere["MERGES"].write_text("#version: 0.2\n")
    for word, path in elsewhere.items():
        settings = settings.replace(word, str(path))
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(demo.MODEL_PATH / "config.json", folder)
    (folder / name).write_text(settings)
    config = folder / "tokenizer_config.json"
    read = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(read | {"tokenizer_class": "GPT2Tokenizer"}))
    assert loaded(folder).backend.get_vocab_size() >= len(model["vocab"])
    assert recalled(folder) is None


@pytest.fixture(name="snapshot")
def fixture_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the hub's cache of `org/name`, with only the tokenizer itself fetched."""
    snapshot = tmp_path / "hub/models--org--name/snapshots" / COMMIT
    saved(pretrained_tokenizer, snapshot)
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "hub/models--org--name/refs").mkdir()
    (tmp_path / "hub/models--org--name/refs/main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    make = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda _, **options: make(snapshot, **options),
    )
    return snapshot


def test_files_missed_by_an_unreachable_hub_are_requested_again(snapshot: Path) -> None:
    """Results are cached only if the hub reported for every file whether it exists."""
    load_vocabulary("org/name", snapshot)
    assert recall_vocabulary("org/name", snapshot) is None
    none = snapshot.parents[1] / ".no_exist" / COMMIT
    none.mkdir(parents=True)
    for name in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        assert recall_vocabulary("org/name", snapshot) is None
        (none / name).touch()
    load_vocabulary("org/name", snapshot)
    assert recall_vocabulary("org/name", snapshot) is not None


def test_a_vocabulary_created_offline_is_valid_only_offline(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, the snapshot is all that exists."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    load_vocabulary("org/name", snapshot)
    assert recall_vocabulary("org/name", snapshot) is not None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert recall_vocabulary("org/name", snapshot) is None


def test_a_vocabulary_decoded_by_transformers_is_not_cached(tmp_path: Path, cache: Path) -> None:
    """Its decode is called for every token."""
    folder = saved(word_pieces, tmp_path / "model")
    assert Tokenizer(loaded(folder)).piece(1) == b" a"
    assert recalled(folder) is None
    assert not cache.exists()


def test_a_vocabulary_that_does_not_round_trip_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared before it is written."""
    folder = saved(pretrained_tokenizer, tmp_path / "model")
    make = transformers.AutoTokenizer.from_pretrained

    def odd(*args: Any, **options: Any) -> Any:
        tokenizer = make(*args, **options)
        tokenizer.chat_template = {1: "a key that JSON lacks"}
        return tokenizer

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", odd)
    loaded(folder)
    assert recalled(folder) is None


def test_a_truncated_cache_file_is_ignored(tmp_path: Path, cache: Path) -> None:
    """The vocabulary is created and cached again."""
    folder = saved(pretrained_tokenizer, tmp_path / "model")
    loaded(folder)
    [path] = (cache / "remembered").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert recalled(folder) is None
    loaded(folder)
    assert recalled(folder) is not None


def test_a_tokenizer_is_loaded_from_a_folder(tmp_path: Path) -> None:
    """A tokenizer saved by transformers is read; the error for a folder without one names it."""
    vocabulary = loaded(saved(pretrained_tokenizer, tmp_path / "tiny"))
    ours, expected = Tokenizer(vocabulary), Tokenizer(vocabulary_of(pretrained_tokenizer()))
    text = f"a{END}"
    assert ours.encode(text, add_special_tokens=False) == expected.encode(
        text, add_special_tokens=False
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="empty"):
        load_vocabulary(str(tmp_path / "empty"), None)


def test_the_demo_models_vocabulary_is_cached(tmp_path: Path) -> None:
    """It is a real one, from a folder with weights."""
    folder = tmp_path / "model"
    shutil.copytree(demo.MODEL_PATH, folder)
    loaded(folder)
    assert recalled(folder) is not None


@pytest.mark.parametrize("kind", ["bert", "gpt2", "qwen2", "xlm-roberta"])
def test_a_folder_without_a_vocabulary_is_refused(kind: str, tmp_path: Path) -> None:
    """transformers would create one from special tokens, which encodes every text the same way."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(EngineError, match="none of its files contains a vocabulary"):
        loaded(tmp_path)
