"""What a model of the Whisper family is made of, in numbers, and the tokens that steer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.kernels.attention import AttentionShape
from engine.scheduling.speech import Task

# Two convolutions of three frames each, the second of which takes every other one.
KERNEL = 3
STRIDE = 2
# Of all layer norms; no config says it.
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class SpeechArchitecture:
    """An encoder of a window's frames, and a decoder that attends to what it makes of them.

    `sources` are the positions of a window, half as many as its frames, `targets` those of a text.
    """

    vocab_size: int
    hidden_size: int
    num_mels: int
    sources: int
    targets: int
    encoder_layers: int
    encoder_heads: int
    encoder_inner: int
    decoder_layers: int
    decoder_heads: int
    decoder_inner: int
    is_tied: bool
    median_width: int = 7

    @property
    def window_frames(self) -> int:
        """Return how many frames of features a window has."""
        return STRIDE * self.sources

    @property
    def shape(self) -> AttentionShape:
        """Return what each layer of the decoder attends with, to its text and to the window."""
        return self._shape(self.decoder_heads, is_causal=True)

    @property
    def encoder_shape(self) -> AttentionShape:
        """Return what each layer of the encoder attends with."""
        return self._shape(self.encoder_heads, is_causal=False)

    def _shape(self, heads: int, *, is_causal: bool) -> AttentionShape:
        width = self.hidden_size // heads
        return AttentionShape(heads, heads, width, width, width**-0.5, is_causal=is_causal)


@dataclass(frozen=True, slots=True)
class Steering:
    """The tokens by which a model is told what to write, and which it may not write.

    Text has ids below `end`. `languages` are ids by their codes and `tasks` by their names; where
    there are none, `forced` follows `start`. Times begin behind `no_timestamps`, if there are any.
    `alignment_heads` are (layer, head) of those that look at what is being said.
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
        """Return the id of time 0."""
        return None if self.no_timestamps is None else self.no_timestamps + 1
