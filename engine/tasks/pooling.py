"""Pooling: models that compute a vector, a score or the answers of a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..endpoints import encoder_endpoints
from ..endpoints.classification import LABEL_ACTIVATIONS
from ..endpoints.decisions.option_markers import MARKS
from ..endpoints.encoder_requests import EncoderModel
from ..endpoints.scoring import ACTIVATIONS
from ..errors import ModelRefused
from ..kernels.backends import limit_torch_threads
from ..loop.cuda_graphs import capture_on, max_graph_tokens
from ..loop.encoding import EncodingCore
from ..model.config.device import StepLimits, step_limits
from ..model.config.hf_config import read_hf_config
from ..model.encoders.decision_heads import CodeReadout, MarkerHead
from ..model.encoders.loaded_encoder import LoadedEncoder
from ..model.encoders.loading import load_encoder
from ..model.encoders.pooling_config import PoolingConfig, is_pooling_model, read_pooling_config
from ..scheduling.encoding import EncodingRequest, EncodingResult
from ..text.chat_template import ChatTemplate, read_chat_template
from ..text.text_tokens import TokenLocator
from ..text.tokenizer import load_tokenizer
from ..text.truncation import TruncatingTokenizer
from ..text.vocabulary import Vocabulary
from .task import (
    LoadedTask,
    checked_truncation,
    image_support_of,
    refuse_generation_settings,
    start_engine,
)


class PoolingTask:
    """The kind of embedding models, rerankers and decision models."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Match by the settings, or else by the model's files."""
        return is_pooling_model(description, config)

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[EncodingRequest, EncodingResult]:
        """Load model and vocabulary in parallel, and start to encode."""
        refuse_generation_settings(config, "an embedding model or reranker")
        template = None if chat_template is None else read_chat_template(chat_template)
        description = read_encoder(config)

        def make() -> tuple[LoadedEncoder, EncodingCore]:
            model = load_encoder(config, description)
            max_model_len = description.context_length(config, model.max_model_len)
            model = replace(model, max_model_len=max_model_len)
            return model, make_core(model, config)

        with start_engine(config, folder, make) as (engine, model, vocabulary):
            encoder = encoder_model(config.model, description, vocabulary, model, template=template)
            truncation = checked_truncation(config, model.max_model_len)
            encoder = replace(encoder, truncate_prompt_tokens=truncation)
            if (tower := model.image_tower) is not None:
                images = image_support_of(tower.form, config)
                encoder = replace(encoder, images=images, num_image_tokens=tower.num_tokens)
        notes = (*_notes_of(description), *model.notes)
        most = limits_of(model, config).max_num_seqs
        endpoints = encoder_endpoints(encoder)
        return LoadedTask(engine, endpoints, model.device, notes=notes, max_num_seqs=most)


def read_encoder(config: EngineConfig) -> PoolingConfig:
    """Return the pooling of `config.model`; raise `ModelRefused` if no endpoint supports it."""
    hf_config = read_hf_config(config.model)
    description = read_pooling_config(hf_config.raw, config)
    if description is None:
        raise ModelRefused(f"{config.model} is neither an embedding model nor a reranker.")
    is_classifier = description.task in ("classify", "token_classify")
    if description.activation not in (LABEL_ACTIVATIONS if is_classifier else ACTIVATIONS):
        kind = "label" if is_classifier else "score"
        raise ModelRefused(
            f"{config.model}: {kind} activation {description.activation} is not supported."
        )
    return description


def make_core(model: LoadedEncoder, config: EngineConfig) -> EncodingCore:
    """Return the engine core of a loaded model."""
    if not model.network.needs_torch:
        limit_torch_threads(model.device)
    limits, steps_ahead = limits_of(model, config), config.steps_ahead
    if steps_ahead is None:
        steps_ahead = int(model.device.type == "cuda")
    return EncodingCore(
        model,
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        steps_ahead,
        capture_on(model.device),
    )


def limits_of(model: LoadedEncoder, config: EngineConfig) -> StepLimits:
    """Return the limits of a model's steps."""
    is_known = model.device.type == "cuda" and model.max_intermediate_size
    return step_limits(config, model.device, max_graph_tokens(model) if is_known else 0)


