"""What a run begins with, and which part of it learns: these flags, and the recipes' defaults of others."""

from dataclasses import dataclass
from typing import Any, Literal

from m1clip.shapes import require

Recipe = Literal["auto", "scratch", "locked", "lora", "full"]


@dataclass(frozen=True)
class StartConfig:
    """What a run begins with, and which part of it learns."""

    recipe: Recipe = "auto"
    """scratch; locked (heads on features that are encoded once); lora; full; auto chooses, and says why."""
    init: str = ""
    """A CLIP to begin with: a run or model of ours, a checkpoint of OpenCLIP, OpenAI or transformers
    (.safetensors, .pt or a folder), or a hub name."""
    vision: str = ""
    """A pretrained picture tower: timm:NAME (needs m1clip[timm])."""
    vision_weights: str = ""
    """A file with the weights of --vision; by default they are fetched from the hub. none begins without."""
    text: str = ""
    """A pretrained text tower: hf:FOLDER or hf:NAME, BERT or its kin (needs m1clip[hf])."""
    features: Literal["all", "last"] = "all"
    """What the heads get of --vision and --text: the means of all their layers, or the last alone."""
    budget: str = ""
    """The time you have, such as 90s, 10m, 2h: what is trained is chosen by it, and ends with it."""
    lock: Literal["auto", "both", "vision", "text"] = "auto"
    """The towers that stand still; auto is every one that comes with weights if locked, and else none."""
    views: int = 3
    """Ways each picture is seen where its tower stands still: as it is, and by --crop, --flip, --colour."""
    head_dropout: float = 0.0
    """Part of a tower's features that its head does not see in training (not with CLIP's own matrix)."""
    unfreeze: int = 0
    """full: only the last so many layers of each tower learn; locked: they do in a second run after it."""
    rank: int = 16
    """lora: size of the adapters."""
    adapt: Literal["attention", "all"] = "all"
    """lora: what gets adapters, attention alone or the MLPs too."""
    apart: bool = False
    """lora: keep the adapters apart from the weights they started from; otherwise they are merged."""
    tower_rate: float = 1.0
    """Learning rate of the towers against that of the heads."""
    wise_ft: float = 1.0
    """How far the kept model goes from the start (0) to what was learned (1); between, it forgets less."""

    def __post_init__(self) -> None:
        require(self.views >= 1, f"views must be at least 1, not {self.views}")
        require(self.unfreeze >= 0, f"unfreeze must be 0 or more, not {self.unfreeze}")
        require(self.rank >= 1, f"rank must be at least 1, not {self.rank}")
        require(0 <= self.wise_ft <= 1, f"wise_ft must be 0 to 1, not {self.wise_ft}")
        require(0 < self.tower_rate <= 1, f"tower_rate must be above 0, at most 1, not {self.tower_rate}")
        require(
            not (self.init and (self.vision or self.text)),
            "--init brings both towers; --vision and --text go without it",
        )
        require(not self.vision_weights or bool(self.vision), "--vision-weights needs --vision timm:NAME")
        _ = self.budget_s

    @property
    def budget_s(self) -> float | None:
        """Seconds; None where any time will do."""
        if not self.budget:
            return None
        number, unit = self.budget[:-1], self.budget[-1:]
        try:
            seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
        except (ValueError, KeyError):
            seconds = 0.0
        require(0 < seconds < float("inf"), f"budget must be such as 90s, 10m or 2h, not {self.budget!r}")
        return seconds

    @property
    def has_start(self) -> bool:
        """Whether something learned is at hand."""
        return bool(self.init or self.vision or self.text)


_TUNED: dict[str, Any] = {"optimizer": "adamw", "warmup": 0.1, "crop": 0.5, "flip": True, "save_epochs": 0}
RECIPES: dict[str, dict[str, Any]] = {
    "locked": {
        **_TUNED,
        **{"batch": 1024, "lr": 3e-3, "epochs": 36, "weight_decay": 1.0, "eval_every": 18},
        **{"head_dropout": 0.5, "label_smoothing": 0.1, "ema": 0.98},
    },
    "lora": {**_TUNED, "batch": 64, "lr": 1e-3, "epochs": 3, "weight_decay": 0.0},
    "full": {**_TUNED, "batch": 64, "lr": 3e-4, "epochs": 3, "layer_decay": 0.8, "patience": 2},
}
