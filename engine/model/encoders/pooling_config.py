"""Pooling config: whether a model computes embeddings, scores or labels, and how it pools.

It is read from `config.json` and the files of sentence-transformers. Without the latter, vLLM's
defaults apply: the first token of an encoder, the last of a decoder, normalised to length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from string import punctuation
from typing import Any, Literal

from ...config import EngineConfig
from ...errors import first_line_of
from ..families.overrides import overridden
from ..families.refused_types import refusal_of_head, use_of_head
from .decision_heads import (
    DecisionHead,
    MarkerHead,
    as_attending,
    has_decision_head,
    read_decision_head,
)
from .labels import activation_of_labels, count_labels, read_labels
from .sentence_transformers import (
    MODULES,
    SAVED_MODEL,
    Dense,
    LayerNorm,
    LogitScore,
    ModelFiles,
    Module,
    MultiVector,
    Normalize,
    Pooling,
    PoolingMode,
    SavedFields,
    Splade,
    Stack,
    read_stack,
    with_padded_queries,
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

PoolingTask = Literal[
    "embed", "embed_sparse", "token_embed", "score", "classify", "token_classify", "decide"
]

# Bidirectional networks that do not generate text, by `model_type`.
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
_OLD_ACTIVATION = "sbert_ce_default_activation_function"
_SCORES = "ForSequenceClassification"
_TAGS = "ForTokenClassification"
# Heads for pre-training of an encoder, which are left out.
_LANGUAGE_HEADS = ("ForMaskedLM", "ForPreTraining", "ForCausalLM")
# Networks whose names end in "Model" but which have a head to generate text.
_WRITES = ("LMHeadModel", "ChatModel")
# Networks of a tower of texts and one of images: see `two_towers`.
TWO_TOWERS = frozenset({"clip", "siglip"})
# Other networks of two towers whose projected vectors are compared, and their parts.
_OTHER_TOWERS = frozenset(
    """
    align altclip blip chinese_clip clap clip_text_model clip_vision_model clipseg clvp flava
    groupvit metaclip_2 owlv2 owlvit siglip2 siglip_text_model siglip_vision_model
    siglip2_text_model siglip2_vision_model vision-text-dual-encoder xclip
    """.split()
)
# Networks that read the positions of words on a page, markup or an image next to the text.
_READS_PAGES = frozenset(
    "bros layoutlm layoutlmv2 layoutlmv3 layoutxlm lilt markuplm udop vilt".split()
)
# Names as in vLLM, older ones last.
_POOLING_NAMES = ("pooling_type", "seq_pooling_type")
_ACTIVATION_NAMES = ("normalize", "use_activation")
_MODES_BY_NAME: dict[str, PoolingMode] = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
_NO_LIMIT = 10**9
# Pooling of masked language models, as an option.
_SPLADE = "SPLADE"
# ColBERT of its first authors: the class, the layer for tokens and the settings of training.
_COLBERT, _COLBERT_BASE, _COLBERT_SETTINGS = "HF_ColBERT", "BertModel", "artifact.metadata"
_COLBERT_WIDTH = 128
# BGE-M3's heads next to its network: a weight and a vector of each token.
SPARSE_LINEAR, MULTI_VECTOR_LINEAR = "sparse_linear.pt", "colbert_linear.pt"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The network's own head, which gives `num_labels` numbers of a sequence or of each token.

    With `is_language` it is that of a masked language model.
    """

    num_labels: int
    is_per_token: bool = False
    is_language: bool = False


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling, modules and head with which a model embeds, scores, classifies or decides.

    `config` is config.json after `--hf-overrides`. Vectors are made by `pooling`, then `modules` in
    order. Scores are made by `head`, or by pooling and modules, the last of which gives one number;
    the answers of decisions are made by `head`. A classifier gives a number for each of `labels`,
    which a score of one label also has; `token_classify` does so for each token.
    The endpoint then normalises vectors to length 1 if `normalize`, and passes scores through
    `activation`, a class of torch.nn. `max_seq_length` None means no limit. `prompts` are put
    before a text by their names. `matryoshka` are the widths that vectors may be cut to: empty for
    any, None for none. The segments of a pair are distinguished if `has_types`; the chat template
    renders a pair if `has_pair_template`, with `template_variables`. `is_assumed` is set if neither
    a file nor an option defines the pooling. `unserved_head` is the class of a head in the files
    that no endpoint serves, empty without one.
    Sparse vectors are made of the logits of `head` as `splade` says. The vectors of tokens, of task
    `token_embed`, are made by `modules`, and have the settings `multi_vector`. With `has_m3_heads`
    the files of BGE-M3 also contain heads for weights and vectors of tokens. `prefixes` are texts
    that the model reads as one token each.
    """

    config: Mapping[str, Any]
    task: PoolingTask
    pooling: Pooling | None = None
    modules: tuple[Module, ...] = ()
    normalize: bool = False
    head: Classifier | LogitScore | DecisionHead | None = None
    activation: str = "Identity"
    labels: tuple[str, ...] = ()
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
    splade: Splade | None = None
    multi_vector: MultiVector | None = None
    has_m3_heads: bool = False
    prefixes: tuple[str, ...] = ()

    def context_length(self, settings: EngineConfig, positions: int) -> int:
        """Return the limit of a sequence in tokens: the requested one, else that of the files."""
        if settings.max_model_len is not None:
            return positions
        return min(positions, self.max_seq_length or positions)

    @property
    def has_two_towers(self) -> bool:
        """Return whether images have vectors, too, in the same space as texts."""
        return self.task == "embed" and _kind(self.config) in TWO_TOWERS

    @property
    def architecture(self) -> str:
        """Return the first of config.json's `architectures`, empty if there is none."""
        return first_class(self.config)