def encoder_model(
    name: str,
    description: PoolingConfig,
    vocabulary: Vocabulary,
    model: LoadedEncoder,
    *,
    template: str | None,
) -> EncoderModel:
    """Return the endpoints' view of a model; `template` replaces its own."""
    skipped_ids = _read_marks(vocabulary, description)
    tokenizer = load_tokenizer(name, vocabulary, model.vocab_size)
    if vocabulary.backend is None:
        raise ModelRefused(f"{name}: its tokenizer is not supported by the tokenizers library.")
    needs_template = isinstance(description.head, CodeReadout)
    if needs_template and template is None and not vocabulary.chat_template:
        raise ModelRefused(
            f"{name}: it has no chat template, which its decisions need: copy or fetch the model "
            "again, or pass `--chat-template`."
        )
    special_tokens = {
        key: (text, token)
        for key, text in vocabulary.special_tokens.items()
        if (token := tokenizer.special_id(text)) is not None
    }
    if isinstance(description.head, MarkerHead) and (lost := MARKS - special_tokens.keys()):
        raise ModelRefused(f"{name}: its tokenizer has no {min(lost)}, which its decisions need.")
    padding, text_form = special_tokens.get("pad_token"), model.text_form
    if text_form is not None and text_form.length is not None:
        if padding is None:
            raise ModelRefused(f"{name}: its tokenizer has no pad_token, which its texts need.")
        text_form = replace(text_form, length=model.max_model_len)
    labels_tokens = description.task == "token_classify"
    unknown = special_tokens.get("unk_token")
    reads_pairs = description.task == "score" and (
        template is not None or description.has_pair_template
    )
    return EncoderModel(
        reader=TruncatingTokenizer(
            tokenizer,
            model.max_model_len,
            is_lower_case=description.do_lower_case,
            has_offsets=labels_tokens,
        ),
        template=_template(name, vocabulary, template),
        reads_pairs_by_template=reads_pairs,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        width=model.width,
        has_types=model.num_types > 1 and description.has_types,
        description=description,
        special_tokens=special_tokens,
        locator=TokenLocator(vocabulary.backend, unknown and unknown[1]) if labels_tokens else None,
        skipped_ids=skipped_ids,
        text_form=text_form,
        padding_id=0 if padding is None else padding[1],
        query_padding_id=find_padding_id(name, description, vocabulary, model),
    )


def find_padding_id(
    name: str, description: PoolingConfig, vocabulary: Vocabulary, model: LoadedEncoder
) -> int | None:
    """Return the token that pads a ColBERT model's queries; None if they are not, or cannot be.

    A causal network would have to be padded on the left.
    """
    mode = description.multi_vector
    is_causal = model.recurrent_shapes or any(shape.is_causal for shape in model.shapes)
    if mode is None or mode.expansion is None or is_causal:
        return None
    expansion = mode.expansion
    if expansion.length > model.max_model_len:
        raise ModelRefused(
            f"{name}: its queries are padded to {expansion.length} tokens, but the context length "
            f"is {model.max_model_len}: raise `--max-model-len`."
        )
    names = [vocabulary.special_tokens.get(key) for key in ("mask_token", "eos_token")]
    token = expansion.token or next(filter(None, names), None)
    padding_id: int | None = vocabulary.backend.token_to_id(token) if token else None
    if padding_id is None:
        missing = repr(token) if token else "mask token"
        raise ModelRefused(f"{name}: its tokenizer has no {missing} to pad its queries with.")
    return padding_id


def _read_marks(vocabulary: Vocabulary, description: PoolingConfig) -> frozenset[int]:
    """Let a ColBERT model's prefixes be read as one token; return the ids of its skipped words.

    Words and prefixes that the vocabulary does not contain are plain text, as in
    sentence-transformers.
    """
    backend, mode = vocabulary.backend, description.multi_vector
    if backend is None or mode is None:
        return frozenset()
    for prefix in description.prefixes:
        marks = (prefix, prefix.split()[0])
        known = [mark for mark in marks if backend.token_to_id(mark) is not None]
        if known and backend.encode(known[0], add_special_tokens=False).tokens != known[:1]:
            backend.add_special_tokens([AddedToken(known[0], normalized=False, special=True)])
    unknown = vocabulary.special_tokens.get("unk_token")
    ids = {backend.token_to_id(word) for word in mode.skipped_words}
    return frozenset(ids - {None, backend.token_to_id(unknown) if unknown else None})


def _notes_of(description: PoolingConfig) -> tuple[str, ...]:
    notes = []
    if description.unserved_head:
        head = description.unserved_head
        instead = ""
        if head.endswith("ForMaskedLM"):
            instead = '; for SPLADE, pass `--pooler-config \'{"pooling_type": "SPLADE"}\'`'
        notes.append(f"this model's head ({head}) is not used, only its vectors{instead}")
    if description.is_assumed and description.pooling is not None:
        position = "first" if description.pooling.modes == ("cls",) else "last"
        notes.append(
            f"this model's files do not define pooling: the {position} token's vector is used, "
            "with length 1, as in vLLM; pass `--pooler-config` to change it"
        )
    return tuple(notes)


def _template(name: str, vocabulary: Vocabulary, source: str | None) -> ChatTemplate | None:
    if source is None and not vocabulary.chat_template:
        return None
    try:
        return ChatTemplate(vocabulary, source=source)
    except EngineError as exc:
        raise EngineError(f"{name}: {exc}") from exc
