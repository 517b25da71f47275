"""Text-only classes for model types that transformers lists only together with their images."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

# Classes that transformers has, but does not list, by their configs.
_UNLISTED = {"Mistral4Config": "Mistral4ForCausalLM"}
# The beginning of the names of text models without a head, by the whole model's type.
HEADLESS = {"muse_glimmer": "MuseGlimmerText", "muse_spark": "MuseSparkText"}


@cache
def register_text_classes() -> None:
    """Have `AutoModelForCausalLM` find them."""
    import transformers

    for config, model in _UNLISTED.items():
        _register(getattr(transformers, config), getattr(transformers, model))
    for name in HEADLESS.values():
        config, model = (getattr(transformers, name + end) for end in ("Config", "Model"))
        _register(config, _with_head(model))


def _register(config: Any, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.register(config, model, exist_ok=True)


def _with_head(text_model: Any) -> Any:
    """Return a class of a text model with its head, as the whole model has it.

    Its logits are multiplied and capped if its config has the fields.
    """

    def make(self: Any, config: Any) -> None:
        parent.__init__(self, config)
        self.model = text_model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **more: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.model(input_ids=input_ids, **more).last_hidden_state
        is_count = isinstance(logits_to_keep, int)
        rows = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = self.lm_head(hidden[:, rows])
        logits = logits * getattr(self.config, "output_multiplier", 1.0)
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = (logits / cap).tanh() * cap
        return CausalLMOutput(logits=logits)

    (parent,) = text_model.__bases__
    fields = {
        "__init__": make,
        "forward": forward,
        "__module__": text_model.__module__,
        "config_class": text_model.config_class,
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    return type(text_model.__name__, (parent,), fields)
