"""Tiny random decision models in folders, in the layouts in which they are published."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Model,
)

from tests.engine.model.encoders.small_encoders import FAMILIES, MINILM, SIZES, TOKENIZER
from tidemill.demo import MODEL_PATH

VOCAB = json.loads((MODEL_PATH / "config.json").read_bytes())["vocab_size"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN: dict[str, Any] = {
    "text_config": {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 2048,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    },
}
LFM2: dict[str, Any] = {
    "text_config": {
        "model_type": "lfm2",
        "vocab_size": VOCAB + 8,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": 2048,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "vision_config": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_patches": 16,
    },
    "projector_hidden_size": 32,
}
CODES = [chr(65 + n) for n in range(26)] + [f"{a}{b}" for a in "ABCDEFGHI" for b in "QRSTUVWXY"]


def save_module(module: PreTrainedModel, folder: Path) -> None:
    """Save a module whose weights are all random, with a tokenizer and a ChatML template."""
    for weight in module.parameters():
        weight.data += torch.randn_like(weight) * 0.1
    module.eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    (folder / "chat_template.jinja").write_text(CHATML)


def save_d3(folder: Path, **changes: Any) -> tuple[Any, torch.Tensor]:
    """Save a Decision 3.0 model; return its backbone and its readout."""
    torch.manual_seed(11)
    module = Qwen3_5Model(Qwen3_5Config(**QWEN, attn_implementation="eager"))
    save_module(module, folder)
    readout = torch.randn(len(CODES), 48)
    save_file({"weight": readout}, folder / "readout.safetensors")
    described = {
        "format_version": 1,
        "prompt": "d3",
        "codes": CODES,
        "token_ids": list(range(len(CODES))),
        "temperature": 2.0,
        "attention_mode": "noncausal_full_attention",
        **changes,
    }
    (folder / "decision_config.json").write_text(json.dumps(described))
    return module.language_model, readout


def save_clef(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Save a Clef-Flash model; return its network and the weights of its joint head."""
    torch.manual_seed(12)
    config = Qwen3_5Config(**QWEN, attn_implementation="eager", tie_word_embeddings=False)
    module = Qwen3_5ForConditionalGeneration(config)
    save_module(module, folder)
    sizes = {"hidden_size": 48, "width": 32, "routing_layers": 2, "layers": 2, "heads": 4}
    sizes["feedforward"] = 40
    (folder / "joint_head_config.json").write_text(json.dumps(sizes))
    weights = {name: torch.randn(shape) * 0.3 for name, shape in _joint_shapes(48, 32, 40).items()}
    weights |= {f"{name}_logit_scale": torch.tensor(2.5) for name in ("prior", "joint")}
    save_file(weights, folder / "joint_head.safetensors")
    return module, weights