def is_pooling_model(config: Mapping[str, Any], settings: EngineConfig) -> bool:
    """Return whether a model computes vectors or scores, by the settings, else by its files."""
    if settings.runner != "auto":
        return settings.runner == "pooling"
    if settings.convert in ("embed", "classify"):
        return True
    raw = overridden(config, settings)
    architecture = first_class(raw)
    if _kind(raw) in ENCODER_TYPES or architecture.endswith((_SCORES, _TAGS)):
        return True
    if architecture.endswith("Model") and not architecture.endswith(_WRITES):
        return True
    files = ModelFiles(settings.model)
    return bool(raw) and (has_decision_head(raw, files) or files.has(MODULES))


def read_pooling_config(config: Mapping[str, Any], settings: EngineConfig) -> PoolingConfig | None:
    """Return a model's pooling by its config.json and other files, None if it generates text.

    Raises `ModelRefused`, which names the file and the problem in it.
    """
    if not is_pooling_model(config, settings):
        return None
    raw = overridden(config, settings)
    files = ModelFiles(settings.model)
    if _kind(raw) in _READS_PAGES:
        raise files.refusal(
            f"model type {_kind(raw)!r} also reads the layout, markup or image of a page, which no "
            "endpoint accepts."
        )
    options = SavedFields(files, "--pooler-config", settings.pooler_config)
    head = read_decision_head(raw, files) if settings.convert == "auto" else None
    if head is not None:
        options.only()
        return _of_decisions(raw, files, head)
    stack = read_stack(files)
    if (splade := _splade_by_option(raw, files, options)) is not None:
        own = None if stack is None else stack.splade
        return _of_sparse(raw, files, own or splade)
    task = _task(raw, settings, files, stack)
    if task in ("embed_sparse", "token_embed"):
        options.only()
        assert stack is not None or task == "token_embed"
        if stack is None or stack.splade is None:
            return _of_multi_vectors(raw, files, stack)
        return _of_sparse(raw, files, stack.splade)
    if task == "token_classify":
        options.only()
        return _of_tokens(raw, files)
    if task == "score":
        return _scores_with(_of_scores(raw, files, stack), options)
    unserved_head = _unserved_head(raw, settings, files) if stack is None else ""
    read = replace(_of_vectors(raw, files, stack), unserved_head=unserved_head)
    return _vectors_with(read, options)


