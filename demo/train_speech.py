"""Train the speech model from scratch on words spoken here: `python -m tidemill.demo.train_speech`.

The recipe: windows of six seconds from `demo.speech_corpus`, bfloat16 autocast, Muon for the
matrices and AdamW for the rest, cosine decay. Since it is known when each word is said, the encoder
is also taught which word it hears where, which came before, and how many (by heads that are thrown
away), and two heads of the decoder are taught to look at the word that
comes next, which makes times of words exact. Both help most at first and fade.
One process makes windows, one trains, one thread each: 4 and 14 minutes of a core, reckoned from
300 steps. The work is a number of steps, not of minutes, so that a busy machine makes as good a
model, later. The weights that are there are not of one such run (docs/adr/0052).
The new model replaces the one in DIR only if it passes `demo.evaluate_speech`.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing import get_context
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from . import SPEECH_PATH, evaluate_speech
from .speech_corpus import (
    FRAME_SAMPLES,
    IGNORED,
    LATEST_START,
    MAX_COUNT,
    MAX_LENGTH,
    NUM_FRAMES,
    WINDOW_SECONDS,
    Corpus,
    Window,
)
from .speech_tokenizer import (
    END,
    NO_SPEECH,
    NO_TIMESTAMPS,
    START,
    START_OF_PREVIOUS,
    TASKS,
    build_tokenizer,
)
from .speech_words import NUM_WORDS, WORDS, WORDS_A_SEGMENT
from .voices import SAMPLE_RATE

BATCH_WINDOWS = 24
BATCHES_AHEAD = 8
KEPT_BATCHES = 24
USES = 3
"""Speaking a window costs half as much as learning from it."""
CYCLES = ((1500, 1.0), (700, 0.5))
"""Steps, and by how much the rates of learning are scaled at the top of their cosine."""
WARMUP_STEPS = 60
MUON_LEARNING_RATE = 0.02
ADAMW_LEARNING_RATE = 0.003
ALIGNED_HEADS = [(1, 0), (1, 1)]
"""Layers and heads of the decoder that look at the word that comes next."""
LISTENING_SHARE = 1.0
ALIGNMENT_SHARE = 0.5
LEAST_HELP = 0.1
LANGUAGE_SHARE = 0.3
"""One id of a window is its language, or that nobody speaks: it counts for more than another."""
NEAR_STEPS = 2.0
"""So near, in steps of 20 ms, is a time that is nearly right."""
SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows as tensors, padded at the end; the fields are those of `Window`."""

    features: torch.Tensor  # [B, 80, 600]
    ids: torch.Tensor  # [B, T]
    targets: torch.Tensor  # [B, T]
    labels: torch.Tensor  # [B, 5, 300]
    spans: torch.Tensor  # [B, T, 2]


class Listener(nn.Module):
    """Heads on the encoder that are thrown away after training: they teach it what to hear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._sizes = [*[1 + len(WORDS) * NUM_WORDS] * 3, 1 + WORDS_A_SEGMENT, 1 + MAX_COUNT]
        self._head = nn.Linear(width, sum(self._sizes))

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of `labels [B, 5, S]`, told from `hidden [B, S, D]`.

        Silence, most of a window, counts as much as speech.
        """
        logits = self._head(hidden).float().split(self._sizes, -1)
        each = [
            functional.cross_entropy(one.transpose(1, 2), labels[:, i], reduction="none")
            for i, one in enumerate(logits)
        ]
        loss = torch.stack(each).mean(0)  # [B, S]
        is_speech = labels[:, 0] > 0
        return loss[is_speech].mean() + loss[~is_speech].mean()


def build_model(tokenizer: WhisperTokenizer) -> Any:
    """Return an untrained model of the speech model's shape."""
    end, start = tokenizer.convert_tokens_to_ids([END, START])
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=128,
        encoder_layers=3,
        # Few: each is a product of 300 by 300 a window.
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=NUM_FRAMES,
        max_target_positions=MAX_LENGTH,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        # What the decoder looks at is trained, and the fused kernel's backward pass is slower.
        attn_implementation="eager",
    )
    return WhisperForConditionalGeneration(config)


