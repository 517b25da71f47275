"""The modules that sentence-transformers saves next to a model: the steps after its network.

`modules.json` lists them with their folders. A module with an unknown class or field is refused by
name, since a vector that lacks one step looks like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import punctuation
from typing import Any, Literal, get_args

from ...errors import ModelRefused, first_line_of
from ...storage.hub import find_file

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

MODULES, SAVED_MODEL = "modules.json", "config_sentence_transformers.json"
MULTI_VECTOR_TYPES = frozenset({"ColBERT", "MultiVectorEncoder"})
"""Values of `model_type` in the latter: PyLate's and sentence-transformers'."""
ACTIVATIONS = frozenset(
    "ELU GELU Identity LeakyReLU ReLU SELU Sigmoid SiLU Softplus Softsign Tanh".split()
)
_OWN = "sentence_transformers."
# Files in which versions keep the tokenizer's limits; the first one that exists applies.
_TEXT_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The order in which several are joined: docs of Pooling.
_OLD_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_VECTOR, _TOKENS, _SCORES = "sentence_embedding", "token_embeddings", "scores"
_PYLATE_DENSE = "pylate.models.Dense.Dense"
# Padding of queries: of sentence-transformers, and of PyLate with its default length.
_EXPANSION, _EXPANDS, _QUERY_LENGTH = "query_expansion", "do_query_expansion", 32


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of token vectors into one, by each of `modes`, joined in their order.

    Without `include_prompt` the tokens of a prompt are left out.
    """

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Dense:
    """`activation(weight x + bias)`, from `in_features` to `out_features` numbers.

    Its weights are in `folder`; `activation` is a class of torch.nn without arguments.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """torch's LayerNorm of `width` numbers; its weights are in `folder`."""

    folder: str
    width: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """Normalisation of a vector to length 1."""


@dataclass(frozen=True, slots=True)
class Splade:
    """SPLADE: a weight of each token of the vocabulary, by the logits of a masked language model.

    A logit becomes log(1 + relu(logit)), and its logarithm is taken `num_logs` times. A text's
    weight is the largest of its tokens, or their sum.
    """

    strategy: Literal["max", "sum"] = "max"
    num_logs: int = 1


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Padding of a query to `length` tokens, with the tokenizer's mask token unless `token` is set.

    No token attends to the padding unless `is_attended`.
    """

    length: int
    is_attended: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class MultiVector:
    """ColBERT: a vector for each token of a text, except for `skipped_words` of documents.

    Those of queries are skipped with `skips_in_queries`. A query has up to `query_length` tokens,
    and shorter ones get an `expansion`. With `is_mean` a score is divided by the number of the
    query's vectors.
    """

    skipped_words: tuple[str, ...] = ()
    skips_in_queries: bool = False
    query_length: int | None = None
    expansion: QueryExpansion | None = None
    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class LogitScore:
    """The logit of one token after the prompt, minus that of another if there is one."""

    true_token_id: int
    false_token_id: int | None


Module = Dense | LayerNorm | Normalize


@dataclass(frozen=True, slots=True)
class Stack:
    """The modules of `modules.json` after the network; `transformer_task` is the network's task.

    With `reads_messages` texts go through the chat template, with `template_variables`. With
    `gives_scores` the last Dense module gives scores instead of a vector. With `multi_vector` the
    modules are for the vector of each token.
    """

    transformer_task: str
    reads_messages: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None
    modules: tuple[Module, ...] = ()
    logit_score: LogitScore | None = None
    gives_scores: bool = False
    splade: Splade | None = None
    multi_vector: MultiVector | None = None


class ModelFiles:
    """The JSON files of a local folder or a hub id, read by their names."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._found: dict[str, Path | None] = {}

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return self.find(name) is not None

    def read(self, name: str) -> Any:
        """Return a file's content, None if there is no such file; `ModelRefused` if invalid."""
        path = self.find(name)
        try:
            return None if path is None else json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as exc:
            raise self.refusal(f"{name} is not valid JSON: {first_line_of(exc)}") from exc

    def fields(self, name: str) -> SavedFields:
        """Return the fields of a file's object, none if there is no such file."""
        content = self.read(name)
        if not isinstance(content, dict | None):
            raise self.refusal(f"{name} is not a JSON object.")
        return SavedFields(self, name, content or {})

    def text_fields(self) -> SavedFields:
        """Return the fields of the file that limits texts, by any version's name."""
        names = (name for name in _TEXT_CONFIGS if self.has(name))
        return self.fields(next(names, _TEXT_CONFIGS[0]))

    def refusal(self, why: str) -> ModelRefused:
        """Return the error for a model that is not served, with its reason."""
        return ModelRefused(f"{self.model}: {why}")

    def find(self, name: str) -> Path | None:
        """Return a file, fetched if need be; None if there is none. The hub is queried once."""
        if name not in self._found:
            try:
                self._found[name] = find_file(self.model, name)
            except (OSError, ValueError) as exc:
                raise self.refusal(f"{name} cannot be read: {first_line_of(exc)}") from exc
        return self._found[name]


