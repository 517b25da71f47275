"""Pooling config: whether a model embeds or scores, by its files, and how it pools.

Read are `config.json` and what sentence-transformers saves. Where a model has none of the latter,
what vLLM does holds: the first token of an encoder, the last of a decoder, at length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...config import EngineConfig
from ...errors import first_line_of
from ..families.overrides import overridden
from .sentence_transformers import (
    MODULES,
    Dense,
    LayerNorm,
    LogitScore,
    ModelFiles,
    Module,
    Normalize,
    Pooling,
    PoolingMode,
    SavedFields,
    Stack,
    read_stack,
)

__all__ = [
    "Classifier",
    "Dense",
    "LayerNorm",
    "LogitScore",
    "Module",
    "Normalize",
    "Pooling",
    "PoolingConfig",
    "is_pooling_model",
    "read_pooling_config",
]

PoolingTask = Literal["embed", "score"]

# Networks that look both ways and write no text, by `model_type`.
ENCODER_TYPES = frozenset(
    """
    albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra
    ernie esm eurobert flaubert funnel gte jina_embeddings_v3 longformer luke megatron-bert
    mobilebert modernbert mpnet mra new nomic_bert nystromformer rembert roberta
    roberta-prelayernorm roc_bert roformer splinter squeezebert t5encoder xlm xlm-roberta
    xlm-roberta-xl xmod yoso
    """.split()
)
_CONFIG = "config.json"
_SAVED_MODEL = "config_sentence_transformers.json"
_OLD_ACTIVATION = "sbert_ce_default_activation_function"
_SCORES = "ForSequenceClassification"
# Heads that an encoder was trained with before it was tuned for anything, and that are left out.
_LANGUAGE_HEADS = ("ForMaskedLM", "ForPreTraining", "ForCausalLM")
# Of networks whose names end in "Model", those that have a head to write by.
_WRITES = ("LMHeadModel", "ChatModel")
# Two networks that are compared by a projection of either one's vectors, and a part of them.
_TWO_TOWERS = frozenset(
    """
    align altclip blip chinese_clip clap clip clip_text_model clipseg clvp flava groupvit metaclip_2
    owlv2 owlvit siglip siglip2 siglip_text_model siglip2_text_model vision-text-dual-encoder xclip
    """.split()
)
# As vLLM has them, the older names behind those of today.
_POOLING_NAMES = ("pooling_type", "seq_pooling_type")
_ACTIVATION_NAMES = ("normalize", "use_activation")
_TOLD_MODES: dict[str, PoolingMode] = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
# transformers': of a config that names no labels.
_DEFAULT_LABELS = 2
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class Classifier:
    """The network's own head of sequence classification, which gives `num_labels` numbers."""

    num_labels: int


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling, modules and head by which a model embeds texts or scores pairs.

    `config` is config.json with `--hf-overrides` in it. Vectors: `pooling`, then `modules` in their
    order. Scores: by `head`, or by pooling and modules, the last of which gives the one number.
    That is as far as the network goes; the endpoint brings vectors to length 1 where `normalize`,
    and passes a score through `activation`, a class of torch.nn. `max_seq_length` None says
    nothing. `prompts` are put before a text by their names. `matryoshka` are the widths that
    vectors may be cut to, empty for any, None where they may not be cut. Segments of a pair are
    told apart where `has_types`; it is read by the chat template where `has_pair_template`, with
    `template_variables`. `is_assumed` where neither a file nor a person says how to pool.
    `unserved_head` is the class of a head in the files that no endpoint serves, empty without one.
    """

    config: Mapping[str, Any]
    task: PoolingTask
    pooling: Pooling | None = None
    modules: tuple[Module, ...] = ()
    normalize: bool = False
    head: Classifier | LogitScore | None = None
    activation: str = "Identity"
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    matryoshka: frozenset[int] | None = None
    has_types: bool = True
    has_pair_template: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    is_assumed: bool = False
    unserved_head: str = ""

    def context_length(self, settings: EngineConfig, positions: int) -> int:
        """Return how many tokens a sequence may have: as asked for, else as the files say."""
        if settings.max_model_len is not None:
            return positions
        return min(positions, self.max_seq_length or positions)

    @property
    def architecture(self) -> str:
        """Return the first of config.json's `architectures`, empty where there is none."""
        return _architecture(self.config)


def is_pooling_model(config: Mapping[str, Any], settings: EngineConfig) -> bool:
    """Say whether a model gives vectors or scores: as the settings say, else by its files."""
    if settings.runner != "auto":
        return settings.runner == "pooling"
    if settings.convert in ("embed", "classify"):
        return True
    said = overridden(config, settings)
    architecture = _architecture(said)
    if _kind(said) in ENCODER_TYPES or architecture.endswith(_SCORES):
        return True
    if architecture.endswith("Model") and not architecture.endswith(_WRITES):
        return True
    return bool(said) and ModelFiles(settings.model).has(MODULES)


