"""m1clip: train, understand and ship a CLIP model on the computer you own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m1clip.model.clip import CLIP, load

__version__ = "0.1.0"
__all__ = ["CLIP", "load"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: torch takes seconds, `m1clip --help` should not."""
    if name not in __all__:
        raise AttributeError(f"m1clip has no {name}; it has {', '.join(__all__)}")
    from m1clip.model import clip

    return getattr(clip, name)
