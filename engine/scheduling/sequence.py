"""One sequence: its request, its state and its result; its arrays are in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .images import PromptImage, axes_of
from .repetition import Repetition
from .token_choices import TokenChoice
from .token_logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "repetition"]
# vLLM's stop reason.
REPETITION_DETECTED = "repetition_detected"


class StopText(Protocol):
    """Stop strings of a sequence: a value that any number of sequences may share.

    Equal values have the same effect and the same hash.
    """

    def watch(self) -> StopWatch:
        """Return a watch for one sequence."""


class StopWatch(Protocol):
    """Watches the text of one sequence for stop strings; called once for each new token."""

    def push(self, token_id: int) -> str | None:
        """Append one generated token and return the stop string that is now complete, if any."""


class Constraint(Protocol):
    """A constraint on the tokens of a sequence: a value that any number of sequences may share.

    Equal values allow the same tokens, and have the same hash.
    """

    def start_state(self) -> ConstraintState:
        """Return the state of one sequence before its first token."""


class ConstraintState(Protocol):
    """Applies a constraint to one sequence, token by token.

    `fill` may run in any thread, but not during another call on the same state. Both methods raise
    `RequestError` if the constraint can no longer be satisfied.
    """

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write which tokens may come next: bit `i % 32` of word `i // 32` for token `i`.

        Returns False, and leaves `mask [words]` unchanged, if any token may come.
        """

    def push(self, token_id: int) -> bool:
        """Append one generated token, which the mask before it allowed.

        Returns True once nothing may follow: the sequence is complete.
        """

    def fork(self) -> ConstraintState:
        """Return an independent copy of this state."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. `temperature == 0` is greedy; `top_k == 0` disables top-k.

    Only `seed` and the position key the randomness, so a row never depends on its neighbors.
    `logprobs` is None for none, 0 for the chosen token's only, and k to include the k most likely
    tokens, or, instead of these, `logprob_token_ids`. They are computed from the model's raw
    logits, before penalties and temperature. With `reads_confidence` the result also has the choice
    of each token among those that its constraint allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    reads_confidence: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRequest:
    """One token stream to generate from `prompt_ids` (at least one token).

    Generation ends after `max_tokens` new tokens (0 only scores the prompt), at a token of
    `stop_token_ids` (which is the last of `token_ids`), where `stop_text` matches, or at a
    `repetition`; the last three do not apply before `min_tokens`. `prompt_logprobs` requests the
    prompt's own log-probabilities with that number of alternatives (0: only the token itself), from
    its token `logprob_start` (the first token never has one).
    Pages of the KV cache are shared only among requests with the same `cache_salt`. If it
    `is_streamed`, each token is emitted at once, else all at the end. `images` are the images of
    the prompt, in order of position; each replaces its tokens. Every token must be allowed by
    `constraint`, which may end the generation even before `min_tokens`. With a `priority`
    it is interactive and comes before rows of files, which have none; a lower number comes first.
    It uses `adapter`; 0 means none. Sequences of one `request_id` take turns with those of others.
    """

    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_text: StopText | None = None
    repetition: Repetition | None = None
    prompt_logprobs: int | None = None
    logprob_start: int = 0
    cache_salt: str = ""
    is_streamed: bool = False
    images: tuple[PromptImage, ...] = ()
    constraint: Constraint | None = None
    priority: int | None = None
    adapter: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """A finished sequence. `stop_reason` is the stop token id or stop string that ended it.

    It is `REPETITION_DETECTED` for a repetition, and None if a constraint or `max_tokens` ended it.
    `prompt_logprobs[0]` is None, as nothing predicts the first token, and so are those of tokens
    before `logprob_start`.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    token_choices: tuple[TokenChoice, ...] = field(default=(), compare=False)

    @property
    def num_values(self) -> int:
        """Return the number of its tokens, including alternatives."""
        num_values = len(self.token_ids)
        for scores in (self.logprobs, self.prompt_logprobs):
            if scores is not None:
                num_values += len(scores) * (1 + scores.num_top)
        return num_values + sum(1 + len(choice.ids) for choice in self.token_choices)


class Sequence:
    """One sequence from submission to result: the data that does not fit an array."""

    __slots__ = (
        "arrival",
        "axes",
        "constraint_state",
        "digests",
        "error",
        "finish_reason",
        "generated",
        "is_suspect",
        "logprobs",
        "num_cached_tokens",
        "num_emitted",
        "num_failures",
        "num_preemptions",
        "prompt",
        "prompt_logprobs",
        "repetition_watch",
        "request",
        "start_order",
        "stop_reason",
        "stop_watch",
        "token_choices",
    )

    def __init__(
        self, request: SequenceRequest, arrival: int, vocab_size: int | None = None
    ) -> None:
        self.request = request
        sampling = request.sampling
        self.prompt = np.array(request.prompt_ids, np.int32)
        self.axes = axes_of(request.images, len(self.prompt)) if request.images else None
        self.arrival = arrival  # place in the queue
        self.start_order = -1  # number of its first start: the highest is preempted first
        self.generated: list[int] = []  # up to date while waiting and once finished
        self.digests: list[bytes] = []  # of the full pages, up to date while waiting
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_emitted = 0  # of the generated tokens; the rest belongs to its next event
        num_top = len(sampling.logprob_token_ids) or _at_most(sampling.logprobs, vocab_size)
        self.logprobs = TokenLogprobs(num_top)
        self.prompt_logprobs = TokenLogprobs(
            _at_most(request.prompt_logprobs, vocab_size),
            min(max(1, request.logprob_start), len(self.prompt)),
        )
        self.token_choices: list[TokenChoice] = []
        self.stop_reason: int | str | None = None
        self.stop_watch = None if request.stop_text is None else request.stop_text.watch()
        self.constraint_state = (
            None if request.constraint is None else request.constraint.start_state()
        )
        self.repetition_watch = None if request.repetition is None else request.repetition.watch()
        self.finish_reason: FinishReason = "length"  # unless another reason ended it before
        self.is_suspect = False  # it was too often in a failed step, and runs alone
        self.num_failures = 0  # failed steps after which it had to wait
        self.error: Exception | None = None

    @property
    def is_urgent(self) -> bool:
        """Return whether it is interactive."""
        return self.request.priority is not None

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and generated tokens; as current as `generated`."""
        return len(self.prompt) + len(self.generated)

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return some of its tokens; as current as `generated`."""
        if stop <= len(self.prompt):
            return self.prompt[start:stop]
        whole: NDArray[np.int32] = np.append(self.prompt, np.array(self.generated, np.int32))
        return whole[start:stop]

    def repeat(self, other: Sequence) -> None:
        """Copy the result of an identical sequence; nothing is computed."""
        self.generated = list(other.generated)
        self.logprobs, self.prompt_logprobs = other.logprobs, other.prompt_logprobs
        self.token_choices = other.token_choices
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        self.num_cached_tokens = len(self.request.prompt_ids)

    def result(self) -> SequenceResult:
        """Return the result of a finished sequence; raise its error if it failed."""
        if self.error is not None:
            raise self.error
        request = self.request
        scores: TokenLogprobs | None = None
        if request.sampling.logprobs is not None:
            scores = self.logprobs.part(0, len(self.generated))
        return SequenceResult(
            token_ids=self.generated,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=scores,
            prompt_logprobs=self.prompt_logprobs if request.prompt_logprobs is not None else None,
            token_choices=tuple(self.token_choices),
        )


def _at_most(count: int | None, most: int | None) -> int:
    """Return the requested number of alternatives, limited to the vocabulary."""
    count = count or 0
    return count if most is None else min(count, most)