def _task(
    raw: Mapping[str, Any], settings: EngineConfig, files: ModelFiles, stack: Stack | None
) -> PoolingTask:
    if settings.convert == "embed":
        return "embed"
    if stack is None and first_class(raw).endswith(_TAGS):
        return "token_classify"
    if settings.convert == "classify" or "classifier_from_token" in raw:
        return "score"
    if stack is None:
        if first_class(raw) == _COLBERT:
            return "token_embed"
        return "score" if first_class(raw).endswith(_SCORES) else "embed"
    if stack.splade is not None:
        return "embed_sparse"
    if stack.multi_vector is not None:
        return "token_embed"
    kind = files.fields(SAVED_MODEL).text("model_type", "SentenceTransformer")
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        raise files.refusal(
            f"it is a {kind}, which computes neither one vector per text nor scores."
        )
    return "embed" if kind == "SentenceTransformer" else "score"


def _unserved_head(raw: Mapping[str, Any], settings: EngineConfig, files: ModelFiles) -> str:
    """Return the class of a head that is left out, empty if it has none.

    Raises `ModelRefused` for a head that was trained for a task, unless vectors were requested.
    """
    architecture = first_class(raw)
    is_encoder = _kind(raw) in ENCODER_TYPES and "For" in architecture
    if not is_encoder and use_of_head(architecture) is None:
        return ""
    if settings.convert != "embed" and not architecture.endswith(_LANGUAGE_HEADS):
        raise files.refusal(refusal_of_head(architecture))
    return architecture


def _of_vectors(raw: Mapping[str, Any], files: ModelFiles, stack: Stack | None) -> PoolingConfig:
    modules: tuple[Module, ...] = ()
    kind = _kind(raw)
    if kind in TWO_TOWERS:
        return PoolingConfig(config=raw, task="embed", normalize=True, **_of_texts(files))
    if kind in _OTHER_TOWERS:
        raise files.refusal(
            f"model type {kind!r} compares texts with another modality, which is not supported."
        )
    if stack is None:
        looks_both_ways = kind in ENCODER_TYPES and not raw.get("is_decoder")
        pooling = Pooling(("cls" if looks_both_ways else "lasttoken",))
        normalize = True
    else:
        if stack.pooling is None or stack.gives_scores:
            raise files.refusal(f"according to {MODULES} it does not compute a vector for a text.")
        pooling, modules = stack.pooling, stack.modules
        normalize = modules[-1:] == (Normalize(),)
        modules = modules[:-1] if normalize else modules
    return PoolingConfig(
        config=raw,
        task="embed",
        pooling=pooling,
        modules=modules,
        normalize=normalize,
        matryoshka=_matryoshka(SavedFields(files, _CONFIG, raw)),
        is_assumed=stack is None,
        has_m3_heads=kind == "xlm-roberta"
        and files.has(SPARSE_LINEAR)
        and files.has(MULTI_VECTOR_LINEAR),
        **_of_texts(files),
    )


def _splade_by_option(
    raw: Mapping[str, Any], files: ModelFiles, options: SavedFields
) -> Splade | None:
    """Return SPLADE's pooling if the options name it; None if they do not."""
    name = next((name for name in _POOLING_NAMES if options.fields.get(name) is not None), None)
    if name is None or options.text(name, "").upper() != _SPLADE:
        return None
    options.only(*_POOLING_NAMES)
    if not first_class(raw).endswith("ForMaskedLM"):
        raise files.refusal(
            f"--pooler-config has {name} {_SPLADE!r}, which needs a masked language model "
            f"(ForMaskedLM); config.json has the class {first_class(raw) or 'of none'}."
        )
    return Splade()


def _of_sparse(raw: Mapping[str, Any], files: ModelFiles, splade: Splade) -> PoolingConfig:
    count = SavedFields(files, _CONFIG, raw).count("vocab_size")
    head = Classifier(count, is_per_token=True, is_language=True)
    return PoolingConfig(
        config=raw, task="embed_sparse", head=head, splade=splade, **_of_texts(files)
    )


