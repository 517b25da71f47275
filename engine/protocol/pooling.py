"""What requests for vectors and for scores have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from engine.protocol.chat import free_names
from engine.protocol.fields import Whole


def _cut(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1, for as long as the model takes, or at least 1")
    return value


class PoolingRequest(BaseModel):
    """What requests for vectors and for scores ask in the same words; unknown fields pass.

    A text longer than `truncate_prompt_tokens`, special tokens counted, is cut to it; -1 stands for
    what the model takes. `normalize` is the older name of a vector's `use_activation`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None

    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1), AfterValidator(_cut)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(free_names)] | None = None
