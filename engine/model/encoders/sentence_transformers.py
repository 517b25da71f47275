"""The modules that sentence-transformers has saved beside a model: what comes after its network.

`modules.json` lists them with their folders; each is either known here to the last of its fields
or refused by name, since a vector that lacks one step looks like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ...errors import ModelRefused, first_line_of
from ...storage.hub import find_file

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

MODULES = "modules.json"
ACTIVATIONS = frozenset(
    "ELU GELU Identity LeakyReLU ReLU SELU Sigmoid SiLU Softplus Softsign Tanh".split()
)
_OWN = "sentence_transformers."
# Which folder older versions keep the tokenizer's limits under; the first that is there holds.
_TEXT_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# In the order in which several are joined: docs of Pooling.
_OLD_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_VECTOR, _SCORES = "sentence_embedding", "scores"


@dataclass(frozen=True, slots=True)
class Pooling:
    """Vectors of tokens to one: by each of `modes`, joined in their order.

    Without `include_prompt` the tokens of a prompt are left out.
    """

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Dense:
    """`activation(weight x + bias)`, from `in_features` to `out_features` numbers.

    Its weights lie in `folder`; `activation` is a class of torch.nn without arguments.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """torch's, of `width` numbers; its weights lie in `folder`."""

    folder: str
    width: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """A vector at length 1."""


@dataclass(frozen=True, slots=True)
class LogitScore:
    """The logit of one token after the last of the prompt, less that of another if there is one."""

    true_token_id: int
    false_token_id: int | None


Module = Dense | LayerNorm | Normalize


@dataclass(frozen=True, slots=True)
class Stack:
    """Modules of `modules.json` after the network; `transformer_task` is the network's task.

    `reads_messages` says that texts go through the chat template, with `template_variables`.
    `gives_scores` says that the last Dense gives scores, no vector.
    """

    transformer_task: str
    reads_messages: bool
    template_variables: Mapping[str, Any]
    pooling: Pooling | None
    modules: tuple[Module, ...]
    logit_score: LogitScore | None
    gives_scores: bool


class ModelFiles:
    """The JSON files of a local folder or a hub id, read by their names."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._found: dict[str, Path | None] = {}

    def has(self, name: str) -> bool:
        """Say whether there is such a file."""
        return self.find(name) is not None

    def read(self, name: str) -> Any:
        """Return what a file holds, None where there is none; `ModelRefused` if that is no JSON."""
        path = self.find(name)
        try:
            return None if path is None else json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as exc:
            raise self.refusal(f"{name} is no JSON: {first_line_of(exc)}") from exc

    def fields(self, name: str) -> SavedFields:
        """Return the fields of a file's object; of none where there is no such file."""
        said = self.read(name)
        if not isinstance(said, dict | None):
            raise self.refusal(f"{name} holds no JSON object.")
        return SavedFields(self, name, said or {})

    def text_fields(self) -> SavedFields:
        """Return the fields of the file that limits texts, whatever version has written it."""
        names = (name for name in _TEXT_CONFIGS if self.has(name))
        return self.fields(next(names, _TEXT_CONFIGS[0]))

    def refusal(self, why: str) -> ModelRefused:
        """Return the error that says why this model is not served."""
        return ModelRefused(f"{self.model}: {why}")

    def find(self, name: str) -> Path | None:
        """Return a file, fetched if need be; None where there is none. A hub is asked once."""
        if name not in self._found:
            try:
                self._found[name] = find_file(self.model, name)
            except (OSError, ValueError) as exc:
                raise self.refusal(f"{name} cannot be read: {first_line_of(exc)}") from exc
        return self._found[name]


class SavedFields:
    """The fields of one file, each of the type that it must have."""

    def __init__(self, files: ModelFiles, name: str, said: Mapping[str, Any]) -> None:
        self._files = files
        self._name = name
        self.said = said

    def count(self, key: str) -> int:
        """Return a whole number above 0, which must be there."""
        value = self.optional_count(key)
        if value is None:
            raise self.wrong(key)
        return value

    def optional_count(self, key: str) -> int | None:
        """Return a whole number above 0, or None where nothing is said."""
        value = self.said.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.wrong(key)
        return value

    def token_id(self, key: str) -> int | None:
        """Return a whole number from 0 on, or None where nothing is said."""
        value = self.said.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self.wrong(key)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; null is the default."""
        value = self.said.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key)
        return value

    def text(self, key: str, default: str) -> str:
        """Return a text; null is the default."""
        value = self.said.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(key)
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """Return an object; nothing said is an empty one."""
        value = self.said.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key)
        return value

    def activation(self, key: str, default: str) -> str:
        """Return the name of a class of torch.nn; another module's is never loaded."""
        path = self.text(key, f"torch.nn.{default}")
        name = path.rpartition(".")[2]
        if not path.startswith("torch.nn.") or name not in ACTIVATIONS:
            raise self.wrong(key)
        return name

    def only(self, *keys: str) -> None:
        """Refuse what is said beside these."""
        for key in sorted(self.said.keys() - set(keys)):
            raise self.wrong(key)

    def wrong(self, key: str) -> ModelRefused:
        """Return the error of a field that says what is not served."""
        said = "leaves out" if self.said.get(key) is None else f"says {self.said[key]!r} for"
        return self._files.refusal(f"{self._name} {said} {key}, which is not supported.")


