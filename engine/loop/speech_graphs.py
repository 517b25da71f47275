"""CUDA graphs of a speech model: one of windows by their number, one of tokens by their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.attention import AttentionBackendType, CapturableBackend
from ..kernels.step import StaticArrays, Step
from ..model.speech.runner import SpeechRunner, TextStep
from ..model.speech.whisper import WhisperModel
from .cuda_graphs import Capture, CapturedSteps, buckets

# Tokens of the largest captured step of texts: those of new windows' prompts are among them.
MOST_TOKENS = 1024


def make_runner(
    network: WhisperModel,
    backend: AttentionBackendType,
    num_slots: int,
    make_capture: Callable[[torch.device], Capture | None],
) -> SpeechRunner:
    """Return a model's runner, which replays graphs if its device can capture them."""
    captures = make_capture(network.device), make_capture(network.device)
    runner = SpeechRunner(network, backend, num_slots)
    if captures[0] is None or captures[1] is None:
        return runner
    parts = (runner.texts, runner.windows, runner.encoding)
    if not all(isinstance(one, CapturableBackend) for one in parts):
        return runner
    return GraphedSpeechRunner(runner, captures[0], captures[1])


class _Static:
    """Steps over one backend at fixed addresses, of up to `num_tokens` in `num_spans`."""

    def __init__(
        self,
        backend: CapturableBackend,
        device: torch.device,
        *,
        num_tokens: int,
        num_spans: int,
        pages: int,
    ) -> None:
        self.backend = backend
        self._num_pages = num_spans * pages
        self._arrays = StaticArrays(self._lengths(num_tokens, num_spans), device)

    def fill(
        self, arrays: dict[str, NDArray[Any]], num_decodes: int, bucket: int, spans: int
    ) -> Step:
        """Return a step, padded to `bucket` tokens and `spans` spans, and prepare for it."""
        filling = {
            "slots": self.backend.trash_slot,
            "query_starts": len(arrays["token_ids"]),
            "page_starts": len(arrays["pages"]),
        }
        lengths = self._lengths(bucket, spans)
        views, known = self._arrays.fill(bucket, lengths, arrays, filling)
        step = Step(num_decodes, **views, copy_on_host=Step(num_decodes, **known))
        self.backend.prepare(step)
        return step

    def _lengths(self, num_tokens: int, num_spans: int) -> dict[str, int]:
        """Return the lengths of arrays; a text's last token may be wanted twice."""
        return {
            "token_ids": num_tokens,
            "positions": num_tokens,
            "slots": num_tokens,
            "query_starts": num_spans + 1,
            "context_lengths": num_spans,
            "page_starts": num_spans + 1,
            "logit_rows": 2 * num_spans,
            "pages": self._num_pages,
        }


class GraphedSpeechRunner(SpeechRunner):
    """A runner that replays graphs: windows and tokens that a step lacks are filled up.

    The first step of each kind has the largest size, so that the memory pool has room for others.
    """

    def __init__(self, runner: SpeechRunner, of_windows: Capture, of_texts: Capture) -> None:
        vars(self).update(vars(runner))
        network, device = self.network, self.network.device
        model, pages = network.architecture, self.pages
        self._sources = model.max_source_positions
        self._window_buckets = list(buckets(self.windows_at_once, 1))
        self._token_buckets = list(buckets(MOST_TOKENS))
        most, tokens = self._window_buckets[-1], self._token_buckets[-1]
        rows = {"num_tokens": most * self._sources, "num_spans": most, "pages": pages.of_window}
        # The last bucket may be larger than the most windows.
        self.encoding = self.make_attention([model.encoder_shape], most * pages.of_window)
        self._encoded = _Static(_capturable(self.encoding), device, **rows)
        self._stored = _Static(_capturable(self.windows), device, **rows)
        texts = {"num_tokens": tokens, "num_spans": tokens}
        self._written = _Static(_capturable(self.texts), device, **texts, pages=pages.of_text)
        self._seen = _Static(_capturable(self.windows), device, **texts, pages=pages.of_window)
        _capturable(self.encoding).allocate_workspace(most * self._sources, 0)
        _capturable(self.texts).allocate_workspace(tokens, tokens)
        _capturable(self.windows).allocate_workspace(tokens, tokens)
        shape = (most, model.num_mels, model.window_frames)
        self._features = torch.zeros(shape, dtype=network.dtype, device=device)
        self._window_graphs = CapturedSteps(of_windows, network)
        self._text_graphs = CapturedSteps(of_texts, network)

    @torch.inference_mode()
    def encode(self, slots: Sequence[int], features: Tensor) -> Tensor:
        """Encode windows; see `SpeechRunner.encode`. The states are valid until the next call."""
        if self._window_graphs.is_dropped:
            return super().encode(slots, features)
        count = len(slots)
        bucket = self._window_graphs.bucket(self._window_buckets, count)
        self._features[:count].copy_(self.on_device(features))
        total = bucket * self._sources
        starts, counts = np.zeros(bucket, np.int64), np.full(bucket, self._sources)
        own = self.window_step(np.arange(bucket), starts, counts)
        self._encoded.fill(self.arrays(self.encoding, self.pages.of_window, own), 0, total, bucket)
        storing = self.window_step(np.array(slots), starts[:count], counts[:count])
        self._stored.fill(
            self.arrays(self.windows, self.pages.of_window, storing), 0, total, bucket
        )
        encoding = self._encoded.backend
        launches = encoding.launches

        def compute() -> Tensor:
            with encoding.capturing(total, launches, bucket):
                states = self.network.encode(self._features[:bucket], encoding)
            self.network.store_cross_attention(states.flatten(0, 1), self.windows)
            return states

        # Convolutions may have other kernels for other numbers of windows.
        kind = bucket, launches
        return self._window_graphs.run(kind, compute, count, kind)

    @torch.inference_mode()
    def decode(self, step: TextStep, queries: dict[int, Tensor] | None = None) -> Tensor:
        """Compute tokens of texts; see `SpeechRunner.decode`."""
        num_tokens = len(step.token_ids)
        is_captured = queries is None and num_tokens <= self._token_buckets[-1]
        if not is_captured or self._text_graphs.is_dropped:
            return super().decode(step, queries)
        bucket = self._text_graphs.bucket(self._token_buckets, num_tokens)
        arrays = self.arrays(self.texts, self.pages.of_text, step)
        packed = self._written.fill(arrays, step.num_single, bucket, bucket)
        looking = self.looking_step(step)
        arrays = self.arrays(self.windows, self.pages.of_window, looking)
        self._seen.fill(arrays, num_tokens, bucket, bucket)
        texts, windows = self._written.backend, self._seen.backend
        launches = texts.launches, windows.launches
        if self._text_graphs.is_full and (bucket, *launches) not in self._text_graphs:
            launches = texts.all_launches, windows.all_launches

        def compute() -> Tensor:
            with ExitStack() as stack:
                for backend, own in zip((texts, windows), launches, strict=True):
                    stack.enter_context(backend.capturing(bucket, own))
                step = packed.with_ids(self.last_ids)
                return self.network.hidden_states(step, texts, windows)

        hidden = self._text_graphs.run((bucket, *launches), compute, len(step.rows), launches)
        return self.network.compute_logits(hidden)

    def free_memory(self) -> None:
        """Release all graphs and cached memory."""
        self._window_graphs.drop()
        self._text_graphs.drop()
        super().free_memory()


def _capturable(backend: object) -> CapturableBackend:
    assert isinstance(backend, CapturableBackend)
    return backend