def _of_multi_vectors(
    raw: Mapping[str, Any], files: ModelFiles, stack: Stack | None
) -> PoolingConfig:
    """Return the description of a ColBERT model; without modules, of its first authors'."""
    if stack is None:
        return _of_first_colbert(raw, files)
    assert stack.multi_vector is not None
    modules, saved = stack.modules, files.fields(SAVED_MODEL)
    normalize = modules[-1:] == (Normalize(),)
    texts = _of_texts(files)
    texts["prompts"] = {"query": "", "document": "", **texts["prompts"]}
    prefixes = {
        name: saved.text(f"{name}_prefix", "")
        for name in ("query", "document")
        if f"{name}_prefix" in saved.fields
    }
    for name, prefix in prefixes.items():
        prompt = texts["prompts"][name].removeprefix(prefix)
        texts["prompts"] = {**texts["prompts"], name: prefix + prompt}
    limit = files.text_fields().optional_count("document_length")
    limit = limit or saved.optional_count("document_length")
    texts["max_seq_length"] = limit or texts["max_seq_length"]
    return PoolingConfig(
        config=raw,
        task="token_embed",
        modules=modules[:-1] if normalize else modules,
        normalize=normalize,
        multi_vector=stack.multi_vector,
        prefixes=tuple(prefix for prefix in prefixes.values() if prefix.strip()),
        **texts,
    )


def _of_first_colbert(raw: Mapping[str, Any], files: ModelFiles) -> PoolingConfig:
    """Return the description of a checkpoint of the ColBERT library, with its settings if any."""
    settings = files.fields(_COLBERT_SETTINGS)
    width = settings.optional_count("dim") or _COLBERT_WIDTH
    marks = {
        "query": settings.text("query_token_id", "[unused0]"),
        "document": settings.text("doc_token_id", "[unused1]"),
    }
    texts = _of_texts(files)
    texts["prompts"] = {name: f"{mark} " for name, mark in marks.items()}
    texts["max_seq_length"] = settings.optional_count("doc_maxlen") or texts["max_seq_length"]
    skips = settings.flag("mask_punctuation", default=True)
    hidden = SavedFields(files, _CONFIG, raw).count("hidden_size")
    mode = MultiVector(tuple(punctuation) if skips else ())
    return PoolingConfig(
        # The class is the base model's with a layer, which is loaded apart.
        config={**raw, "architectures": [_COLBERT_BASE]},
        task="token_embed",
        modules=(Dense("", hidden, width, bias=False, activation="Identity"),),
        normalize=True,
        multi_vector=with_padded_queries(mode, settings, "query_maxlen"),
        prefixes=tuple(mark for mark in marks.values() if mark.strip()),
        **texts,
    )


def _of_scores(raw: Mapping[str, Any], files: ModelFiles, stack: Stack | None) -> PoolingConfig:
    config = SavedFields(files, _CONFIG, raw)
    pooling: Pooling | None = None
    modules: tuple[Module, ...] = ()
    head: Classifier | LogitScore | None = None
    num_labels = 0
    if "classifier_from_token" in raw:
        head = _head_of_tokens(config, files)
    elif stack is not None and stack.logit_score is not None:
        head = stack.logit_score
    elif stack is not None and stack.gives_scores:
        pooling, modules = stack.pooling, stack.modules
        num_labels = max(m.out_features for m in modules[-1:] if isinstance(m, Dense))
    else:
        num_labels = count_labels(config)
        head = Classifier(num_labels)
    has_one = num_labels <= 1
    return PoolingConfig(
        config=raw,
        task="score" if has_one else "classify",
        pooling=pooling,
        modules=modules,
        head=head,
        activation=_activation(config, files, has_one=has_one),
        labels=read_labels(config, num_labels),
        has_pair_template=stack is not None and stack.reads_messages,
        template_variables={} if stack is None else stack.template_variables,
        **_of_texts(files),
    )


def _of_tokens(raw: Mapping[str, Any], files: ModelFiles) -> PoolingConfig:
    config = SavedFields(files, _CONFIG, raw)
    count = count_labels(config)
    return PoolingConfig(
        config=raw,
        task="token_classify",
        head=Classifier(count, is_per_token=True),
        activation="Softmax",
        labels=read_labels(config, count),
        **_of_texts(files),
    )