def read_pooling_config(config: Mapping[str, Any], settings: EngineConfig) -> PoolingConfig | None:
    """Return what a model gives by its config.json and its other files, None if it generates.

    Raises `ModelRefused`, which names the file and what is wrong in it.
    """
    if not is_pooling_model(config, settings):
        return None
    said = overridden(config, settings)
    files = ModelFiles(settings.model)
    stack = read_stack(files)
    told = SavedFields(files, "--pooler-config", settings.pooler_config)
    if _task(said, settings, files, stack) == "score":
        return _scores_as_told(_of_scores(said, files, stack), told)
    unserved_head = _unserved_head(said, settings, files) if stack is None else ""
    read = replace(_of_vectors(said, files, stack), unserved_head=unserved_head)
    return _vectors_as_told(read, told)


def _task(
    said: Mapping[str, Any], settings: EngineConfig, files: ModelFiles, stack: Stack | None
) -> PoolingTask:
    if settings.convert == "embed":
        return "embed"
    if settings.convert == "classify" or "classifier_from_token" in said:
        return "score"
    if stack is None:
        return "score" if _architecture(said).endswith(_SCORES) else "embed"
    kind = files.fields(_SAVED_MODEL).text("model_type", "SentenceTransformer")
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        raise files.refusal(
            f"it is a {kind}, which gives neither one vector for a text nor scores."
        )
    return "embed" if kind == "SentenceTransformer" else "score"


def _unserved_head(said: Mapping[str, Any], settings: EngineConfig, files: ModelFiles) -> str:
    """Return the class of an encoder's head that is left out, empty where it has none.

    Raises `ModelRefused` for a head that was trained for a task, unless vectors were asked for.
    """
    architecture = _architecture(said)
    if _kind(said) not in ENCODER_TYPES or "For" not in architecture:
        return ""
    if settings.convert != "embed" and not architecture.endswith(_LANGUAGE_HEADS):
        raise files.refusal(
            f"it has a trained head ({architecture}) that no endpoint serves. `--convert embed` "
            "leaves the head out and serves vectors."
        )
    return architecture


def _of_vectors(said: Mapping[str, Any], files: ModelFiles, stack: Stack | None) -> PoolingConfig:
    modules: tuple[Module, ...] = ()
    kind = _kind(said)
    if kind in _TWO_TOWERS:
        raise files.refusal(f"model type {kind!r} compares texts with what is none: not served.")
    if stack is None:
        looks_both_ways = kind in ENCODER_TYPES and not said.get("is_decoder")
        pooling = Pooling(("cls" if looks_both_ways else "lasttoken",))
        normalize = True
    else:
        if stack.pooling is None or stack.gives_scores:
            raise files.refusal(f"by {MODULES} it gives no vector for a text.")
        pooling, modules = stack.pooling, stack.modules
        normalize = modules[-1:] == (Normalize(),)
        modules = modules[:-1] if normalize else modules
    return PoolingConfig(
        config=said,
        task="embed",
        pooling=pooling,
        modules=modules,
        normalize=normalize,
        matryoshka=_matryoshka(SavedFields(files, _CONFIG, said)),
        is_assumed=stack is None,
        **_of_texts(files),
    )


def _of_scores(said: Mapping[str, Any], files: ModelFiles, stack: Stack | None) -> PoolingConfig:
    config = SavedFields(files, _CONFIG, said)
    pooling: Pooling | None = None
    modules: tuple[Module, ...] = ()
    head: Classifier | LogitScore | None = None
    num_labels, where = 1, ""
    if "classifier_from_token" in said:
        head = _head_of_tokens(config, files)
    elif stack is not None and stack.logit_score is not None:
        head = stack.logit_score
    elif stack is not None and stack.gives_scores:
        pooling, modules = stack.pooling, stack.modules
        num_labels = max(m.out_features for m in modules[-1:] if isinstance(m, Dense))
        where = f"the last module of {MODULES}"
    else:
        num_labels, where = _num_labels(config)
        head = Classifier(num_labels)
    if num_labels != 1:
        raise files.refusal(
            f"it is a classifier of {num_labels} labels ({where}), which no endpoint serves yet: "
            "scores need a head of one label."
        )
    return PoolingConfig(
        config=said,
        task="score",
        pooling=pooling,
        modules=modules,
        head=head,
        activation=_activation(config, files),
        has_pair_template=stack is not None and stack.reads_messages,
        template_variables={} if stack is None else stack.template_variables,
        **_of_texts(files),
    )


def _vectors_as_told(read: PoolingConfig, told: SavedFields) -> PoolingConfig:
    """Return a description in which a person's word on pooling stands above the files."""
    told.only(*_POOLING_NAMES, *_ACTIVATION_NAMES)
    for name in _POOLING_NAMES:
        if told.said.get(name) is not None:
            mode = _TOLD_MODES.get(told.text(name, "").upper())
            if mode is None:
                raise told.wrong(name)
            read = replace(read, pooling=Pooling((mode,)), is_assumed=False)
    for name in _ACTIVATION_NAMES:
        read = replace(read, normalize=told.flag(name, default=read.normalize))
    return read


