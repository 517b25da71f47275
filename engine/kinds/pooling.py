"""Pooling: models that read a text, or a pair, once and give a vector or a score for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.endpoints import encoder_endpoints
from engine.endpoints.encodings import EncoderModel
from engine.endpoints.pairs import ACTIVATIONS
from engine.errors import EngineError, ModelRefused
from engine.kernels.backends import spare_torch_its_threads
from engine.kinds.beginning import begun
from engine.kinds.kind import Loaded, refuse_settings_of_text
from engine.model.description import read_description
from engine.model.encoders.description import EncoderDescription, describe, takes
from engine.model.encoders.loading import load_encoder
from engine.model.encoders.network import LoadedEncoder
from engine.model.encoders.saved_modules import ModelFiles
from engine.model.placement import step_limits
from engine.scheduling.encoding import EncodingRequest, EncodingResult
from engine.stepping.encoding import EncodingWork
from engine.text.chat_template import ChatTemplate, read_chat_template
from engine.text.reader import TextReader
from engine.text.tokenizer import load_tokenizer
from engine.text.vocabulary import Vocabulary


class PoolingModels:
    """The kind of models that give vectors or scores."""

    def takes(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Take what the settings call so, else what its files do."""
        return takes(description, config)

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> Loaded[EncodingRequest, EncodingResult]:
        """Load model and vocabulary beside each other, and begin to encode."""
        refuse_settings_of_text(config, "vectors or scores")
        template = None if chat_template is None else read_chat_template(chat_template)
        description = read_encoder(config)

        def make() -> tuple[LoadedEncoder, EncodingWork]:
            model = load_encoder(config, description)
            model = replace(model, max_model_len=_context(config, description, model))
            return model, make_work(model, config)

        with begun(config, folder, make) as (engine, model, vocabulary):
            known = encoder_model(config.model, description, vocabulary, model, template=template)
        notes = (*_notes_of(description), *model.notes)
        return Loaded(engine, encoder_endpoints(known), model.device, notes=notes)


def read_encoder(config: EngineConfig) -> EncoderDescription:
    """Return what `config.model` gives; `ModelRefused` for what no endpoint could show."""
    read_description(config.model)  # which says what is wrong with a config.json
    description = describe(ModelFiles(config.model).fields("config.json").said, config)
    if description is None:
        raise ModelRefused(f"{config.model} gives neither vectors nor scores.")
    if description.task == "score" and description.activation not in ACTIVATIONS:
        raise ModelRefused(
            f"{config.model}: a score that goes through {description.activation} is not supported."
        )
    return description


def make_work(model: LoadedEncoder, config: EngineConfig) -> EncodingWork:
    """Give a loaded model its steps."""
    if not model.network.needs_torch:
        spare_torch_its_threads(model.device)
    limits = step_limits(config, model.device)
    return EncodingWork(model, limits.max_num_batched_tokens, limits.max_num_seqs)


def encoder_model(
    name: str,
    description: EncoderDescription,
    vocabulary: Vocabulary,
    model: LoadedEncoder,
    *,
    template: str | None,
) -> EncoderModel:
    """Return what the endpoints know of a model; `template` stands in for its own."""
    tokenizer = load_tokenizer(name, vocabulary, model.vocab_size)
    if vocabulary.backend is None:
        raise ModelRefused(f"{name}: its tokenizer is none of the tokenizers library.")
    reads_pairs = description.task == "score" and (
        template is not None or description.has_pair_template
    )
    return EncoderModel(
        reader=TextReader(tokenizer, model.max_model_len, is_lower_case=description.do_lower_case),
        template=_template(name, vocabulary, template),
        reads_pairs_by_template=reads_pairs,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        width=model.width,
        has_types=model.num_types > 1 and description.has_types,
        description=description,
    )


def _notes_of(description: EncoderDescription) -> tuple[str, ...]:
    if not description.is_assumed or description.pooling is None:
        return ()
    which = "first" if description.pooling.modes == ("cls",) else "last"
    note = (
        f"no file says how this model's vectors are made: each is its {which} token's, at length 1,"
        " as vLLM has it; `--pooler-config` says otherwise"
    )
    return (note,)


def _context(config: EngineConfig, description: EncoderDescription, model: LoadedEncoder) -> int:
    """Return how many tokens a sequence may have: as asked for, else as the model's files say."""
    if config.max_model_len is not None:
        return model.max_model_len
    return min(model.max_model_len, description.max_seq_length or model.max_model_len)


def _template(name: str, vocabulary: Vocabulary, source: str | None) -> ChatTemplate | None:
    if source is None and not vocabulary.chat_template:
        return None
    try:
        return ChatTemplate(vocabulary, source=source)
    except EngineError as exc:
        raise EngineError(f"{name}: {exc}") from exc
