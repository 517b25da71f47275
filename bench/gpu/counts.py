"""Bytes and operations of one step's kernels, counted from a model's shape and its spans.

The order is that of `engine.model.decoder`; each kernel reads its inputs once and writes its
outputs once. Weights that a step reads are counted with the product that reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.gpu.roofline import kv_bytes, mixer_inputs, mixer_outputs, pair_flops, state_bytes
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.model.config.architecture import (
    Architecture,
    Block,
    Experts,
    Recurrence,
)

Kind = Literal["product", "attention", "entry", "pass"]
FP32 = 4


class Kernel(NamedTuple):
    """A number of equal calls: the sum of their bytes and operations; passes compute little."""

    name: str
    kind: Kind
    bytes: float
    flops: float = 0.0
    calls: int = 1


class Spans(NamedTuple):
    """A step like `StepPlan`: tokens `starts[s] : stops[s]`, and the logits that are wanted.

    `shared` counts tokens of pages that the same step read before, `filling` those of no sequence,
    which pad a graph's size.
    """

    starts: NDArray[np.int64]  # [S]
    stops: NDArray[np.int64]  # [S]
    num_rows: int
    shared: int = 0
    filling: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int((self.stops - self.starts).sum()) + self.filling


@dataclass(frozen=True, slots=True)
class Form:
    """Variant of the network: the fused passes, and the parts that are left out.

    Sums with the residual are one pass with the norm that follows; norms of heads, rotation and
    storing are one; gates are joined within their product; after the last attention only rows whose
    logits are wanted continue; shared pages are read once; the choice of a token reads its logits
    once, else they are sorted. Quantised weights have another `weight_itemsize`.
    """

    joins_norms: bool = True
    joins_entry: bool = True
    joins_gates: bool = False
    last_rows_only: bool = True
    meets_shared_once: bool = True
    chooses_at_once: bool = True
    itemsize: int = 2
    weight_itemsize: float = 2


def kernels_of(model: Architecture, spans: Spans, form: Form) -> list[Kernel]:
    """Return all calls of a step."""
    return list(_Step(model, spans, form).kernels())


def entry(shape: AttentionShape, tokens: int, itemsize: int) -> Kernel:
    """Return one layer's: heads are read, and written as queries, or to their pages."""
    keys = shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    width = shape.num_query_heads * shape.key_dim + keys
    return Kernel("entry", "entry", 2 * tokens * width * itemsize)


def attention(shape: AttentionShape, spans: Spans, form: Form) -> Kernel:
    """Return one layer's bytes: visible keys and values, queries and outputs."""
    starts, stops, reach = spans.starts, spans.stops, shape.most_visible
    lengths = stops - starts
    met, places = lengths * (starts + stops + 1) / 2, stops
    if reach:
        # Chunks are counted as windows that are as long, of which a query sees half on average.
        most = reach if shape.window else reach / 2
        met = np.minimum(met, lengths * most)
        places = np.minimum(stops, lengths + most)
    seen = float(places.sum())
    if form.meets_shared_once and not reach:
        seen -= spans.shared
    widths = shape.num_query_heads * (shape.key_dim + shape.value_dim)
    moved = seen * kv_bytes(shape, form.itemsize) + spans.num_tokens * widths * form.itemsize
    flops = float(met.sum()) * pair_flops(shape)
    return Kernel("attention", "attention", moved, flops, calls=2)


