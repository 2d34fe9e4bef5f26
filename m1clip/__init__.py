"""m1clip: train, understand and ship a CLIP model on the computer you own."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m1clip.api import train
    from m1clip.evaluation import evaluate
    from m1clip.inference import load
    from m1clip.model.clip import CLIP

# onnxruntime >= 1.29 sends facts about models and the machine to its vendor unless this is set when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = ["CLIP", "evaluate", "load", "train"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import the public names on first use: torch takes seconds to load."""
    if name not in __all__:
        raise AttributeError(f"m1clip has no {name}; it has {', '.join(__all__)}")
    if name == "evaluate":
        from m1clip.evaluation import evaluate

        return evaluate
    if name == "load":  # an ONNX export needs no torch
        from m1clip.inference import load

        return load
    from m1clip import api

    return getattr(api, name)
