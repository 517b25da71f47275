"""A model folder with one fault is refused with one sentence, and nothing runs."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.long_parameters import with_long
from tidemill import demo
from tidemill.engine.config import EngineConfig
from tidemill.engine.inspection import inspect_model
from tidemill.engine.load import load_served
from tidemill.protocol.contract import EngineError

pytestmark = pytest.mark.usefixtures("proved")

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
MAX_SENTENCE_CHARS = 800

Break = Callable[[Path], None]


def written(file: str, data: str | bytes) -> Break:
    """Replace the contents of a file."""
    content = data.encode() if isinstance(data, str) else data
    return lambda folder: _write(folder / file, content)


def cut(file: str) -> Break:
    """Truncate a file to its first half."""
    return lambda folder: _write(
        folder / file, (folder / file).read_bytes()[: (folder / file).stat().st_size // 2]
    )


def gone(file: str) -> Break:
    """Delete a file."""
    return lambda folder: (folder / file).unlink()


def a_folder(file: str) -> Break:
    """Replace a file with a folder."""

    def change(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return change


def changed(file: str, *keys: str | int, value: Any) -> Break:
    """Change one value of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_bytes())
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        _write(folder / file, json.dumps(content).encode())

    return change


def both(first: Break, second: Break) -> Break:
    """Apply two changes."""

    def change(folder: Path) -> None:
        first(folder)
        second(folder)

    return change


