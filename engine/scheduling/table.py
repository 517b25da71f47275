"""The running sequences as arrays, one row per slot, so that a step runs no Python per sequence.

The scheduler owns the counts and pages, the runner reads them, the sampler reads the parameters.
Tokens of a step in flight already count, although their ids are unknown: they are included in
`num_tokens` of a sequence, but not in its `num_known_ids`, and no unknown id leaves the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..state.groups import NO_PAGE
from .sequence import Sequence, SequenceRequest

_LAST = 2**32  # above all priorities of requests


class SequenceTable:
    """Rows for up to `max_num_seqs` running sequences of up to `max_model_len` tokens.

    Sequences that may grow beyond `original_positions` use their model's long rope frequencies.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        original_positions: int | None = None,
    ) -> None:
        slots = max_num_seqs
        self.original_positions = original_positions
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.sequences: list[Sequence | None] = [None] * slots
        self.free_slots = list(range(slots - 1, -1, -1))
        self.num_running_of: dict[str, int] = {}  # by request id, of requests with any
        self._running: NDArray[np.int64] | None = None  # reset when the running sequences change
        # np.empty and np.zeros take no memory until touched.
        self.tokens: NDArray[np.int32] = np.zeros((slots, max_model_len), np.int32)
        self.pages: NDArray[np.int32] = np.zeros((slots, -(-max_model_len // page_size)), np.int32)
        self.num_pages = np.zeros(slots, np.int32)
        self.sources = np.full(slots, NO_PAGE, np.int32)  # whose first tokens the first step copies
        self.num_tokens = np.zeros(slots, np.int64)
        self.num_known_ids = np.zeros(slots, np.int64)  # those of them with a known id
        self.num_computed = np.zeros(slots, np.int64)
        self.num_prompt_tokens = np.zeros(slots, np.int64)
        self.max_tokens = np.zeros(slots, np.int64)  # prompt included
        self.start_order = np.zeros(slots, np.int64)
        self.num_in_flight = np.zeros(slots, np.int64)  # steps that hold the slot
        self.is_fully_launched = np.zeros(slots, np.bool_)  # launched to its last token
        self.is_verifying = np.zeros(slots, np.bool_)  # drafts, in a step that is in flight
        self.is_running = np.zeros(slots, np.bool_)
        self.has_begun = np.zeros(slots, np.bool_)  # in a step that was launched
        self.is_urgent = np.zeros(slots, np.bool_)
        self.priority = np.zeros(slots, np.int64)  # the lowest first; rows of files are last
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.logprobs = np.full(slots, -1, np.int64)  # -1: none
        self.prompt_logprobs = np.full(slots, -1, np.int64)
        self.first_scored_row = np.zeros(slots, np.int64)  # position before the first unscored one
        self.repetition_penalty = np.ones(slots, np.float32)
        self.presence_penalty = np.zeros(slots, np.float32)
        self.frequency_penalty = np.zeros(slots, np.float32)
        self.has_bias = np.zeros(slots, np.bool_)
        self.min_tokens = np.zeros(slots, np.int64)  # below which no stop token may come
        self.reads_ids = np.zeros(slots, np.bool_)  # for penalties, which depend on earlier tokens
        self.is_constrained = np.zeros(slots, np.bool_)
        self.reads_confidence = np.zeros(slots, np.bool_)
        self.is_watched = np.zeros(slots, np.bool_)  # any token may be its last
        self.is_streamed = np.zeros(slots, np.bool_)
        self.has_images = np.zeros(slots, np.bool_)
        self.adapter = np.zeros(slots, np.int32)
        self.has_long_rope = np.zeros(slots, np.bool_)

    @property
    def running(self) -> NDArray[np.int64]:
        """Return the slots in use: by priority, and among equal ones in the order of starts."""
        if self._running is None:
            slots = np.flatnonzero(self.is_running)
            order = np.lexsort((self.start_order[slots], self.priority[slots]))
            self._running = slots[order]
        return self._running

    @property
    def num_taken(self) -> int:
        """Return the number of slots in use: running sequences, and some that left mid-flight."""
        return len(self.sequences) - len(self.free_slots)

    def sequence(self, slot: int) -> Sequence:
        """Return the sequence in a used slot."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def most_tokens(self, request: SequenceRequest) -> int:
        """Return the maximum length of a sequence in tokens, including its prompt."""
        return min(len(request.prompt_ids) + request.max_tokens, self.max_model_len)

    def takes_long_rope(self, request: SequenceRequest) -> bool:
        """Return whether a sequence uses long rope frequencies, judged by its maximum length.

        All its keys then use the same frequencies, and no row depends on its neighbors.
        """
        original = self.original_positions
        return original is not None and self.most_tokens(request) > original

    def place(self, sequence: Sequence, num_computed: int) -> int:
        """Put a sequence into a free slot and return the slot; it holds no state yet."""
        slot = self.free_slots.pop()
        request, sampling = sequence.request, sequence.request.sampling
        prompt, total = len(sequence.prompt), sequence.num_tokens
        self.sequences[slot] = sequence
        self.tokens[slot, :prompt] = sequence.prompt
        self.tokens[slot, prompt:total] = sequence.generated
        self.num_tokens[slot] = self.num_known_ids[slot] = total
        self.num_computed[slot] = num_computed
        self.num_prompt_tokens[slot] = prompt
        self.max_tokens[slot] = self.most_tokens(request)
        self.start_order[slot] = sequence.start_order
        self.is_fully_launched[slot] = self.is_verifying[slot] = False
        self.is_urgent[slot] = sequence.is_urgent
        self.priority[slot] = _LAST if request.priority is None else request.priority
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.logprobs[slot] = _or_none(sampling.logprobs)
        self.prompt_logprobs[slot] = _or_none(request.prompt_logprobs)
        self.first_scored_row[slot] = len(sequence.prompt_logprobs) - 1
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.has_bias[slot] = bool(sampling.logit_bias)
        self.min_tokens[slot] = request.min_tokens
        self.reads_ids[slot] = (
            sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
            or sampling.repetition_penalty != 1
        )
        self.is_constrained[slot] = request.constraint is not None
        self.reads_confidence[slot] = sampling.reads_confidence
        watchers = (request.stop_text, request.repetition, request.constraint)
        self.is_watched[slot] = any(watcher is not None for watcher in watchers)
        self.is_streamed[slot] = request.is_streamed
        self.has_images[slot] = bool(request.images)
        self.adapter[slot] = request.adapter
        self.has_long_rope[slot] = self.takes_long_rope(request)
        self.is_running[slot] = True
        self.has_begun[slot] = False
        self.num_running_of[request.request_id] = self.num_running_of.get(request.request_id, 0) + 1
        self._running = None
        return slot

    def remove(self, slot: int) -> Sequence:
        """Remove a sequence and write its tokens back to it; its slot stays in use."""
        sequence = self.sequence(slot)
        sequence.generated = self.generated(slot).tolist()
        self.sequences[slot] = None
        self.is_running[slot] = False
        self.num_running_of[sequence.request.request_id] -= 1
        if not self.num_running_of[sequence.request.request_id]:
            del self.num_running_of[sequence.request.request_id]
        self._running = None
        return sequence

    def free(self, slot: int) -> None:
        """Free the slot of a sequence that was removed."""
        self.free_slots.append(slot)

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return a view of the tokens generated so far whose ids are known."""
        return self.tokens[slot, self.num_prompt_tokens[slot] : self.num_known_ids[slot]]


def _or_none(count: int | None) -> int:
    return -1 if count is None else count