class SavedFields:
    """The fields of one file, with checks of their types."""

    def __init__(self, files: ModelFiles, name: str, fields: Mapping[str, Any]) -> None:
        self._files = files
        self._name = name
        self.fields = fields

    def count(self, key: str) -> int:
        """Return a required whole number above 0."""
        value = self.optional_count(key)
        if value is None:
            raise self.wrong(key)
        return value

    def optional_count(self, key: str) -> int | None:
        """Return a whole number above 0, or None if the field is not set."""
        value = self.fields.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.wrong(key)
        return value

    def token_id(self, key: str) -> int | None:
        """Return a whole number ≥ 0, or None if the field is not set."""
        value = self.fields.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self.wrong(key)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; null means the default."""
        value = self.fields.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key)
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string; null means the default."""
        value = self.fields.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(key)
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """Return an object; a field that is not set is an empty one."""
        value = self.fields.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key)
        return value

    def inner(self, key: str) -> SavedFields:
        """Return the fields of an object."""
        return SavedFields(self._files, f"{self._name}: {key}", self.object(key))

    def activation(self, key: str, default: str) -> str:
        """Return the name of a class of torch.nn, which may be `default`.

        Other modules are never loaded.
        """
        path = self.text(key, f"torch.nn.{default}")
        name = path.rpartition(".")[2]
        if not path.startswith("torch.nn.") or name not in {default, *ACTIVATIONS}:
            raise self.wrong(key)
        return name

    def only(self, *keys: str) -> None:
        """Refuse fields other than these."""
        for key in sorted(self.fields.keys() - set(keys)):
            raise self.wrong(key)

    def wrong(self, key: str) -> ModelRefused:
        """Return the error for a field with an unsupported value."""
        if key not in self.fields:
            return self._files.refusal(f"{self._name} does not set {key}, which is required.")
        return self._files.refusal(f"{self._name} has unsupported {key} {self.fields[key]!r}.")


def read_stack(files: ModelFiles) -> Stack | None:
    """Return the content of `modules.json`, None if there is none; may raise `ModelRefused`.

    The network comes first, and is in the model's own folder.
    """
    listed = files.read(MODULES)
    if listed is None:
        return None
    entries = [_entry(files, entry) for entry in listed] if isinstance(listed, list) else []
    if not entries or entries[0] not in {("Transformer", ""), ("MLMTransformer", "")}:
        raise files.refusal(f"{MODULES} must begin with a Transformer in the model's own folder.")
    default_task = "fill-mask" if entries[0][0] == "MLMTransformer" else "feature-extraction"
    task, reads_messages, variables = _transformer(files.text_fields(), default_task)
    if task == "fill-mask":
        return Stack(task, splade=_splade(files, entries))
    if task == "feature-extraction" and _is_multi_vector(files, entries):
        return _multi_vector_stack(files, entries)
    stack = Stack(task, reads_messages, variables)
    return _vector_stack(files, entries, stack)