def _of_decisions(raw: Mapping[str, Any], files: ModelFiles, head: DecisionHead) -> PoolingConfig:
    read = PoolingConfig(
        config=as_attending(raw, head), task="decide", head=head, **_of_texts(files)
    )
    return replace(read, max_seq_length=head.max_tokens) if isinstance(head, MarkerHead) else read


def _vectors_with(read: PoolingConfig, options: SavedFields) -> PoolingConfig:
    """Return a description in which the pooling options override the files."""
    names = () if read.has_two_towers else _POOLING_NAMES
    options.only(*names, *_ACTIVATION_NAMES)
    for name in names:
        if options.fields.get(name) is not None:
            mode = _MODES_BY_NAME.get(options.text(name, "").upper())
            if mode is None:
                raise options.wrong(name)
            read = replace(read, pooling=Pooling((mode,)), is_assumed=False)
    for name in _ACTIVATION_NAMES:
        read = replace(read, normalize=options.flag(name, default=read.normalize))
    return read


def _scores_with(read: PoolingConfig, options: SavedFields) -> PoolingConfig:
    """Return a description whose scores have no activation if an option disables it."""
    options.only(*_ACTIVATION_NAMES)
    is_plain = not all(options.flag(name, default=True) for name in _ACTIVATION_NAMES)
    return replace(read, activation="Identity") if is_plain else read


def _head_of_tokens(config: SavedFields, files: ModelFiles) -> LogitScore:
    """Return the head of a decoder that answers with one of two tokens, or with one's likelihood.

    The fields are those of vLLM's `--hf-overrides`: `classifier_from_token` [no, yes] with
    `is_original_qwen3_reranker` or the method from_2_way_softmax; or one token without these.
    """
    tokens = config.fields["classifier_from_token"]
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


def _activation(config: SavedFields, files: ModelFiles, *, has_one: bool) -> str:
    """Return the activation that sentence-transformers' files set, else the default.

    That is the sigmoid of a score, and transformers' of several labels, which Identity leaves.
    """
    default = "Sigmoid" if has_one else activation_of_labels(config)
    saved = _saved_activation(config, files, default)
    return default if saved == "Identity" and not has_one else saved


def _saved_activation(config: SavedFields, files: ModelFiles, default: str) -> str:
    """Return the activation in sentence-transformers' files.

    Version 6 has a separate file, 4 and 5 use config.json, and older ones a long name.
    """
    saved = files.fields(SAVED_MODEL)
    if saved.fields.get("activation_fn") is not None:
        return saved.activation("activation_fn", default)
    section = config.fields.get("sentence_transformers")
    if isinstance(section, dict) and section.get("activation_fn") is not None:
        return SavedFields(files, _CONFIG, section).activation("activation_fn", default)
    return config.activation(_OLD_ACTIVATION, default)


def _of_texts(files: ModelFiles) -> dict[str, Any]:
    """Return the preparation of texts before they are tokenised."""
    limits, saved = files.text_fields(), files.fields(SAVED_MODEL)
    tokenizer = files.fields("tokenizer_config.json").fields
    inputs = tokenizer.get("model_input_names")
    prompts = {name: p for name, p in saved.object("prompts").items() if p is not None}
    if not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise saved.wrong("prompts")
    default = saved.fields.get("default_prompt_name")
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
    """Return the tokenizer's limit of tokens; a huge number means no limit."""
    limit = tokenizer.get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < _NO_LIMIT else None


def _matryoshka(config: SavedFields) -> frozenset[int] | None:
    widths = config.fields.get("matryoshka_dimensions")
    if widths is None:
        return frozenset() if config.flag("is_matryoshka", default=False) else None
    if not isinstance(widths, list) or not all(type(w) is int and w > 0 for w in widths):
        raise config.wrong("matryoshka_dimensions")
    return frozenset(widths)


def _kind(raw: Mapping[str, Any]) -> str:
    kind = raw.get("model_type")
    return kind if isinstance(kind, str) else ""


def first_class(raw: Mapping[str, Any]) -> str:
    """Return the first of a config.json's `architectures`, empty if there is none."""
    architectures = raw.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""
