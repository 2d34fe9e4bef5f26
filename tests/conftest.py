"""Shared fixtures. Every cache and run goes to a folder that pytest removes."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from browser import launch_chromium
from m1clip import devices, status
from m1clip.config import ModelConfig, TextConfig, TrainConfig, VisionConfig


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["M1CLIP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process would compile torch's source anew
    folder = tmp_path_factory.mktemp("status")
    status.fallback_folders = lambda: [folder / "private"]  # not /dev/shm, where runs on full disks would stay
    torch.set_num_threads(1)  # threads do not pay for tiny tensors
    devices.DEFAULT_THREADS = 1


def tiny_config() -> ModelConfig:
    return ModelConfig(VisionConfig(32, 16, 32, 2, 2), TextConfig(512, 24, 32, 2, 2), embed_dim=24)


def tiny_run_config(tiny: ModelConfig) -> TrainConfig:
    """Two epochs of four steps."""
    return TrainConfig(model=tiny, data="synthetic:64", val_size=16, batch_size=16, epochs=2, log_every=2, device="cpu")


@pytest.fixture
def tiny() -> ModelConfig:
    return tiny_config()


@pytest.fixture
def tiny_run(tiny: ModelConfig) -> TrainConfig:
    return tiny_run_config(tiny)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with launch_chromium() as browser:
        yield browser