def save_marked(folder: Path, kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Save a model of Laya's or Julia's form; return its encoder and the weights of its head."""
    torch.manual_seed(14)
    width = 128
    config = ModernBertConfig(
        **{**SIZES, **FAMILIES["ModernBert"], "hidden_size": width, "num_attention_heads": 2},
        attn_implementation="eager",
        pad_token_id=0,
    )
    module = ModernBertModel(config).eval()
    for weight in module.parameters():
        weight.data += torch.randn_like(weight) * 0.1
    config.save_pretrained(folder / "encoder")
    (folder / "tokenizer").mkdir()
    for name in TOKENIZER:
        shutil.copy(MINILM / name, folder / "tokenizer")
    shapes: dict[str, tuple[int, ...]] = {
        "type_emb.weight": (3, width),
        "scorer.1.weight": (width, width),
        "scorer.1.bias": (width,),
        "scorer.3.weight": (1, width),
        "scorer.3.bias": (1,),
    }
    attentions = [f"head.layers.{layer}.self_attn" for layer in range(2)]
    norms = [f"head.layers.{layer}.norm{number}" for layer in range(2) for number in (1, 2)]
    mlps = [(f"head.layers.{n}.linear1", f"head.layers.{n}.linear2") for n in range(2)]
    shapes |= _layer_shapes(width, 4 * width, [*norms, "scorer.0"], attentions, mlps)
    weights = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    weights["scorer.3.weight"] *= 20
    others = {"temperature": torch.ones(3)}
    for name, shape in (("act_head.0", (256, width + 4)), ("act_head.2", (2, 256))):
        others |= {f"{name}.weight": torch.randn(shape), f"{name}.bias": torch.randn(shape[0])}
    encoder = {f"encoder.{name}": weight for name, weight in module.state_dict().items()}
    save_file({**encoder, **weights, **others}, folder / "model.safetensors")
    if kind == "laya":
        described: dict[str, Any] = {"head_layers": 2, "max_len": 128, "head_max_len": 96}
        described |= {"temperature": [2.0, 1.5, 9.0], "temperature_by_options": {"score:3-5": 0.1}}
        described |= {"encoder": "answerdotai/ModernBERT-large", "act_costs": {"ask": 0.1}}
        (folder / "rl_agent_config.json").write_text(json.dumps(described))
    else:
        described = {"format_version": 1, "head_layers": 2, "n_act": 2, "dropout": 0.1}
        (folder / "julia_config.json").write_text(json.dumps(described))
        policy = {"max_length": 256, "head_length": 128}
        (folder / "inference-policy.json").write_text(json.dumps(policy))
        (folder / "config.json").write_text(json.dumps({"library_name": "julia"}))
    return module, weights


def save_liquid(folder: Path) -> Any:
    """Save a Liquid d1 model, whose tokenizer has the labels as tokens; return its network."""
    torch.manual_seed(13)
    module = Lfm2VlForConditionalGeneration(Lfm2VlConfig(**LFM2, attn_implementation="eager"))
    save_module(module, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["yes", "Yes", "no", " A", " B"])
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return module


def _joint_shapes(hidden: int, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_norm.weight": (hidden,),
        "hidden_norm.bias": (hidden,),
        "type_embedding.weight": (3, width),
        "residual_scorer.0.weight": (width, 4 * width),
        "residual_scorer.0.bias": (width,),
        "residual_scorer.3.weight": (1, width),
        "residual_scorer.3.bias": (1,),
        "prior_logit_scale": (),
        "joint_logit_scale": (),
        "residual_gate": (),
    }
    projected = ("memory", "question", "option_question", "global")
    for name in (*projected, "option_context", "option_lexical"):
        shapes[f"{name}_projection.weight"] = (width, hidden)
    norms = ["option_summary_norm", "field_norm", "option_norm"]
    attentions, mlps = [], []
    for layer in ("0", "1"):
        evidence, own = f"evidence_layers.{layer}.", f"layers.{layer}."
        norms += [f"{evidence}{name}" for name in ("query_norm", "memory_norm", "feedforward_norm")]
        norms += [f"{own}norm{number}" for number in (1, 2, 3)]
        attentions += [f"{evidence}attention", f"{own}self_attn", f"{own}multihead_attn"]
        mlps += [(f"{evidence}feedforward.0", f"{evidence}feedforward.3")]
        mlps += [(f"{own}linear1", f"{own}linear2")]
    return shapes | _layer_shapes(width, inner, norms, attentions, mlps)


def _layer_shapes(
    width: int, inner: int, norms: list[str], attentions: list[str], mlps: list[tuple[str, str]]
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for name in attentions:
        shapes |= {
            f"{name}.in_proj_weight": (3 * width, width),
            f"{name}.in_proj_bias": (3 * width,),
        }
        shapes |= {f"{name}.out_proj.weight": (width, width), f"{name}.out_proj.bias": (width,)}
    for up, down in mlps:
        shapes |= {f"{up}.weight": (inner, width), f"{up}.bias": (inner,)}
        shapes |= {f"{down}.weight": (width, inner), f"{down}.bias": (width,)}
    return shapes


class HeadReference:
    """Layers of a decision head by the names of their weights, in plain torch."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a linear layer of `x`."""
        return functional.linear(
            x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        )

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the LayerNorm of `x`."""
        weight = self._weights[f"{name}.weight"]
        return functional.layer_norm(x, weight.shape, weight, self._weights[f"{name}.bias"])

    def attention(
        self, name: str, x: torch.Tensor, memory: torch.Tensor, heads: int = 4
    ) -> torch.Tensor:
        """Return attention from `x` to the memory."""
        weights, biases = (
            self._weights[f"{name}.in_proj_{kind}"].chunk(3) for kind in ("weight", "bias")
        )
        query, key, value = (
            functional.linear(own, weight, bias).unflatten(1, (heads, -1)).transpose(0, 1)
            for own, weight, bias in zip((x, memory, memory), weights, biases, strict=True)
        )
        shares = (query @ key.transpose(1, 2) / query.shape[2] ** 0.5).softmax(-1)
        return self.linear(f"{name}.out_proj", (shares @ value).transpose(0, 1).flatten(1))

    def mlp(self, first: str, last: str, x: torch.Tensor) -> torch.Tensor:
        """Return two linear layers with GELU between them."""
        return self.linear(last, functional.gelu(self.linear(first, x)))


class JointReference(HeadReference):
    """The joint schema head of Clef, a question at a time."""

    def probabilities(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        kinds: list[int],
        questions: list[slice],
        options: list[list[slice]],
    ) -> list[list[float]]:
        """Return each question's probabilities; `embedded [T, H]` are output embeddings."""
        hidden = self.norm("hidden_norm", hidden)
        memory, last = self.linear("memory_projection", hidden), hidden[-1]
        texts = [hidden[place].mean(0) for place in questions]
        lexical = [torch.stack([embedded[one].mean(0) for one in own]) for own in options]
        mixed = torch.cat([
            self.linear("option_context_projection", torch.stack([hidden[s].mean(0) for s in own]))
            + self.linear("option_lexical_projection", words)
            + self.linear("option_question_projection", text)
            for own, words, text in zip(options, lexical, texts, strict=True)
        ])  # fmt: skip
        for layer in ("evidence_layers.0.", "evidence_layers.1."):
            keys = self.norm(f"{layer}memory_norm", memory)
            own_queries = self.norm(f"{layer}query_norm", mixed)
            mixed = mixed + self.attention(f"{layer}attention", own_queries, keys)
            inner = self.norm(f"{layer}feedforward_norm", mixed)
            mixed = mixed + self.mlp(f"{layer}feedforward.0", f"{layer}feedforward.3", inner)
        of_question = mixed.split([len(own) for own in options])
        rows = []
        for text, kind, own in zip(texts, kinds, of_question, strict=True):
            base = self.linear("question_projection", text)
            summary = (own @ base / len(base) ** 0.5).softmax(0) @ own
            row = base + self.norm("option_summary_norm", summary)
            row = row + self.linear("global_projection", last)
            rows.append(row + self._weights["type_embedding.weight"][kind])
        fields = torch.stack(rows)
        for layer in ("layers.0.", "layers.1."):
            normed = self.norm(f"{layer}norm1", fields)
            fields = fields + self.attention(f"{layer}self_attn", normed, normed)
            normed = self.norm(f"{layer}norm2", fields)
            fields = fields + self.attention(f"{layer}multihead_attn", normed, memory)
            normed = self.norm(f"{layer}norm3", fields)
            fields = fields + self.mlp(f"{layer}linear1", f"{layer}linear2", normed)
        fields = self.norm("field_norm", fields)
        answers = []
        for field, text, words, own in zip(fields, texts, lexical, of_question, strict=True):
            prior = functional.normalize(words, dim=-1) @ functional.normalize(text + last, dim=0)
            choices = self.norm("option_norm", own)
            same = field.expand_as(choices)
            features = torch.cat([same, choices, same * choices, (same - choices).abs()], -1)
            joint = functional.cosine_similarity(same, choices, dim=-1)
            joint = joint * self._weights["joint_logit_scale"].exp()
            joint = joint + self.mlp("residual_scorer.0", "residual_scorer.3", features)[:, 0]
            logits = prior * self._weights["prior_logit_scale"].exp()
            logits = logits + self._weights["residual_gate"].sigmoid() * joint
            answers.append(logits.softmax(0).tolist())
        return answers


class MarkerReference(HeadReference):
    """The head of Laya and Julia over one sequence."""

    def logits(self, hidden: torch.Tensor, kind: int, markers: list[int]) -> torch.Tensor:
        """Return the logits of the options from the encoder's states `[T, H]`."""
        x = hidden + self._weights["type_emb.weight"][kind]
        for layer in ("head.layers.0.", "head.layers.1."):
            normed = self.norm(f"{layer}norm1", x)
            x = x + self.attention(f"{layer}self_attn", normed, normed, heads=2)
            up = self.linear(f"{layer}linear1", self.norm(f"{layer}norm2", x)).relu()
            x = x + self.linear(f"{layer}linear2", up)
        return self.mlp("scorer.1", "scorer.3", self.norm("scorer.0", x[markers]))[:, 0]


def token_ids(folder: Path, text: str) -> torch.Tensor:
    """Return the tokens of a prompt by transformers' tokenizer, `[1, T]`."""
    return torch.tensor([_tokenizer(folder).encode(text, add_special_tokens=False)])


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)
