"""`python -m engine.ranks.following FD`: a rank that does what the first one tells it to.

It ends when the first does, whatever it does then, and after a word when it fails.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from engine.errors import EngineError, first_line_of
from engine.kernels.attention import AttentionBackend
from engine.kernels.backends import spare_torch_its_threads
from engine.model.adapters.loading import read_adapters
from engine.model.checkpoint import find_checkpoint
from engine.model.description import read_description
from engine.model.families import architecture_of
from engine.model.memory import free_bytes
from engine.model.network import LoadedModel
from engine.model.own import load_share
from engine.model.quantised.description import quantisation_of
from engine.ranks.group import TorchGroup
from engine.ranks.messages import (
    LESS,
    Allocate,
    Answer,
    Begin,
    Done,
    Failed,
    Forward,
    Free,
    Load,
    Measure,
    Meet,
    Message,
    Ping,
    Pong,
    Told,
)

EXIT_FAILED = 3
_PR_SET_PDEATHSIG = 1


class Following:
    """One rank: a thread takes in what it is told, so that it hears of the end at any moment."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answering = threading.Lock()
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._models: dict[int, LoadedModel] = {}
        self._attentions: dict[int, AttentionBackend] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    @torch.inference_mode()
    def run(self) -> None:
        """Do what is told, until this process is ended."""
        begin = self._told.get().message
        assert isinstance(begin, Begin)
        self._device = torch.device(begin.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._settings = begin.settings
        self._group = TorchGroup(begin.share, self._device, begin.patience_seconds)
        while True:
            message, dropped = self._told.get()
            for number in dropped:
                self._models.pop(number, None)
                self._attentions.pop(number, None)
            self._do(message)

    def fail(self, exc: Exception) -> None:
        """Say what went wrong."""
        if isinstance(exc, torch.OutOfMemoryError | MemoryError):
            words = f"it ran out of memory{LESS}: {first_line_of(exc)}"
        elif isinstance(exc, EngineError):
            words = str(exc)
        else:
            words = f"{type(exc).__name__}: {first_line_of(exc)}"
        self._answer(Failed(words))

    def _do(self, told: Message) -> None:
        match told:
            case Load():
                self._load(told)
                self._answer(Done())
            case Meet():
                self._group.meet(told.folder)
                self._answer(Done())
            case Allocate():
                model = self._models[told.model]
                self._attentions[told.number] = model.attention(told.num_pages)
                self._answer(Done())
            case Measure():
                self._answer(Free(free_bytes(self._device)))
            case Forward():
                self._forward(told)

    def _load(self, told: Load) -> None:
        settings = self._settings
        description = read_description(settings.model)
        architecture = architecture_of(description)
        quantisation = quantisation_of(description, settings.quantization)
        adapters = read_adapters(settings, description, architecture) if told.has_adapters else ()
        model = self._models[told.number] = load_share(
            find_checkpoint(settings.model, quantisation),
            description,
            architecture,
            told.dtype,
            self._device,
            num_layers=told.num_layers,
            adapters=adapters,
            group=self._group,
        )
        if not model.network.needs_torch:
            spare_torch_its_threads(self._device)

    def _forward(self, told: Forward) -> None:
        model, attention = self._models[told.model], self._attentions[told.attention]
        step = told.step(self._device)
        if told.has_unknown_ids:
            self._group.spread(step.token_ids)
        if told.shown is not None:
            vectors = torch.empty(told.shown, dtype=model.dtype, device=self._device)
            step = replace(step, shown=self._group.spread(vectors))
        attention.prepare(step)
        model.network.forward(step, attention)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                told = self._connection.recv()
                if isinstance(told.message, Ping):
                    self._answer(Pong())
                else:
                    self._told.put(told)
        os._exit(0)  # nobody is there any more, and the main thread may wait for them

    def _answer(self, answer: Answer) -> None:
        with self._answering, suppress(OSError):
            self._connection.send(answer)


def main() -> None:
    """Follow at the end of an inherited socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    following = Following(Connection(int(sys.argv[1])))
    try:
        following.run()
    except Exception as exc:  # noqa: BLE001 - whatever it was, the first rank says it
        following.fail(exc)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
