"""Random-weight Qwen3 models of stated shapes, for benchmarks that need a shape and not an answer.

    python -m bench.models 46m out/bench/46m

Weights are random (seed 0, std 0.02), so texts are noise; run with `ignore_eos` and fixed
`max_tokens`. The tokenizer is a byte-level BPE whose vocabulary fills the model's, so that every
sampled id decodes; common words are one token each, whatever the vocabulary.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

COPYING = "46m-copy"
ROPE_THETA = 1e9
_46M = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
# Words around questions, of ours and of vLLM's, which real vocabularies have as one token each.
WRAPPING = (
    "Question Question: Input: Answer Answer: only with one letter: Y for yes or N for no. "
    "to question Is it true that Reply with yes or no only."
)
SHAPES: dict[str, dict[str, Any]] = {
    # 46.1M parameters, 8.4M of them the tied embedding.
    "46m": {**_46M, "vocab_size": 16_384},
    # The same layers under the vocabulary of Qwen 2.5 and 3: 115.6M, 77.8M of them the embedding.
    "46m-152k": {**_46M, "vocab_size": 152_000},
    # 46.1M parameters that copy the text before; see `bench.copying`.
    COPYING: {
        **_46M,
        "vocab_size": 16_384,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    },
    # 474M parameters: Qwen3-0.6B's layers under a small vocabulary.
    "470m": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_768,
    },
    # 974M parameters, 1.9 GB in shards: to be loaded, not run.
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_768,
    },
}
# Hybrids by their config's class in transformers; three of four of their layers are recurrent.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    # Gated DeltaNets: 49M parameters.
    "50m-deltanet": (
        "Qwen3_5TextConfig",
        {
            **_46M,
            "vocab_size": 16_384,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    # Mamba-2: 47M parameters.
    "50m-mamba": (
        "BambaConfig",
        {
            **_46M,
            "vocab_size": 16_384,
            "attn_layer_indices": [3, 7, 11],
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
        },
    ),
}
SHARD_SIZE = "500MB"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS_SEED = 0
# The words of benchmarks' texts, how much more often than others a tokenizer sees these words and
# those of the template, and the number of other words.
NUM_COMMON_WORDS = 4_000
COMMON_TIMES = 20
NUM_WORDS = 200_000


def words(count: int, seed: int = WORDS_SEED) -> list[str]:
    """Return `count` distinct made-up lower-case words, the same for the same seed."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = rng.randint(1, 4)
        found[
            "".join(rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))
        ] = None
    return list(found)


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer of exactly `vocab_size` entries with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    everything = words(NUM_WORDS)
    common = everything[:NUM_COMMON_WORDS] * COMMON_TIMES
    seen = [f"user\nassistant\nsystem\nyes\nno\n{WRAPPING}\n"] * COMMON_TIMES + [
        " " + word for word in common + everything
    ]
    tokenizer.train_from_iterator(seen, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_model(shape: str, folder: Path) -> None:
    """Write a random bf16 model of a shape with its tokenizer to `folder`."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from bench.copying import copying_weights

    kind, sizes = HYBRIDS.get(shape) or ("Qwen3Config", SHAPES[shape])
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, sizes["vocab_size"])
    torch.manual_seed(0)
    config = getattr(transformers, kind)(
        max_position_embeddings=16_384 if shape in HYBRIDS else 4096,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if shape == COPYING:
        layers = config.num_hidden_layers
        model.load_state_dict(copying_weights(model.state_dict(), layers, ROPE_THETA))
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def main() -> None:
    """Make one model from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=[*SHAPES, *HYBRIDS])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.shape, arguments.folder)


if __name__ == "__main__":
    main()
