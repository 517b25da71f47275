"""Generation: decoders that write text, behind chat and text completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.net.fetch import Fetcher
from tidemill.protocol.contract import EngineError

from ..config import AdmissionName, EngineConfig
from ..endpoints import text_endpoints, token_endpoints
from ..endpoints.image_inputs import ImageSupport
from ..endpoints.media_fetch import MediaFetcher
from ..kernels.backends import limit_torch_threads
from ..loop.cuda_graphs import Capture, capture_on, make_graphs
from ..loop.generation import GenerationCore
from ..loop.memory_profile import peak_memory_on, step_bytes
from ..loop.runner import Runner
from ..model.device import step_limits
from ..model.kv_cache_size import KVCacheSize, compute_kv_cache_size
from ..model.load_timing import timed
from ..model.loaded_model import LoadedModel
from ..model.loading import load_model
from ..parallel.leader import make_leader
from ..parsers.registry import check_parser_names, select_parsers
from ..scheduling.admission import Admission, ArrivalOrder, PrefixOrder, UrgentFirst
from ..scheduling.pages import PagePool
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..scheduling.table import SequenceTable
from ..structured_output.grammar_backend import GrammarBackend
from ..text.chat_template import ChatTemplate, read_chat_template
from ..text.text_model import GenerationConfig, TextModel, eos_ids, read_generation_config
from ..text.tokenizer import load_tokenizer
from ..text.vocabulary import Vocabulary
from .task import LoadedTask, start_engine

ADMISSIONS: dict[AdmissionName, Callable[[], Admission]] = {
    "arrival": ArrivalOrder,
    "prefix": PrefixOrder,
}


class GenerationTask:
    """The kind of every model that is of no other; it refuses by name what is no decoder."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Take every one."""
        del description, config
        return True

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[SequenceRequest, SequenceResult]:
        """Load model and vocabulary beside each other, and begin to generate."""
        if config.pooler_config:
            raise EngineError(
                f"{config.model} writes text: --pooler-config is for models of vectors or scores; "
                "leave it out"
            )
        check_parser_names(tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser)
        template = None if chat_template is None else read_chat_template(chat_template)
        # transformers reads it too, and says less clearly what is wrong.
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
                model=model,
                max_model_len=room.max_model_len,
            )
        parsers = select_parsers(
            None if text.chat_template is None else text.chat_template.source_text,
            tool_calls=config.tool_call_parser,
            reasoning=config.reasoning_parser,
        )
        image_support, blind = _image_support(model, vocabulary, config)
        endpoints = text_endpoints(
            text,
            seed=config.seed,
            parsers=parsers,
            image_support=image_support,
            verifies=config.proof_rows,
        )
        return LoadedTask(
            engine,
            endpoints,
            model.device,
            online=token_endpoints(text, parsers=parsers),
            notes=(*_notes(model, room), *blind),
        )


def _image_support(
    model: LoadedModel, vocabulary: Vocabulary, config: EngineConfig
) -> tuple[ImageSupport | None, tuple[str, ...]]:
    """Return how a model's conversations show it images, or a note of why they cannot."""
    if model.vision_encoder is None:
        return None, ()
    image_spec, limits = model.vision_encoder.image_spec, config.images
    marks = {one for one in (image_spec.mark, *image_spec.spelling) if not isinstance(one, str)}
    if unknown := marks - vocabulary.added.keys():
        note = f"this model is served without images: its vocabulary has no mark {min(unknown)}"
        return None, (note,)
    fetcher = Fetcher(replace(config.fetching, max_bytes=limits.max_bytes))
    return ImageSupport(image_spec, limits, MediaFetcher(fetcher.fetch, limits.max_bytes)), ()


def measured_room(
    model: LoadedModel, config: EngineConfig, free: Callable[[], int] | None = None
) -> KVCacheSize:
    """Return the room beside the largest step, which runs once where what it takes can be told.

    `free` tells what is left then, where not only this device is asked.
    """
    taken, peak_of = None, peak_memory_on(model.device)
    if peak_of is not None and config.kv_cache_memory is None:
        limits = step_limits(config, model.device)
        taken = step_bytes(model, limits, lambda room: make_core(model, room, config), peak_of)
    return compute_kv_cache_size(
        model, config, step_bytes=taken, free=None if free is None else free()
    )


def make_core(
    model: LoadedModel,
    room: KVCacheSize,
    config: EngineConfig,
    captures: Capture | None = None,
    *,
    keeps_ids: bool | None = None,
) -> GenerationCore:
    """Give a loaded model its pages, table and scheduler; what is None goes by the device."""
    if not model.network.needs_torch:
        limit_torch_threads(model.device)
    limits = step_limits(config, model.device)
    attention = model.attention(room.num_pages)
    table = SequenceTable(limits.max_num_seqs, room.max_model_len, attention.page_size)
    pool = PagePool(room.num_pages)
    admission = UrgentFirst(ADMISSIONS[config.admission](), table.num_running_of)
    if keeps_ids is None:
        keeps_ids = model.device.type == "cuda"
    budget = limits.max_num_batched_tokens
    scheduler = Scheduler(table, pool, admission, budget, keeps_ids=keeps_ids)
    captures = captures or capture_on(model.device)
    graphs = make_graphs(model, attention, table, budget, captures)
    runner = Runner(model, attention, table, graphs, room.num_pages if keeps_ids else None)
    steps_ahead = config.steps_ahead
    if steps_ahead is None:
        steps_ahead = int(model.device.type == "cuda")
    return GenerationCore(scheduler, runner, model.vocab_size, steps_ahead)


def load_text_model(
    name: str,
    vocabulary: Vocabulary,
    *,
    template: str | None,
    generation: GenerationConfig,
    model: LoadedModel,
    max_model_len: int,
) -> TextModel:
    """Return what the endpoints know of a model: tokenizer, template, defaults, stop tokens."""
    tokenizer = load_tokenizer(name, vocabulary, model.vocab_size)
    chat_template = None
    if template is not None or vocabulary.chat_template:
        chat_template = _chat_template(name, vocabulary, template)
    ends = eos_ids(name, generation, model.eos_token_ids, tokenizer)
    return TextModel(
        tokenizer=tokenizer,
        chat_template=chat_template,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=ends,
        grammars=GrammarBackend(tokenizer, model.vocab_size, ends),
        defaults=generation.defaults,
    )


def _chat_template(name: str, vocabulary: Vocabulary, source: str | None) -> ChatTemplate:
    try:
        template = ChatTemplate(vocabulary, source=source)
    except EngineError as exc:
        raise EngineError(f"{name}: {exc}") from exc
    if template.leaves_messages_out:
        raise EngineError(f"{name}: the chat template leaves out what a user's message says")
    return template


def _notes(model: LoadedModel, room: KVCacheSize) -> tuple[str, ...]:
    if room.max_model_len >= model.max_model_len:
        return model.notes
    note = (
        f"the context is {room.max_model_len:,} tokens, not the model's "
        f"{model.max_model_len:,}: the KV cache has no room for more (--kv-cache-memory)"
    )
    return (*model.notes, note)
