"""Whisper architecture in numbers, and its special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...kernels.attention import AttentionShape
from ...scheduling.speech import Task

# Two convolutions of three frames each; the second has a stride of two.
KERNEL = 3
STRIDE = 2
# Of all layer norms; no config contains it.
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class SpeechArchitecture:
    """Sizes of a Whisper model: an encoder of a window's frames, a decoder with cross-attention.

    A window has `max_source_positions` positions, half as many as frames; a text has at most
    `max_target_positions`.
    """

    vocab_size: int
    hidden_size: int
    num_mels: int
    max_source_positions: int
    max_target_positions: int
    encoder_layers: int
    encoder_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_heads: int
    decoder_ffn_dim: int
    tie_word_embeddings: bool
    median_filter_width: int = 7

    @property
    def window_frames(self) -> int:
        """Return how many frames of features a window has."""
        return STRIDE * self.max_source_positions

    @property
    def shape(self) -> AttentionShape:
        """Return the attention of each decoder layer, to its text and to the window."""
        return self._shape(self.decoder_heads, is_causal=True)

    @property
    def encoder_shape(self) -> AttentionShape:
        """Return the attention of each encoder layer."""
        return self._shape(self.encoder_heads, is_causal=False)

    def _shape(self, heads: int, *, is_causal: bool) -> AttentionShape:
        width = self.hidden_size // heads
        return AttentionShape(heads, heads, width, width, width**-0.5, is_causal=is_causal)


@dataclass(frozen=True, slots=True)
class WhisperTokens:
    """Special tokens of a model's prompt, and tokens that are suppressed.

    Text has ids below `end`. `languages` are ids by their codes and `tasks` by their names; without
    them, `forced` follows `start`. Timestamps begin after `no_timestamps`, if there are any.
    `alignment_heads` are the (layer, head) pairs that attend to the spoken words.
    """

    start: int
    end: int
    no_timestamps: int | None
    prompt_start: int | None
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[Task, int] = field(default_factory=dict)
    forced: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_at_begin: tuple[int, ...] = ()
    max_initial_timestamp: int | None = None
    alignment_heads: tuple[tuple[int, int], ...] = ()
    max_length: int | None = None

    @property
    def first_timestamp(self) -> int | None:
        """Return the id of timestamp 0."""
        return None if self.no_timestamps is None else self.no_timestamps + 1