@dataclass(frozen=True, slots=True)
class _Step:
    model: Architecture
    spans: Spans
    form: Form

    def kernels(self) -> Iterator[Kernel]:
        model, size = self.model, self.form.itemsize
        tokens, rows = self.spans.num_tokens, self.spans.num_rows
        hidden = model.hidden_size
        yield Kernel("embedding", "pass", 2 * tokens * hidden * size)
        yield Kernel("norms", "pass", 2 * tokens * hidden * size)
        ropes = {block.rope for block in model.blocks}
        for rope in ropes:
            width = 2 * len(rope.inv_freq)
            yield Kernel("angles", "pass", 3 * tokens * width * FP32, calls=5)
        *others, last = model.blocks
        for block, count in Counter(others).items():
            for kernel in self.layer(block, tokens):
                name, kind, moved, flops, calls = kernel
                yield Kernel(name, kind, moved * count, flops * count, calls * count)
        yield from self.layer(last, rows if self.form.last_rows_only else tokens)
        if rows:
            yield self.product("head", rows, hidden, model.vocab_size)
            yield from self.choice(rows)

    def layer(self, block: Block, after: int) -> Iterator[Kernel]:
        """Yield one layer's calls; `after` tokens continue after its attention."""
        shape, form, hidden = block.attention, self.form, self.model.hidden_size
        tokens, size = self.spans.num_tokens, form.itemsize
        queries, attended = shape.num_query_heads * shape.key_dim, mixer_outputs(block)
        yield self.product("qkv", tokens, hidden, mixer_inputs(self.model, block))
        if block.recurrence is not None:
            yield from self.recurrence(block.recurrence, state_bytes(block))
        if block.has_attention:
            yield entry(shape, tokens, size)
            if not form.joins_entry:
                turned = queries + shape.num_kv_heads * shape.key_dim
                times = 3 if self.model.has_qk_norm else 1
                yield Kernel("entry", "pass", 2 * times * tokens * turned * size, calls=2 * times)
            yield attention(shape, self.spans, form)
        if block.has_attention and self.model.has_output_gate:
            yield Kernel("output gate", "pass", 3 * tokens * attended * size)
        if not after:
            return
        if after < tokens:
            yield Kernel("rows", "pass", 2 * after * (attended + hidden) * size, calls=2)
        yield self.product("output", after, attended, hidden)
        yield self.added_norm(after)
        if block.experts is not None:
            yield from self.experts(block.experts, after)
        elif block.has_mlp:
            yield from self.mlp(after, self.model.intermediate_size)
        yield self.added_norm(after)
        if self.model.names.norms.post_attention:
            yield Kernel("norms", "pass", 4 * after * hidden * size, calls=2)

    def added_norm(self, tokens: int) -> Kernel:
        moved, calls = (4, 1) if self.form.joins_norms else (5, 2)
        hidden = self.model.hidden_size
        return Kernel("norms", "pass", moved * tokens * hidden * self.form.itemsize, calls=calls)

    def recurrence(self, mixer: Recurrence, state: int) -> Iterator[Kernel]:
        """Yield convolution, rule and gated norm; a span reads its state once, and writes it.

        A token multiplies each number of a state a few times; chunks do it by products.
        """
        tokens, size = self.spans.num_tokens, self.form.itemsize
        channels, inner = mixer.shape.num_channels, mixer.inner_size
        yield Kernel("convolution", "pass", 2 * tokens * channels * size)
        moved = 2 * len(self.spans.starts) * state + tokens * (channels + inner) * size
        if mixer.shape.rule is not None:
            flops = 8.0 * tokens * prod(mixer.shape.rule.state_shape)
            yield Kernel("recurrence", "attention", moved, flops)
        yield Kernel("gated norm", "pass", 3 * tokens * inner * size)

    def mlp(self, tokens: int, inner: int) -> Iterator[Kernel]:
        hidden, size = self.model.hidden_size, self.form.itemsize
        both = self.product("gate_up", tokens, hidden, 2 * inner)
        if self.form.joins_gates:
            yield both._replace(bytes=both.bytes - tokens * inner * size)
        else:
            yield both
            yield Kernel("gates", "pass", 3 * tokens * inner * size)
        yield self.product("down", tokens, inner, hidden)

    def experts(self, experts: Experts, tokens: int) -> Iterator[Kernel]:
        """Yield a mixture's kernels: tokens choose random experts; each chosen one is read once.

        The first product gathers its rows and joins its gates.
        """
        hidden, size, copies = (
            self.model.hidden_size,
            self.form.itemsize,
            tokens * experts.num_experts_per_tok,
        )
        yield self.product("router", tokens, hidden, experts.num_experts)
        yield Kernel("routing", "pass", 2 * tokens * experts.num_experts * FP32, calls=4)
        met = experts.num_experts * (
            1 - (1 - experts.num_experts_per_tok / experts.num_experts) ** tokens
        )
        own, width = experts.intermediate_size, experts.latent_size or hidden
        if experts.latent_size:
            yield self.product("latents", tokens, hidden, width)
            yield self.product("latents", tokens, width, hidden)
        for name, inputs, products, outputs in (
            ("gate_up", width, 2 * own, own),
            ("down", own, width, width),
        ):
            moved: float = copies * (inputs + outputs) * size
            moved += met * inputs * products * self.form.weight_itemsize
            yield Kernel(name, "product", moved, 2.0 * copies * inputs * products)
        yield Kernel("routing", "pass", (copies + tokens) * width * size)
        if experts.shared_intermediate_size:
            yield from self.mlp(tokens, experts.shared_intermediate_size)

    def product(self, name: str, tokens: int, inputs: int, outputs: int) -> Kernel:
        moved: float = tokens * (inputs + outputs) * self.form.itemsize
        moved += inputs * outputs * self.form.weight_itemsize
        return Kernel(name, "product", moved, 2.0 * tokens * inputs * outputs)

    def choice(self, rows: int) -> Iterator[Kernel]:
        logits = rows * self.model.vocab_size
        yield Kernel("choice", "pass", logits * self.form.itemsize, calls=2)
        if not self.form.chooses_at_once:
            # Widened, a softmax, and a sort of keys and places by radix, four passes of each.
            passes = 2 + 2 + 4 * 2 * 3
            yield Kernel("choice", "pass", passes * logits * FP32, calls=passes)
