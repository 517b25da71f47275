"""Generation: decoders that write text, behind chat and text completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..endpoints import text_endpoints, token_endpoints
from ..endpoints.endpoint import Endpoint
from ..endpoints.image_inputs import ImageSupport
from ..loop.assembly import make_core, measured_room
from ..loop.generation import GenerationCore
from ..model.families.overridden_config import read_overridden_config
from ..model.load_timing import timed
from ..model.loading import load_model
from ..model.network.kv_cache_size import KVCacheSize
from ..model.network.loaded_model import LoadedModel
from ..model.planning import plan_model
from ..parallel.leader import make_leader
from ..parsers.registry import ParserSet, check_parser_names, parser_notes, select_parsers
from ..scheduling.prompt_audio import AudioSpec
from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..storage.hub import find_folder
from ..structured_output.grammar_backend import GrammarBackend
from ..text.chat_template import ChatTemplate, read_chat_template
from ..text.text_model import GenerationConfig, TextModel, eos_ids, read_generation_config
from ..text.tokenizer import load_tokenizer
from ..text.vocabulary import Vocabulary, load_vocabulary, recall_vocabulary
from .task import LoadedTask, checked_truncation, image_support_of, start_engine


class GenerationTask:
    """The kind of every other model; it rejects models that are not decoders."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Match every model."""
        del description, config
        return True

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[SequenceRequest, SequenceResult]:
        """Load model and vocabulary in parallel, and start to generate."""
        if config.pooler_config:
            raise EngineError(
                f"{config.model} is a text generation model: --pooler-config requires an embedding "
                "model or reranker; remove it"
            )
        check_parser_names(tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser)
        template = None if chat_template is None else read_chat_template(chat_template)
        # transformers reads it too, but with less clear errors.
        generation = read_generation_config(config.model)

        ending = ExitStack()

        def make() -> tuple[tuple[LoadedModel, KVCacheSize], GenerationCore]:
            leader = make_leader(config)
            if leader is not None:
                ending.callback(leader.close)
            model = load_model(config, leader)
            free = None if leader is None else leader.free_bytes
            with timed("trial"):
                room = measured_room(model, config, free)
            return (model, room), make_core(model, room, config)

        with start_engine(config, folder, make, ending.close) as (
            engine,
            (model, room),
            vocabulary,
        ):
            text = load_text_model(
                config.model,
                vocabulary,
                template=template,
                generation=generation,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                max_model_len=room.max_model_len,
                max_logprobs=config.max_logprobs,
                truncate_prompt_tokens=checked_truncation(config, room.max_model_len),
            )
        parsers = _parsers_of(text, config)
        image_support, image_notes = _image_support(model, vocabulary, config)
        endpoints = text_endpoints(
            text,
            seed=config.seed,
            parsers=parsers,
            image_support=image_support,
            verifies=config.proof_rows,
            architecture=read_overridden_config(config).architecture,
        )
        return LoadedTask(
            engine,
            endpoints,
            model.device,
            online=token_endpoints(text, parsers=parsers),
            notes=(*_notes(model, room), *image_notes, *_parser_notes(parsers, config)),
        )


# The tokens that end a row of an image's tokens, and the image.
_BREAKS = ("[IMG_BREAK]", "[IMG_END]")


def _image_support(
    model: LoadedModel, vocabulary: Vocabulary, config: EngineConfig
) -> tuple[ImageSupport | None, tuple[str, ...]]:
    """Return a model's image support, or a note with the reason for its absence."""
    if model.vision_encoder is None:
        return None, ()
    image_spec = model.vision_encoder.image_spec
    hears = isinstance(image_spec, AudioSpec)
    marks = {one for one in (image_spec.mark, *image_spec.spelling) if not isinstance(one, str)}
    if unknown := marks - vocabulary.added.keys():
        what = "recordings" if hears else "images"
        note = f"{what} are disabled for this model: its vocabulary has no token {min(unknown)}"
        return None, (note,)
    breaks = tuple(vocabulary.added.get(one) for one in image_spec.breaks or ())
    if breaks not in ((), _BREAKS):
        note = (
            f"images are disabled for this model: its vocabulary has no "
            f"{' and '.join(_BREAKS)} as tokens {image_spec.breaks}"
        )
        return None, (note,)
    return image_support_of(image_spec, config), ()


