"""Audio features equal those of transformers' extractor for the same samples."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tidemill.engine.media.audio_features import FeatureExtractor
from tidemill.engine.scheduling.speech import FeatureSettings

RATE = 16_000


def samples_of(count: int) -> NDArray[np.float32]:
    """Return noise that grows louder, so that its maximum is at the end."""
    noise = np.random.default_rng(0).standard_normal(count) * np.linspace(0.01, 0.5, count)
    return noise.astype(np.float32)


@pytest.mark.parametrize(("mels", "seconds"), [(80, 30), (128, 30), (80, 10)])
@pytest.mark.parametrize("count", [1, 199, 400, 16_001, 160_000, 480_000])
def test_a_recording_of_one_window_has_transformers_features(
    mels: int, seconds: int, count: int
) -> None:
    """It may have any length and width, and shorter windows than Whisper's."""
    from transformers import WhisperFeatureExtractor

    samples = samples_of(min(count, seconds * RATE))
    ours = FeatureExtractor(FeatureSettings(mels, RATE, 400, 160, seconds * 100))
    theirs = WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    expected = theirs(samples, sampling_rate=RATE).input_features[0]
    np.testing.assert_allclose(ours.features(samples), expected, atol=1e-5)


@pytest.mark.parametrize("count", [480_001, 100 * RATE + 37])
def test_a_longer_one_has_them_up_to_its_end(count: int) -> None:
    """The last frames are mirrored at its end, regardless of earlier cuts."""
    from transformers import WhisperFeatureExtractor

    samples = samples_of(count)
    ours = FeatureExtractor(FeatureSettings(80, RATE, 400, 160, 3_000))
    expected = WhisperFeatureExtractor()(
        samples, sampling_rate=RATE, truncation=False, padding="longest"
    ).input_features[0]
    np.testing.assert_allclose(ours.features(samples), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "frames"), [(1, 1), (480_000, 3_000), (480_159, 3_000), (480_160, 3_001)]
)
def test_the_number_of_frames_matches_the_features(count: int, frames: int) -> None:
    """A window plus less than a frame is one window, as in transformers and openai-whisper."""
    ours = FeatureExtractor(FeatureSettings(80, RATE, 400, 160, 3_000))
    assert ours.num_frames(count) == frames <= ours.features(samples_of(count)).shape[1]


def test_silence_is_the_same_everywhere() -> None:
    """Silence has the smallest feature value everywhere."""
    ours = FeatureExtractor(FeatureSettings(80, RATE, 400, 160, 3_000))
    features = ours.features(np.zeros(5 * RATE, np.float32))
    assert features.shape == (80, 3_000)
    assert features.unique().tolist() == [-1.5]