def gather(windows: list[Window]) -> Batch:
    """Return windows as one batch."""
    width = max(len(window.ids) for window in windows)
    ids = torch.zeros(len(windows), width, dtype=torch.long)
    targets = torch.full((len(windows), width), IGNORED)
    spans = torch.zeros(len(windows), width, 2, dtype=torch.long)
    for i, window in enumerate(windows):
        ids[i, : len(window.ids)] = torch.tensor(window.ids)
        targets[i, : len(window.ids)] = torch.tensor(window.targets)
        spans[i, : len(window.ids)] = torch.tensor(window.spans)
    features = torch.tensor(np.stack([window.features for window in windows]))
    labels = torch.tensor(np.stack([window.labels for window in windows]))
    return Batch(features, ids, targets, labels, spans)


def produce(queue: Any, seed: int) -> None:
    """Put batches into `queue` without end, as arrays: a process of its own runs this."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(WINDOW_SECONDS, MAX_LENGTH)
    corpus = Corpus(tokenizer, WhisperFeatureExtractor(chunk_length=WINDOW_SECONDS), seed)
    while True:
        batch = gather([corpus.window() for _ in range(BATCH_WINDOWS)])
        queue.put(tuple(tensor.numpy() for tensor in astuple(batch)))


def batches(seed: int) -> Iterator[Batch]:
    """Yield batches without end, made beside what uses them; each comes `USES` times, apart."""
    context = get_context("spawn")
    queue = context.Queue(BATCHES_AHEAD)
    producer = context.Process(target=produce, args=(queue, seed), daemon=True)
    producer.start()
    try:
        rng = random.Random(seed)
        kept: list[Batch] = []
        while True:
            fresh = Batch(*(torch.from_numpy(array) for array in queue.get()))
            yield fresh
            kept.append(fresh)
            while len(kept) > KEPT_BATCHES:
                for _ in range(USES - 1):
                    yield rng.choice(kept)
                kept.pop(rng.randrange(len(kept)))
    finally:
        producer.terminate()


def alignment_loss(looks: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """Return how little of `looks [H, B, T, S]` falls on the words that `spans [B, T, 2]` tell."""
    positions = torch.arange(looks.shape[-1])
    inside = (positions >= spans[..., :1]) & (positions < spans[..., 1:])  # [B, T, S]
    seen = (looks.float() * inside).sum(-1)[:, inside.any(-1)]  # [H, N]
    return -seen.clamp_min(1e-6).log().mean()


def writing_loss(logits: torch.Tensor, targets: torch.Tensor, softness: float) -> torch.Tensor:
    """Return the mean cross-entropy of `targets [N]`; of times, a share of it is of those near."""
    exact = functional.cross_entropy(logits, targets)
    first = logits.shape[-1] - NUM_FRAMES - 1
    is_time = targets >= first
    steps = torch.arange(NUM_FRAMES + 1) - (targets[is_time] - first)[:, None]  # [M, 301]
    near = (-0.5 * (steps / NEAR_STEPS).square()).softmax(-1)
    chances = logits[is_time].log_softmax(-1)[:, first:]
    soft = -(near * chances).sum(-1)
    hard = functional.cross_entropy(logits[is_time], targets[is_time], reduction="none")
    return exact + softness * (soft - hard).sum() / len(targets)


def losses(
    model: Any, listener: Listener, batch: Batch, help_share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of what is written, and that of what helps to learn it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model.encoder(batch.features).last_hidden_state  # [B, S, D]
        heard = listener(hidden, batch.labels)
        decoded = model.model.decoder(
            input_ids=batch.ids,
            encoder_hidden_states=hidden,
            use_cache=False,
            output_attentions=True,
        )
        trained = batch.targets != IGNORED
        logits = model.proj_out(decoded.last_hidden_state[trained])  # [N, V]
    logits, targets = logits.float(), batch.targets[trained]
    told = batch.ids[trained] == model.config.decoder_start_token_id
    written = writing_loss(logits, targets, help_share)
    written = written + LANGUAGE_SHARE * functional.cross_entropy(logits[told], targets[told])
    looks = torch.stack([decoded.cross_attentions[i][:, head] for i, head in ALIGNED_HEADS])
    aligned = alignment_loss(looks, batch.spans)
    return written, LISTENING_SHARE * heard + ALIGNMENT_SHARE * aligned


def build_optimizers(model: Any, listener: Listener) -> list[Optimizer]:
    """Return Muon over the layers' matrices and AdamW over the rest."""
    named = dict(model.model.named_parameters())
    matrices = {n: p for n, p in named.items() if p.ndim == 2 and "embed" not in n}
    rest = [p for n, p in named.items() if n not in matrices and p.requires_grad]
    muon = Muon(
        list(matrices.values()),
        lr=MUON_LEARNING_RATE,
        weight_decay=0.01,
        adjust_lr_fn="original",
    )
    rest += listener.parameters()
    adamw = AdamW(rest, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [muon, adamw]


def train(model: Any, listener: Listener, cycle: int) -> None:
    """Train `model` in place for the steps of a cycle and print how it goes."""
    steps, height = CYCLES[cycle]

    def learning_rate_factor(step: int) -> float:
        falling = 0.5 * (1 + math.cos(math.pi * step / steps))
        return height * min(1.0, (step + 1) / WARMUP_STEPS) * falling

    optimizers = build_optimizers(model, listener)
    schedules = [LambdaLR(optimizer, learning_rate_factor) for optimizer in optimizers]
    start = time.perf_counter()
    sums = [0.0, 0.0]
    for step, batch in enumerate(batches(SEED + cycle), start=1):
        help_share = LEAST_HELP if cycle else max(LEAST_HELP, 1 - step / (0.8 * steps))
        written, helping = losses(model, listener, batch, help_share)
        torch.autograd.backward(written + help_share * helping)
        clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        sums = [sums[0] + written.item(), sums[1] + helping.item()]
        if step % 50 == 0 or step == steps:
            taken = (step - 1) % 50 + 1
            print(
                f"step {step}/{steps}  loss {sums[0] / taken:.4f}, helping {sums[1] / taken:.4f}"
                f"  {(time.perf_counter() - start) / 60:.1f} min",
                flush=True,
            )
            sums = [0.0, 0.0]
        if step == steps:
            return


def generation_config(tokenizer: WhisperTokenizer) -> GenerationConfig:
    """Return what Whisper's generation has to know of the vocabulary and of the alignment."""

    def token(name: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(name))

    never_written = [START, *(f"<|{task}|>" for task in TASKS), "<|startoflm|>"]
    return GenerationConfig(
        bos_token_id=token(END),
        eos_token_id=token(END),
        pad_token_id=token(END),
        decoder_start_token_id=token(START),
        prev_sot_token_id=token(START_OF_PREVIOUS),
        no_timestamps_token_id=token(NO_TIMESTAMPS),
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": token(f"<|{language}|>") for language in WORDS},
        task_to_id={task: token(f"<|{task}|>") for task in TASKS},
        suppress_tokens=[*map(token, never_written), token(START_OF_PREVIOUS), token(NO_SPEECH)],
        begin_suppress_tokens=[token("Ġ")],
        alignment_heads=[list(one) for one in ALIGNED_HEADS],
        max_initial_timestamp_index=round(LATEST_START * SAMPLE_RATE / FRAME_SAMPLES),
        return_timestamps=False,
        max_length=MAX_LENGTH,
    )


def save(model: Any, tokenizer: WhisperTokenizer, folder: Path) -> None:
    """Write the model in fp16, with its tokenizer and its features, in transformers' format."""
    model.generation_config = generation_config(tokenizer)
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=WINDOW_SECONDS).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def main() -> int:
    """Run the command; exit status 1 when the new model is not good enough to be kept."""
    parser = argparse.ArgumentParser(
        prog="python -m tidemill.demo.train_speech", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=SPEECH_PATH, help="folder of the new model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer(WINDOW_SECONDS, MAX_LENGTH)
    model = build_model(tokenizer).train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    listener = Listener(model.config.d_model)
    for cycle in range(len(CYCLES)):
        train(model, listener, cycle)
    with tempfile.TemporaryDirectory() as name:
        save(model, tokenizer, Path(name))
        if evaluate_speech.report(Path(name)) < evaluate_speech.REQUIRED_ACCURACY:
            print(f"Not good enough: {arguments.out} is left as it was.")
            return 1
        shutil.copytree(name, arguments.out, dirs_exist_ok=True)
    print(f"Saved in {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
