"""Recordings in a prompt: how a model hears them, and what their tokens represent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from .images import PromptImage
from .speech import FeatureSettings

# Frames of a position of the encoder, and positions of a token: a convolution and a mean.
_FRAMES_PER_POSITION = 2
_POSITIONS_PER_TOKEN = 2


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """A model's recordings in prompts, with the placeholder interface of an `ImageSpec`.

    Its template writes `token` for a recording, and the prompt repeats it for each of the
    recording's tokens, which the scheduler treats as an image of one column.
    """

    token: int
    features: FeatureSettings
    is_bidirectional: ClassVar[bool] = False
    has_axes: ClassVar[bool] = False
    breaks: ClassVar[None] = None

    @property
    def mark(self) -> int:
        """Return the token that a template writes."""
        return self.token

    @property
    def spelling(self) -> tuple[str | int, ...]:
        """Return the replacement of the mark: itself."""
        return (self.token,)

    @property
    def max_seconds(self) -> float:
        """Return the length of the encoder's window."""
        own = self.features
        return own.window_frames * own.hop_length / own.sampling_rate

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of a recording."""
        return -(-num_samples // self.features.hop_length)

    def num_tokens(self, num_frames: int) -> int:
        """Return the number of tokens of a recording: one for 40 ms, none for less than 30."""
        return num_positions(num_frames) // _POSITIONS_PER_TOKEN

    def placeholders(self, rows: int, columns: int) -> list[int]:
        """Return the placeholder tokens of a recording in a prompt."""
        return [self.token] * (rows * columns)

    def prompt_image(
        self, pixels: NDArray[Any], digest: bytes, start: int, rows: int, columns: int
    ) -> PromptImage:
        """Return a recording whose tokens in a prompt begin at `start`: features for pixels."""
        return PromptImage(pixels, digest, start, rows, columns, is_whole=False)


def num_positions(num_frames: int) -> int:
    """Return the number of an encoder's positions for the frames of a recording."""
    return (num_frames - 1) // _FRAMES_PER_POSITION + 1
