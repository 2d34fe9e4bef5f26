"""Small things many tests need. Every cache and run goes to a folder that pytest removes."""

import pytest
import torch

from m1clip.config import ModelConfig, TextConfig, TrainConfig, VisionConfig


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    import os

    os.environ["M1CLIP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other


@pytest.fixture
def tiny() -> ModelConfig:
    return ModelConfig(VisionConfig(32, 16, 32, 2, 2), TextConfig(512, 24, 32, 2, 2), embed=24)


@pytest.fixture
def tiny_run(tiny: ModelConfig) -> TrainConfig:
    """Two epochs of four steps."""
    return TrainConfig(
        model=tiny,
        data="synthetic:64",
        held_out=16,
        batch=16,
        epochs=2,
        log_every=2,
        eval_every=1,
        device="cpu",
    )
