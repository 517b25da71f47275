"""Images that keep their shape have the sizes of transformers' processors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from transformers.models.glm4v import image_processing_pil_glm4v as glm
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as paddle
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

from tidemill.engine.model.vision.squares import BySquares, GlmSquares, PaddleSquares

LIMITS = 56 * 56, 28 * 28 * 40
BOTH_FRAMES = tuple(2 * limit for limit in LIMITS)
RULES: dict[type[BySquares], Callable[[int, int], tuple[int, int]]] = {
    BySquares: lambda height, width: qwen.smart_resize(height, width, 28, *LIMITS),
    GlmSquares: lambda height, width: glm.smart_resize(2, height, width, 2, 28, *BOTH_FRAMES),
    PaddleSquares: lambda height, width: paddle.smart_resize(height, width, 28, *LIMITS),
}


@pytest.mark.parametrize("squares", RULES)
def test_sizes_are_those_of_transformers(squares: type[BySquares]) -> None:
    """Aspect ratios vary, and sizes are between the limits and at both, or below one square."""
    rng = np.random.default_rng(0)
    rule, expected = squares(28, *LIMITS), RULES[squares]
    sides = np.exp(rng.uniform(0, 8, (500, 2))).astype(int).tolist()
    num_refused = 0
    for height, width in [*sides, [1, 1], [2000, 10], [10, 2000], [1, 200], [27, 28]]:
        try:
            size = expected(height, width)
        except ValueError:
            num_refused += 1
            with pytest.raises(ValueError, match="aspect ratio is above 200"):
                rule.fit(height, width)
            continue
        fit = rule.fit(height, width)
        assert fit[:2] == size
        assert fit[2:] == (fit.height // 28, fit.width // 28)
    assert 0 < num_refused < 100