def read_stack(files: ModelFiles) -> Stack | None:
    """Return what `modules.json` lists, None where there is no such file; may raise ModelRefused.

    The network comes first and lies in the folder itself.
    """
    listed = files.read(MODULES)
    if listed is None:
        return None
    entries = [_entry(files, entry) for entry in listed] if isinstance(listed, list) else []
    if not entries or entries[0] != ("Transformer", ""):
        raise files.refusal(f"{MODULES} does not begin with a Transformer in the folder itself.")
    task, reads_messages, variables = _transformer(files.text_fields())
    pooling: Pooling | None = None
    logit_score: LogitScore | None = None
    modules: list[Module] = []
    gives_scores = False
    for kind, folder in entries[1:]:
        fields = files.fields(f"{folder}/config.json" if folder else "config.json")
        if kind == "LogitScore" and len(entries) == 2:
            logit_score = _logit_score(fields)
        elif kind == "Pooling" and pooling is None and not modules:
            pooling = _pooling(files, fields, folder)
        elif kind == "Dense" and pooling is not None and not gives_scores:
            modules.append(_dense(fields, folder))
            gives_scores = _output(fields) == _SCORES
        elif kind == "LayerNorm" and pooling is not None and not gives_scores:
            modules.append(LayerNorm(folder, fields.count("dimension")))
        elif kind == "Normalize" and pooling is not None and not gives_scores:
            _output(fields)
            modules.append(Normalize())
        elif kind != "Dropout":  # which does nothing where nothing is trained
            raise files.refusal(f"{MODULES} has {kind} where that is not supported.")
    after = (pooling, tuple(modules), logit_score, gives_scores)
    return Stack(task, reads_messages, variables, *after)


def _entry(files: ModelFiles, entry: object) -> tuple[str, str]:
    """Return a module's class and folder; a class of anybody else keeps its whole name."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    folder = entry.get("path", "") if isinstance(entry, dict) else None
    is_inside = isinstance(folder, str) and ".." not in folder.split("/") and folder[:1] != "/"
    if not isinstance(kind, str) or not isinstance(folder, str) or not is_inside:
        raise files.refusal(f"{MODULES} holds {entry!r}, which is no module.")
    return (kind.rpartition(".")[2] if kind.startswith(_OWN) else kind), folder


def _transformer(fields: SavedFields) -> tuple[str, bool, Mapping[str, Any]]:
    """Return what the network is for, whether it reads messages, and what its template is told.

    It must read texts and give what such a network gives; whole conversations are for rerankers.
    """
    task = fields.text("transformer_task", "feature-extraction")
    gives = "last_hidden_state" if task == "feature-extraction" else "logits"
    forms = fields.object("modality_config")
    read = [forms[form] for form in ("text", "message") if form in forms]
    if (forms and not read) or not all(_gives(form, gives) for form in read):
        raise fields.wrong("modality_config")
    reads_messages = "message" in forms
    if reads_messages and task != "text-generation":
        raise fields.wrong("modality_config")
    processing = fields.object("processing_kwargs")
    variables = processing.get("chat_template", {})
    if processing.keys() - {"chat_template"} or not isinstance(variables, dict):
        raise fields.wrong("processing_kwargs")
    return task, reads_messages, variables


def _gives(form: object, output: str) -> bool:
    return isinstance(form, dict) and form.get("method_output_name", output) == output


def _pooling(files: ModelFiles, fields: SavedFields, folder: str) -> Pooling:
    if not files.has(f"{folder}/config.json" if folder else "config.json"):
        raise files.refusal(f"{MODULES} lists {folder!r}, which has no config.json.")
    include_prompt = fields.flag("include_prompt", default=True)
    said = fields.said.get("pooling_mode")
    for key in sorted(fields.said.keys() - _OLD_MODES.keys()):
        if key.startswith("pooling_mode_") and fields.said[key]:
            raise fields.wrong(key)
    if said is None:
        old = tuple(mode for key, mode in _OLD_MODES.items() if fields.flag(key, default=False))
        return Pooling(old or ("mean",), include_prompt)
    listed = said if isinstance(said, list) else [said]
    if not listed or not all(mode in get_args(PoolingMode) for mode in listed):
        raise fields.wrong("pooling_mode")
    return Pooling(tuple(listed), include_prompt)


def _dense(fields: SavedFields, folder: str) -> Dense:
    if fields.flag("use_residual", default=False):
        raise fields.wrong("use_residual")
    return Dense(
        folder=folder,
        in_features=fields.count("in_features"),
        out_features=fields.count("out_features"),
        bias=fields.flag("bias", default=True),
        activation=fields.activation("activation_function", "Tanh"),
    )


def _output(fields: SavedFields) -> str:
    """Return what a module writes, which it must make of the vector."""
    if fields.text("module_input_name", _VECTOR) != _VECTOR:
        raise fields.wrong("module_input_name")
    output = fields.text("module_output_name", _VECTOR)
    if output not in (_VECTOR, _SCORES):
        raise fields.wrong("module_output_name")
    return output


def _logit_score(fields: SavedFields) -> LogitScore:
    true_token_id = fields.token_id("true_token_id")
    if true_token_id is None:
        raise fields.wrong("true_token_id")
    return LogitScore(true_token_id, fields.token_id("false_token_id"))
