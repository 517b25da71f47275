"""Sequences that a card's memory holds by kinds of state, beside pages of all tokens in all layers.

    python -m bench.kernels.state_room

Each sequence is computed in chunks of 2,048 tokens, and decodes at a length; what its page groups
hold then is counted. Weights are left out: the ratio is that of the memory beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.latent import LatentAttention
from tidemill.engine.kernels.layer_groups import group_layers
from tidemill.engine.kernels.reference import ReferenceAttention
from tidemill.engine.state.groups import Pages, Visibility
from tidemill.engine.state.pages import PagePool

PAGE = 16
CHUNK = 2048
LENGTHS = (1024, 4096, 16_384)


@dataclass(frozen=True, slots=True)
class Model:
    """Layers of a published model: how many see all tokens, and how many a window or chunk."""

    name: str
    num_full: int
    num_short: int
    window: int = 0
    chunk: int = 0

    @property
    def shapes(self) -> list[AttentionShape]:
        """Return the shapes of its layers; heads cancel out."""
        full = AttentionShape(8, 8, 128, 128, 1.0)
        short = AttentionShape(8, 8, 128, 128, 1.0, window=self.window, chunk=self.chunk)
        return [full] * self.num_full + [short] * self.num_short


MODELS = (
    Model("Gemma 3 27B", 10, 52, window=1024),
    Model("Gemma 3 12B", 8, 40, window=1024),
    Model("Gemma 3 4B", 5, 29, window=1024),
    Model("gpt-oss-20b", 12, 12, window=128),
    Model("Llama 4 Scout", 12, 36, chunk=8192),
)


def pages_held(model: Model, length: int) -> float:
    """Return the pages of one layer's size that a sequence holds while it decodes."""
    groups = group_layers(model.shapes, 131_072)
    size = max(len(group.layers) for group in groups)
    held = 0
    for group in groups:
        visibility = None
        if group.visible is not None:
            visibility = Visibility(group.visible.first_visible, group.visible.most_visible)
        arrays = np.zeros((1, length // PAGE + 2), np.int32), np.zeros(1, np.int32)
        pages = Pages(
            PagePool(4 * length // PAGE + 600),
            PAGE,
            *arrays,
            visibility=visibility,
            step_tokens=CHUNK,
        )
        pages.share(0, [], 0)
        pages.enter(0, 0, length)
        for start in range(0, length, CHUNK):
            pages.attend(0, start, min(start + CHUNK, length), start)
        for token in range(length + 1, length + PAGE + 2):
            slots, tokens = np.zeros(1, np.int64), np.array([token])
            if len(pages.needs(slots, tokens)):
                pages.extend(slots, tokens - 1)
        held += int(pages.num_pages[0] - pages.first_live[0])
    return held * size


def main() -> None:
    """Print the table."""
    heads = " | ".join(f"{length:,}" for length in LENGTHS)
    print(f"| sequences, as a multiple of all pages kept, at tokens | {heads} |")
    print("|---|" + "---:|" * len(LENGTHS))
    for model in MODELS:
        layers = model.num_full + model.num_short
        ratios = (
            layers * -(-(length + PAGE + 1) // PAGE) / pages_held(model, length)
            for length in LENGTHS
        )
        print(f"| {model.name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    latent = AttentionShape(128, 1, 576, 512, 1.0, has_latent_values=True)
    expanded = AttentionShape(128, 128, 192, 128, 1.0)
    one, other = (
        kind.page_bytes([shape], torch.bfloat16) / PAGE
        for kind, shape in ((LatentAttention, latent), (ReferenceAttention, expanded))
    )
    print(f"\nDeepSeek V3, bytes of a token and layer: {one:,.0f}; expanded {other:,.0f}.")


if __name__ == "__main__":
    main()
