"""Keyword arguments of m1clip.train and m1clip.evaluate, for editors and type checkers: the fields of the configs."""

from pathlib import Path
from typing import Literal, TypedDict

from m1clip.config import BestMetric, ModelConfig, Recipe, Target


class DataSettings(TypedDict, total=False):
    """See DataConfig."""

    data: str | Path
    val_size: int | Literal["auto"]
    group_by: str
    image_column: str
    caption_column: str
    label_column: str
    labels: str
    caption_from: Literal["auto", "text", "folder", "filename"]
    template: str
    allow: tuple[Literal["urls", "links"], ...]
    max_bad_rows: float
    cache_gb: float
    workers: int
    seed: int


class TrainSettings(DataSettings, total=False):
    """See TrainConfig."""

    model: ModelConfig
    preset: str
    recipe: Recipe
    init: str
    model_name: str
    vision: str
    text: str
    budget: str
    freeze: Literal["auto", "both", "vision", "text"]
    unfreeze: int
    lora_rank: int
    head_dropout: float
    wise_ft: float
    tokenizer: str
    epochs: int
    steps: int
    batch_size: int
    captions_per_image: int
    lr: float
    warmup: float
    weight_decay: float
    grad_clip: float
    optimizer: Literal["adamw", "muon"]
    ema: float
    label_smoothing: float
    patch_dropout: float
    word_dropout: float
    crop_scale: float
    hflip: bool
    color_jitter: float
    chunk: int | Literal["auto"]
    grad_checkpointing: bool
    device: str
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    compile: Literal["auto", "on", "off"]
    threads: int
    log_every: int
    eval_every: int
    zeroshot: str
    save_every: str
    best_metric: BestMetric
    patience: int
    ship_to: tuple[Target, ...]
    track: Literal["none", "tensorboard", "wandb", "trackio"]
