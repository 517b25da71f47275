"""What requests for vectors and for scores have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from engine.protocol.chat import free_names
from engine.protocol.fields import CutTo, Side


class PoolingRequest(BaseModel):
    """What requests for vectors and for scores ask in the same words; unknown fields pass.

    A text longer than `truncate_prompt_tokens`, special tokens counted, is cut to it; -1 stands for
    what the model takes. `normalize` is the older name of a vector's `use_activation`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None

    truncate_prompt_tokens: CutTo | None = None
    truncation_side: Side | None = None
    use_activation: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(free_names)] | None = None