def _vector_stack(files: ModelFiles, entries: list[tuple[str, str]], stack: Stack) -> Stack:
    """Return a stack with the modules for the vector of a text, or its score."""
    pooling: Pooling | None = None
    logit_score: LogitScore | None = None
    modules: list[Module] = []
    gives_scores = False
    for kind, folder in entries[1:]:
        fields = _config_of(files, folder, is_required=kind == "Pooling")
        if kind == "LogitScore" and len(entries) == 2:
            logit_score = _logit_score(fields)
        elif kind == "Pooling" and pooling is None and not modules:
            pooling = _pooling(fields)
        elif kind == "Dense" and pooling is not None and not gives_scores:
            modules.append(_dense(fields, folder))
            gives_scores = _output(fields) == _SCORES
        elif kind == "LayerNorm" and pooling is not None and not gives_scores:
            modules.append(LayerNorm(folder, fields.count("dimension")))
        elif kind == "Normalize" and pooling is not None and not gives_scores:
            _output(fields)
            modules.append(Normalize())
        elif kind != "Dropout":  # which does nothing outside training
            raise files.refusal(f"{MODULES} has {kind} in a place that is not supported.")
    return replace(
        stack,
        pooling=pooling,
        modules=tuple(modules),
        logit_score=logit_score,
        gives_scores=gives_scores,
    )


def _config_of(files: ModelFiles, folder: str, *, is_required: bool = False) -> SavedFields:
    name = f"{folder}/config.json" if folder else "config.json"
    if is_required and not files.has(name):
        raise files.refusal(f"{MODULES} lists {folder!r}, which has no config.json.")
    return files.fields(name)


def _splade(files: ModelFiles, entries: list[tuple[str, str]]) -> Splade:
    if [kind for kind, _ in entries[1:]] != ["SpladePooling"]:
        raise files.refusal(f"according to {MODULES} it has no SpladePooling after its network.")
    fields = _config_of(files, entries[1][1], is_required=True)
    strategy = fields.text("pooling_strategy", "max")
    activation = fields.text("activation_function", "relu")
    if strategy not in ("max", "sum"):
        raise fields.wrong("pooling_strategy")
    if activation not in ("relu", "log1p_relu"):
        raise fields.wrong("activation_function")
    return Splade("max" if strategy == "max" else "sum", 1 if activation == "relu" else 2)


def _is_multi_vector(files: ModelFiles, entries: list[tuple[str, str]]) -> bool:
    """Return whether the modules after the network are for the vectors of tokens."""
    kinds = {kind for kind, _ in entries}
    saved = files.fields(SAVED_MODEL).fields.get("model_type")
    return bool(kinds & {_PYLATE_DENSE, "MultiVectorMask"}) or saved in MULTI_VECTOR_TYPES


def _multi_vector_stack(files: ModelFiles, entries: list[tuple[str, str]]) -> Stack:
    """Return the modules of a ColBERT model of sentence-transformers or PyLate."""
    modules: list[Module] = []
    mask: SavedFields | None = None
    for kind, folder in entries[1:]:
        fields = _config_of(files, folder, is_required=kind == "MultiVectorMask")
        if kind in ("Dense", _PYLATE_DENSE):
            for key in ("module_input_name", "module_output_name"):
                if fields.text(key, _TOKENS) != _TOKENS:
                    raise fields.wrong(key)
            modules.append(_dense(fields, folder))
        elif kind == "MultiVectorMask" and mask is None:
            mask = fields
        elif kind == "Normalize":
            modules.append(Normalize())
        elif kind != "Dropout":
            raise files.refusal(f"{MODULES} has {kind} in a place that is not supported.")
    saved = files.fields(SAVED_MODEL)
    is_pylate = mask is None and saved.fields.get("model_type") != "MultiVectorEncoder"
    if is_pylate and Normalize() not in modules:
        modules.append(Normalize())
    mode = replace(
        _skipping(saved if mask is None else mask, is_pylate=is_pylate),
        is_mean=saved.fields.get("similarity_fn_name") == "meanmaxsim",
    )
    texts = files.text_fields()
    if is_pylate and _EXPANSION not in texts.fields and saved.flag(_EXPANDS, default=True):
        return _stack_of(modules, with_padded_queries(mode, saved, "query_length"))
    length = texts.optional_count("query_length") or saved.optional_count("query_length")
    return _stack_of(modules, _with_expansion(replace(mode, query_length=length), texts))