def _scores_as_told(read: PoolingConfig, told: SavedFields) -> PoolingConfig:
    """Return a description whose scores go through no activation where a person says so."""
    told.only(*_ACTIVATION_NAMES)
    is_plain = not all(told.flag(name, default=True) for name in _ACTIVATION_NAMES)
    return replace(read, activation="Identity") if is_plain else read


def _num_labels(config: SavedFields) -> tuple[int, str]:
    """Return how many labels the network's own head has, and what says so."""
    labels = config.said.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels), f"`id2label` in {_CONFIG}"
    count = config.optional_count("num_labels")
    if count is not None:
        return count, f"`num_labels` in {_CONFIG}"
    return _DEFAULT_LABELS, f"the default: {_CONFIG} has neither `id2label` nor `num_labels`"


def _head_of_tokens(config: SavedFields, files: ModelFiles) -> LogitScore:
    """Return the head of a decoder that answers by one of two tokens, or by how likely one is.

    As vLLM's `--hf-overrides` have it: `classifier_from_token` [no, yes] with
    `is_original_qwen3_reranker` or the method from_2_way_softmax; or one token without that.
    """
    tokens = config.said["classifier_from_token"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise config.wrong("classifier_from_token")
    method = config.text("method", "no_post_processing")
    if config.flag("is_original_qwen3_reranker", default=False):
        method = "from_2_way_softmax"
    ids = [_token_id(token, config, files) for token in tokens]
    match method, ids:
        case "from_2_way_softmax", [false_id, true_id]:
            return LogitScore(true_id, false_id)
        case "no_post_processing", [true_id]:
            return LogitScore(true_id, None)
    raise config.wrong("classifier_from_token")


def _token_id(token: str, config: SavedFields, files: ModelFiles) -> int:
    from tokenizers import Tokenizer

    path = files.find("tokenizer.json")
    try:
        token_id = path and Tokenizer.from_file(str(path)).token_to_id(token)
    except Exception as exc:
        raise files.refusal(f"tokenizer.json cannot be read: {first_line_of(exc)}") from exc
    if not isinstance(token_id, int):
        raise config.wrong("classifier_from_token")
    return token_id


def _activation(config: SavedFields, files: ModelFiles) -> str:
    """Return what a score goes through: the sigmoid unless sentence-transformers says otherwise.

    Version 6 keeps it in a file of its own, 4 and 5 in config.json, those before under a long name.
    """
    saved = files.fields(_SAVED_MODEL)
    if saved.said.get("activation_fn") is not None:
        return saved.activation("activation_fn", "Sigmoid")
    told = config.said.get("sentence_transformers")
    if isinstance(told, dict) and told.get("activation_fn") is not None:
        return SavedFields(files, _CONFIG, told).activation("activation_fn", "Sigmoid")
    return config.activation(_OLD_ACTIVATION, "Sigmoid")


def _of_texts(files: ModelFiles) -> dict[str, Any]:
    """Return what is said of texts before they are tokens."""
    limits, saved = files.text_fields(), files.fields(_SAVED_MODEL)
    tokenizer = files.fields("tokenizer_config.json").said
    inputs = tokenizer.get("model_input_names")
    prompts = {name: p for name, p in saved.object("prompts").items() if p is not None}
    if not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise saved.wrong("prompts")
    default = saved.said.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise saved.wrong("default_prompt_name")
    return {
        "max_seq_length": limits.optional_count("max_seq_length") or _limit(tokenizer),
        "do_lower_case": limits.flag("do_lower_case", default=False),
        "prompts": prompts,
        "default_prompt_name": default,
        "has_types": not isinstance(inputs, list) or "token_type_ids" in inputs,
    }


def _limit(tokenizer: Mapping[str, Any]) -> int | None:
    """Return how long the tokenizer says that texts may be; a number beyond all says nothing."""
    said = tokenizer.get("model_max_length")
    return int(said) if isinstance(said, int | float) and 0 < said < _NO_LIMIT else None


def _matryoshka(config: SavedFields) -> frozenset[int] | None:
    widths = config.said.get("matryoshka_dimensions")
    if widths is None:
        return frozenset() if config.flag("is_matryoshka", default=False) else None
    if not isinstance(widths, list) or not all(type(w) is int and w > 0 for w in widths):
        raise config.wrong("matryoshka_dimensions")
    return frozenset(widths)


def _kind(said: Mapping[str, Any]) -> str:
    kind = said.get("model_type")
    return kind if isinstance(kind, str) else ""


def _architecture(said: Mapping[str, Any]) -> str:
    architectures = said.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""