def load_text_model(
    name: str,
    vocabulary: Vocabulary,
    *,
    template: str | None,
    generation: GenerationConfig,
    vocab_size: int,
    eos_token_ids: object,
    max_model_len: int,
    max_logprobs: int,
    truncate_prompt_tokens: int | None,
) -> TextModel:
    """Return the text side of a model: tokenizer, template, defaults, stop tokens.

    `eos_token_ids` has the form of the model's config.
    """
    tokenizer = load_tokenizer(name, vocabulary, vocab_size)
    chat_template = None
    if template is not None or vocabulary.chat_template:
        chat_template = load_chat_template(name, vocabulary, template)
    ends = eos_ids(name, generation, eos_token_ids, tokenizer)
    return TextModel(
        tokenizer=tokenizer,
        chat_template=chat_template,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=ends,
        grammars=GrammarBackend(tokenizer, vocab_size, ends),
        defaults=generation.defaults,
        max_logprobs=max_logprobs,
        truncate_prompt_tokens=truncate_prompt_tokens,
    )


def endpoints_without_weights(
    config: EngineConfig, chat_template: str | None
) -> Sequence[Endpoint[SequenceRequest, SequenceResult, Any]]:
    """Return the endpoints of a model from its config and vocabulary only.

    They prepare requests. Raises `EngineError` like a load.
    """
    source = None if chat_template is None else read_chat_template(chat_template)
    folder, hf_config = find_folder(config.model), read_overridden_config(config)
    vocabulary = recall_vocabulary(config.model, folder)
    max_model_len = plan_model(config).max_model_len
    text = load_text_model(
        config.model,
        vocabulary or load_vocabulary(config.model, folder),
        template=source,
        generation=read_generation_config(config.model),
        vocab_size=int(hf_config.fields["vocab_size"]),
        eos_token_ids=hf_config.fields.get("eos_token_id"),
        max_model_len=max_model_len,
        max_logprobs=config.max_logprobs,
        truncate_prompt_tokens=checked_truncation(config, max_model_len),
    )
    return text_endpoints(
        text,
        seed=config.seed,
        parsers=_parsers_of(text, config),
        architecture=hf_config.architecture,
    )


def _parsers_of(text: TextModel, config: EngineConfig) -> ParserSet:
    """Return the configured parsers, or those detected from a model's template."""
    return select_parsers(
        None if text.chat_template is None else text.chat_template.source_text,
        tool_calls=config.tool_call_parser,
        reasoning=config.reasoning_parser,
        reasoning_field=config.reasoning_field,
    )


def _parser_notes(parsers: ParserSet, config: EngineConfig) -> tuple[str, ...]:
    return parser_notes(
        parsers.template, tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser
    )


def load_chat_template(name: str, vocabulary: Vocabulary, source: str | None) -> ChatTemplate:
    """Return a model's chat template, or `source`; an `EngineError` names the model."""
    try:
        template = ChatTemplate(vocabulary, source=source)
    except EngineError as exc:
        raise EngineError(f"{name}: {exc}") from exc
    if template.leaves_messages_out:
        raise EngineError(f"{name}: the chat template does not render the content of user messages")
    return template


def _notes(model: LoadedModel, room: KVCacheSize) -> tuple[str, ...]:
    if room.max_model_len >= model.max_model_len:
        return model.notes
    note = (
        f"the context is {room.max_model_len:,} tokens, not the model's "
        f"{model.max_model_len:,}, to fit the KV cache (--kv-cache-memory)"
    )
    return (*model.notes, note)
