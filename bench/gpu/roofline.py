"""The serial roofline: the tokens per second of a card for requests of one shape.

    python -m bench.gpu.roofline [--card h200] [--model llama-3-8b] [--mixes 1024/128,128/1024]

Work is counted once for each request, and the card's ceilings apply one after the other: products,
or the weights if reading them takes longer, once for all sequences of a step; then keys, values and
recurrent states, which each sequence reads alone. There are no launches, host or norms: the
engine's share of it shows its loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.gpu.cards import CARDS, Card
from bench.gpu.mixes import MIXES, Mix
from bench.gpu.shapes import architecture
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.recurrence import row_bytes
from tidemill.engine.model.config.architecture import Architecture, Block

ITEMSIZE = 2  # of keys and values, and of weights that are not quantised


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model: the parameters that a token multiplies, and those that a step reads.

    The head's are separate, because only sampled tokens use it. The embedding table is not
    included, because a step reads few of its rows; `held` are all weights in memory.
    """

    active: int
    read: int
    head: int
    held: int

    @classmethod
    def from_model(cls, model: Architecture) -> Weights:
        """Count the weights of a model."""
        active = sum(block_weights(model, block)[0] for block in model.blocks)
        read = sum(block_weights(model, block)[1] for block in model.blocks)
        head = model.vocab_size * model.hidden_size
        return cls(active, read, head, read + head * (1 if model.tie_word_embeddings else 2))


def block_weights(model: Architecture, block: Block) -> tuple[int, int]:
    """Return a layer's weights that a token multiplies, and all of its weights."""
    if block.latent is not None:
        raise SystemExit("latent attention (MLA) is not supported by this script")
    hidden, experts = model.hidden_size, block.experts
    fixed = hidden * (mixer_inputs(model, block) + mixer_outputs(block))
    if experts is None:
        mlp = 3 * hidden * model.intermediate_size * block.has_mlp
        return fixed + mlp, fixed + mlp
    router, expert = hidden * experts.num_experts, 3 * hidden * experts.intermediate_size
    fixed += router + 3 * hidden * experts.shared_intermediate_size
    return fixed + experts.num_experts_per_tok * expert, fixed + experts.num_experts * expert


def mixer_inputs(model: Architecture, block: Block) -> int:
    """Return the width of a token's projection for attention, for a recurrence, or for both."""
    shape = block.attention
    width = shape.num_query_heads * shape.key_dim * (1 + model.has_output_gate)
    width += shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    return width + (sum(block.recurrence.proj_sizes) if block.recurrence else 0)


def mixer_outputs(block: Block) -> int:
    """Return the width of a token's output of attention, a recurrence, or both."""
    shape = block.attention
    width = shape.num_query_heads * shape.value_dim
    return width + (block.recurrence.inner_size if block.recurrence else 0)


def state_bytes(block: Block) -> int:
    """Return the bytes of a sequence's recurrent state in one layer."""
    return row_bytes([block.recurrence.shape], torch.bfloat16) if block.recurrence else 0


def kv_bytes(shape: AttentionShape, itemsize: int = ITEMSIZE) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    return shape.num_kv_heads * (shape.key_dim + shape.value_dim) * itemsize


def pair_flops(shape: AttentionShape) -> int:
    """Return the operations for one query and one key in one layer, over all heads."""
    return 2 * shape.num_query_heads * (shape.key_dim + shape.value_dim)


def pairs(first: float, last: float, window: int, chunk: int = 0) -> float:
    """Return how many keys the queries from place `first` to `last` see, each those before it."""

    def before(place: float) -> float:
        if chunk and place > chunk:
            return place // chunk * chunk * chunk / 2 + before(place % chunk)
        if not window or place <= window:
            return place * place / 2
        return window * window / 2 + (place - window) * window

    return before(last) - before(first)


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of one request by their bounds, and the resulting tokens per second."""

    products: float
    weights: float
    keys: float
    sequences: float
    outputs_per_second: float
    tokens_per_second: float


def sequence_bytes(model: Architecture, num_tokens: float) -> float:
    """Return the bytes of a sequence of some tokens: those still visible, and rows."""
    return sum(
        kv_bytes(block.attention) * min(num_tokens, block.attention.most_visible or num_tokens)
        + state_bytes(block)
        for block in model.blocks
    )


def serial(model: Architecture, card: Card, mix: Mix, itemsize: float = ITEMSIZE) -> Bound:
    """Return the bound for endless requests of one mix, as many at once as memory allows.

    `itemsize` is that of weights.
    """
    weights = Weights.from_model(model)
    prompt, output, shared = mix.prompt, mix.output, mix.shared
    last = shared + prompt + output
    a_sequence = sequence_bytes(model, prompt + output / 2)
    sequences = card.pool(weights.held * itemsize) / a_sequence
    flops = 2.0 * weights.active * (prompt + output - 1) + 2.0 * weights.head * output
    moved = 0.0
    for block in model.blocks:
        shape = block.attention
        limits = shape.window, shape.chunk
        of_prompt = pairs(shared, shared + prompt, *limits)
        of_output = pairs(shared + prompt, last, *limits)
        of_output *= (output - 1) / output
        flops += pair_flops(shape) * (of_prompt + of_output)
        # Shared tokens are read once for all sequences of a step.
        own = pairs(prompt, prompt + output, *limits) * (output - 1) / output
        moved += kv_bytes(shape) * (own + shared * (output - 1) / sequences + prompt + output)
        moved += 2 * output * state_bytes(block)
    products = flops / card.flops
    read = (weights.read + weights.head) * itemsize / card.bandwidth
    of_weights = (output - 1) * read / sequences
    keys = moved / card.bandwidth
    rate = 1 / (max(products, of_weights) + keys)
    return Bound(
        products, of_weights, keys, sequences, rate * output, rate * (shared + prompt + output)
    )


def table(
    model: Architecture, card: Card, mixes: tuple[Mix, ...], itemsize: float = ITEMSIZE
) -> Iterator[str]:
    """Yield the lines of a table of bounds."""
    yield "| in/out | sequences | products, ms | weights, ms | keys, ms | out tok/s | all tok/s |"
    yield "|---|" + "---:|" * 6
    for mix in mixes:
        bound = serial(model, card, mix, itemsize)
        times = (bound.products, bound.weights, bound.keys)
        cells = " | ".join(f"{each * 1e3:.2f}" for each in times)
        yield (
            f"| {mix} | {bound.sequences:,.0f} | {cells} | {bound.outputs_per_second:,.0f} "
            f"| {bound.tokens_per_second:,.0f} |"
        )


def main() -> None:
    """Print the bounds of one model on one card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument(
        "--model", default="llama-3-8b", help="use a known shape, or a model folder"
    )
    parser.add_argument("--mixes", default=",".join(map(str, MIXES)))
    parser.add_argument(
        "--weight-itemsize", type=float, default=ITEMSIZE, help="set the bytes per weight"
    )
    arguments = parser.parse_args()
    mixes = tuple(map(Mix.read, arguments.mixes.split(",")))
    card, itemsize = CARDS[arguments.card], arguments.weight_itemsize
    for line in table(architecture(arguments.model), card, mixes, itemsize):
        print(line)


if __name__ == "__main__":
    main()