def _stack_of(modules: list[Module], mode: MultiVector) -> Stack:
    return Stack("feature-extraction", modules=tuple(modules), multi_vector=mode)


def with_padded_queries(mode: MultiVector, settings: SavedFields, length_key: str) -> MultiVector:
    """Return a mode whose queries all have one length, as in PyLate and its forerunners."""
    attends = settings.flag("attend_to_mask_tokens", default=False)
    attends = settings.flag("attend_to_expansion_tokens", default=attends)
    length = settings.optional_count(length_key) or _QUERY_LENGTH
    return replace(mode, query_length=length, expansion=QueryExpansion(length, attends))


def _with_expansion(mode: MultiVector, texts: SavedFields) -> MultiVector:
    """Return a mode with the expansion of queries that sentence-transformers saves, if any."""
    if not texts.object(_EXPANSION):
        return mode
    fields = texts.inner(_EXPANSION)
    fields.only("strategy", "attend", "token", "length")
    strategy, length = fields.text("strategy", ""), fields.count("length")
    if strategy not in ("fixed", "min"):
        raise fields.wrong("strategy")
    attends = fields.flag("attend", default=False)
    most = mode.query_length and max(mode.query_length, length)
    return replace(
        mode,
        query_length=length if strategy == "fixed" else most,
        expansion=QueryExpansion(length, attends, fields.text("token", "") or None),
    )


def _skipping(settings: SavedFields, *, is_pylate: bool) -> MultiVector:
    """Return the settings of the module MultiVectorMask, or of PyLate's whole model.

    PyLate skips punctuation by default.
    """
    if settings.fields.get("keep_only_token_ids") is not None:
        raise settings.wrong("keep_only_token_ids")
    key, default = "skiplist_words", list(punctuation) if is_pylate else None
    words = settings.fields.get(key, default)
    words = [] if words is None else words
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise settings.wrong(key)
    tasks = settings.fields.get("skiplist_tasks") or ["document"]
    return MultiVector(
        tuple(words) if "document" in tasks else (),
        skips_in_queries="query" in tasks,
    )


def _entry(files: ModelFiles, entry: object) -> tuple[str, str]:
    """Return a module's class and folder; an unknown class has its full name."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    folder = entry.get("path", "") if isinstance(entry, dict) else None
    is_inside = isinstance(folder, str) and ".." not in folder.split("/") and folder[:1] != "/"
    if not isinstance(kind, str) or not isinstance(folder, str) or not is_inside:
        raise files.refusal(f"{MODULES} contains {entry!r}, which is not a module.")
    return (kind.rpartition(".")[2] if kind.startswith(_OWN) else kind), folder


def _transformer(fields: SavedFields, default: str) -> tuple[str, bool, Mapping[str, Any]]:
    """Return the network's task, whether it reads messages, and its template's variables.

    Its input must be text and its output that of such a network; only rerankers read conversations.
    """
    task = fields.text("transformer_task", default)
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


def _pooling(fields: SavedFields) -> Pooling:
    include_prompt = fields.flag("include_prompt", default=True)
    mode = fields.fields.get("pooling_mode")
    for key in sorted(fields.fields.keys() - _OLD_MODES.keys()):
        if key.startswith("pooling_mode_") and fields.fields[key]:
            raise fields.wrong(key)
    if mode is None:
        old = tuple(mode for key, mode in _OLD_MODES.items() if fields.flag(key, default=False))
        return Pooling(old or ("mean",), include_prompt)
    listed = mode if isinstance(mode, list) else [mode]
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
    """Return the name of a module's output, which it must make of the vector."""
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