def renumbered(folder: Path) -> None:
    """Assign the tokens of the vocabulary the IDs of another model."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_bytes())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: number + 100_000 for token, number in vocab.items()}
    _write(path, json.dumps(content).encode())


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


NESTED = "{% for i in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
QUICK: dict[str, tuple[Break, str]] = {
    "a torn checkpoint": (cut("model.safetensors"), "model.safetensors"),
    "no config": (gone("config.json"), "cannot be read as a model"),
    "a config that is a list": (written("config.json", "[]"), "cannot be read as a model"),
    "a config that is a number": (written("config.json", "3"), "cannot be read as a model"),
    "a config of nothing but brackets": (
        written("config.json", "[" * 100_000),
        "cannot be read as a model",
    ),
    "a width that is a word": (changed("config.json", "hidden_size", value="x"), "hidden_size"),
    "a width of a million": (changed("config.json", "hidden_size", value=10**6), "files contain"),
    "a width below nothing": (changed("config.json", "hidden_size", value=-1), "hidden_size -1"),
    "a hundred thousand layers": (
        both(
            changed("config.json", "layer_types", value=None),
            changed("config.json", "num_hidden_layers", value=10**5),
        ),
        "no model has more than",
    ),
    "no layers": (changed("config.json", "num_hidden_layers", value=0), "num_hidden_layers"),
    "a vocabulary beyond measure": (
        changed("config.json", "vocab_size", value=10**12),
        "files contain",
    ),
    "an end that is a word": (changed("config.json", "eos_token_id", value="x"), "eos_token_id"),
    "a generation config that is null": (
        written("generation_config.json", "null"),
        "generation_config.json",
    ),
    "a temperature that is none": (
        changed("generation_config.json", "temperature", value=float("nan")),
        "generation_config.json: `temperature` must be a finite number",
    ),
    "no tokenizer": (gone("tokenizer.json"), "tokenizer"),
    "half a tokenizer": (cut("tokenizer.json"), "tokenizer"),
    "a tokenizer that is a number": (written("tokenizer.json", "3"), "tokenizer"),
    "a tokenizer without a model": (changed("tokenizer.json", "model", value=None), "tokenizer"),
    "another model's tokenizer": (renumbered, "belongs to another model"),
    "a tokenizer config that is null": (written("tokenizer_config.json", "null"), "tokenizer"),
    "a template without end": (written("chat_template.jinja", NESTED), "may never end"),
    "a template that calls itself": (
        written(
            "chat_template.jinja",
            "{% macro f(n) %}{{ f(n) if n < 0 }}{{ f(n + 1) if n < 60 }}"
            "{{ f(n + 1) if n < 60 }}{% endmacro %}{{ f(0) }}",
        ),
        "may never end",
    ),
    "a template of ten gigabytes": (
        written("chat_template.jinja", "{{ 'x' * 10 ** 10 }}"),
        "characters",
    ),
    "half a template": (cut("chat_template.jinja"), "not valid Jinja"),
    "a template of brackets": (
        written("chat_template.jinja", "{{ " + "(" * 9_999 + ")" * 9_999 + " }}"),
        "chat template",
    ),
    "a template that reads no message": (
        written("chat_template.jinja", "Hello."),
        "does not render the content of user messages",
    ),
}
# It takes two seconds to reach the limit of the template without end.
SLOW = ("a template that calls itself",)
WIDTHS = ("hidden_size", "head_dim", "intermediate_size", "num_hidden_layers")
WIDTHS += ("num_attention_heads", "num_key_value_heads", "vocab_size")
LONG: dict[str, Break] = {
    **{f"{file} is a folder": a_folder(file) for file in FILES},
    **{f"{file} is empty": written(file, "") for file in FILES},
    **{f"{file} is binary": written(file, bytes(range(256)) * 8) for file in FILES},
    **{f"{file} is a list": written(file, "[]") for file in FILES},
    "a header without end": written("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
    "an index instead": both(
        gone("model.safetensors"), written("model.safetensors.index.json", "{}")
    ),
    **{
        f"{width} is {value}": changed("config.json", width, value=value)
        for width in WIDTHS
        for value in (-1, 10**6, 10**12, "x", [], {}, 1.5, True, [-5])
    },
    **{
        f"{key} is {value}": changed("config.json", key, value=value)
        for key, value in (
            ("max_position_embeddings", -1),
            ("max_position_embeddings", "x"),
            ("rms_norm_eps", "x"),
            ("rms_norm_eps", float("nan")),
            ("layer_types", "x"),
            ("layer_types", ["full_attention"]),
            ("rope_parameters", {"rope_type": "bogus"}),
            ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
            ("rope_parameters", {"rope_type": "yarn"}),
            ("hidden_act", "bogus"),
            ("dtype", "bogus"),
            ("dtype", "int8"),
            ("model_type", "bogus"),
            ("model_type", []),
        )
    },
    **{
        f"the tokenizer's {'/'.join(map(str, keys))} is {value}": changed(
            "tokenizer.json", *keys, value=value
        )
        for keys in (("model",), ("model", "vocab"), ("added_tokens",), ("pre_tokenizer",))
        for value in ("x", 3)
    },
}


def sentence_of(folder: Path) -> str:
    """Return the error of loading a folder."""
    config = EngineConfig(
        str(folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_memory=2**22,
    )
    with pytest.raises(EngineError) as caught:
        load_served(config).close()
    return str(caught.value)


def broken(folder: Path, change: Break) -> Path:
    """Return a copy of the demo model with one change."""
    copy = folder / "model"
    shutil.copytree(demo.MODEL_PATH, copy)
    change(copy)
    return copy


def is_one_sentence(message: str, folder: Path) -> bool:
    """Return whether the message names the folder and is one readable line."""
    return str(folder) in message and "\n" not in message and len(message) < MAX_SENTENCE_CHARS


@pytest.mark.parametrize("name", with_long([name for name in QUICK if name not in SLOW], SLOW))
def test_a_broken_folder_is_reported_in_one_sentence(tmp_path: Path, name: str) -> None:
    """It names the model and the fault, whatever exception a library raised."""
    change, words = QUICK[name]
    folder = broken(tmp_path, change)
    sentence = sentence_of(folder)
    assert words in sentence
    assert is_one_sentence(sentence, folder)
    faults = inspect_model(EngineConfig(str(folder), device="cpu", dtype="float32")).faults
    assert all(is_one_sentence(fault, folder) for fault in faults)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_a_hundred_more_faults_are_reported_in_one_sentence(tmp_path: Path, name: str) -> None:
    """A hundred more faults have such errors, too."""
    folder = broken(tmp_path, LONG[name])
    assert is_one_sentence(sentence_of(folder), folder)
