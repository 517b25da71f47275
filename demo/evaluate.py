"""Accuracy of the demo model on held-out questions: `python -m tidemill.demo.evaluate [DIR]`.

Plain transformers, greedy. Exit status 1 when fewer than 95 % of the answers are right.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from . import MODEL_PATH, questions

REQUIRED_ACCURACY = 0.95
MAX_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one example; `margin` is the least lead, in logits, of any token."""

    example: questions.Example
    text: str
    margin: float

    @property
    def is_right(self) -> bool:
        """Compare the answer with the expected one, to the letter."""
        return self.text == self.example.answer


def load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a saved model with the tokenizer beside it, ready for inference."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).eval(), tokenizer


@torch.inference_mode()
def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[questions.Example],
) -> list[Answer]:
    """Return the model's greedy answers to `examples`, asked as one left-padded batch."""
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": example.question}] for example in examples],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(
        **prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new_ids = generated.sequences[:, prompts["input_ids"].shape[1] :]  # [B, T]
    best_two = torch.stack(generated.logits, 1).float().topk(2).values  # [B, T, 2]
    leads = best_two[..., 0] - best_two[..., 1]  # [B, T]
    answers = []
    for example, ids, lead in zip(examples, new_ids, leads, strict=True):
        ends = (ids == tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(ids)
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        answers.append(Answer(example, text, float(lead[:length].min())))
    return answers


def ask_all(
    folder: Path, *, dtype: torch.dtype = torch.float32, per_kind: int = 120
) -> list[Answer]:
    """Return the answers of the model saved in `folder` to held-out questions of every kind."""
    model, tokenizer = load(folder, dtype)
    return [
        answer
        for kind in questions.KINDS
        for answer in ask(model, tokenizer, questions.questions(kind, "held_out", per_kind))
    ]


def report(answers: Sequence[Answer]) -> float:
    """Print a table of accuracy and margins for each kind and return the overall accuracy."""
    print(f"{'kind':12} {'asked':>6} {'right':>7} {'margin: least':>14} {'5th centile':>12}")
    groups = {kind: [a for a in answers if a.example.kind == kind] for kind in questions.KINDS}
    for kind, group in (*groups.items(), ("all", list(answers))):
        margins = sorted(answer.margin for answer in group)
        share = sum(answer.is_right for answer in group) / len(group)
        centile = margins[len(margins) // 20]
        print(f"{kind:12} {len(group):6} {share:7.1%} {margins[0]:14.2f} {centile:12.2f}")
    for answer in [answer for answer in answers if not answer.is_right][:20]:
        wanted = answer.example.answer
        print(f"  wrong: {answer.example.question!r} -> {answer.text!r}, not {wanted!r}")
    return sum(answer.is_right for answer in answers) / len(answers)


def main() -> int:
    """Run the command; the returned exit status says whether the model is good enough."""
    parser = argparse.ArgumentParser(prog="python -m tidemill.demo.evaluate", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_PATH)
    parser.add_argument("--per-kind", type=int, default=120, help="questions of each kind")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    answers = ask_all(arguments.folder, dtype=dtype, per_kind=arguments.per_kind)
    return int(report(answers) < REQUIRED_ACCURACY)


if __name__ == "__main__":
    raise SystemExit(main())
