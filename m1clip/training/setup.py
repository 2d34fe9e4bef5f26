"""Prepare a run: validate the config, open data and initial model once, choose the recipe."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from m1clip import sensors
from m1clip.config import (
    RECIPES,
    Recipe,
    TextConfig,
    TrainConfig,
    check_config,
    from_dict,
    override,
    recipe_defaults,
    with_defaults,
)
from m1clip.console import Console
from m1clip.data.batches import BatchStream, stored_size
from m1clip.data.index import BadRows
from m1clip.data.splits import Source, Split, Splits, open_eval_split, open_sources, open_splits, validation_subset
from m1clip.devices import Plan
from m1clip.format import duration, file_size
from m1clip.model.clip import CLIP, load
from m1clip.model.pretrained import HFText, TimmVision, load_hf_text, load_timm
from m1clip.model.safe_load import on_meta, require_memory
from m1clip.model.tokenizer import Tokenizer, check_tokenizer, is_clip_vocabulary, load_tokenizer, make_tokenizer
from m1clip.run import Run, find_model, list_checkpoints, step_of
from m1clip.targets import OPENAI_VOCAB_SIZE, check_targets
from m1clip.training import checkpoint
from m1clip.training.device_plan import default_plan, requested_plan
from m1clip.training.logger import check_tracker
from m1clip.training.optim import layers_from_top

if TYPE_CHECKING:  # loaded only with --zeroshot
    from m1clip.evals.zeroshot import ZeroShotData

OVERFIT_BELOW, FULL_FROM = 10_000, 200_000  # images: whole towers overfit fewer; training all weights pays from here
STEP_COST = 3.0  # of a training step relative to a forward pass
FEATURE_VIEWS = 3  # augmented views encoded per image when the vision tower is frozen; the first is not augmented
TOKENIZER_CAPTIONS = 50_000  # captions a tokenizer is trained on, at most about
CALIBRATION_PAIRS, CALIBRATION_ROWS = 64, 20_000
TOWERS = ("vision", "text")
Given = Mapping[str, Any]


@dataclass(frozen=True)
class InitModel:
    clip: CLIP | None = None
    pretrained: tuple[str, ...] = ()  # towers with pretrained weights
    tokenizer: Tokenizer | None = None  # where the text tower brings one
    vision: TimmVision | None = None
    text: HFText | None = None
    note: str = ""  # what had to be guessed about the checkpoint

    def __bool__(self) -> bool:
        return bool(self.clip or self.vision or self.text)


@dataclass(frozen=True)
class Setup:
    """Everything a run needs before its model is placed on a device."""

    config: TrainConfig  # final: nothing is left at auto but what is measured (chunk and device plan)
    reason: str  # why this recipe or model was chosen
    init: InitModel
    splits: Splits
    tokenizer: Tokenizer
    total: int  # steps of the whole run; an estimate with a budget
    imported: sensors.MemoryUse  # before any data or model was loaded
    deadline: float | None  # when a budget ends, by time.monotonic
    checkpoint: Path | None  # the checkpoint to resume from
    damaged: dict[Path, str]  # newer checkpoints that cannot be used, and why
    resumed_plan: Plan | None
    views: int  # encoded views per image so far; 0 for a new run
    zeroshot: "ZeroShotData | None" = None

    @property
    def frozen(self) -> tuple[str, ...]:
        return frozen_towers(self.config, self.init)

    def with_every(self, n: int) -> "Setup":
        """The same run on every n-th image."""
        splits = self.splits.with_every(n)
        config = settle(self.config, self.init, splits.train.pairs_per_epoch)
        total = config.steps or config.epochs * (splits.train.pairs_per_epoch // config.batch_size)
        return replace(self, config=config, splits=splits, total=total)


def prepare(
    config: TrainConfig, given: Given, runs: Path, resumed: Run | None, console: Console, started: float, is_final: bool
) -> Setup:
    """Validate and open everything before the run folder is written.

    `given` are the user's own settings, which defaults of recipes and budgets leave alone; `is_final` says that
    the config comes from a file and gets no other defaults. A budget counts from `started` (time.monotonic).
    """
    imported, reason = sensors.memory_use(), ""
    check_config(config)
    requested_plan(config)
    check_tracker(config.track)
    if not resumed:  # a resumed run has its tokenizer
        check_tokenizer(config.tokenizer)
    config, init = load_init(config, resumed, runs)
    sources = open_sources(config, console.progress)
    if not resumed:
        config, reason = choose_settings(config, given, is_final, init, sources, console)
    config = fit_vocabulary(config, init)
    check_recipe(config, init)
    check_disk_space(config, init, runs, resumed)
    before = read_resumed_data(resumed, len(sources), console.warn) if resumed else {}
    evaluated = config.model.vision.preprocess
    stored = replace(evaluated, size=stored_size(evaluated.size, config.crop_scale))
    on_the_fly = before.get("on_the_fly", ())
    if config.budget_s and not resumed and config.preset != "budget":
        from m1clip.training.autoconfig import decodes_on_the_fly

        on_the_fly = decodes_on_the_fly(sources, config, console)
    splits = open_splits(sources, config, evaluated, stored, console.progress, on_the_fly)
    splits = splits.with_every(before.get("every", 1))
    pairs, identity = splits.train.pairs_per_epoch, splits.train.identity
    if not resumed and not is_final and "batch_size" not in given:
        config = replace(config, batch_size=max(2, min(config.batch_size, pairs)))
    config = settle(config, init, pairs)
    if config.batch_size > pairs:
        raise ValueError(f"batch_size {config.batch_size} is larger than the {pairs} training pairs")
    if resumed and before.get("identity", identity) != identity:
        changed = f"the data of {resumed.path} has changed (rows, captions or their order)"
        raise ValueError(f"{changed}; restore it, or start a new run")
    total = config.steps or config.epochs * (pairs // config.batch_size)
    start, damaged = checkpoint.newest_intact(resumed) if resumed else (None, {})
    if start and step_of(start) > total and not config.budget_s:
        requested = f"--steps {config.steps}" if config.steps else f"{config.epochs} epochs"
        raise ValueError(f"{start.parent} is at step {step_of(start)}; {requested} end at step {total}")
    if start:
        tokenizer = load_tokenizer(config.model, start / "tokenizer.json")
    else:
        captions, vocab_size = sample_captions(splits.train), config.model.text.vocab_size
        tokenizer = init.tokenizer or make_tokenizer(config.tokenizer, captions, vocab_size)
    deadline = None
    if config.budget_s is not None:
        elapsed_s = checkpoint.read_progress(start).seconds if start else 0.0
        deadline = started + max(0.0, config.budget_s - elapsed_s)
    plan = read_resumed_plan(resumed, config) if resumed and start else None
    views = before.get("views", 0) if start else 0
    parts = (imported, deadline, start, damaged, plan, views, open_zeroshot(config, console))
    return Setup(config, reason, init, splits, tokenizer, total, *parts)


def open_zeroshot(config: TrainConfig, console: Console) -> "ZeroShotData | None":
    """The images of --zeroshot: their own validation or test split, or all."""
    if not config.zeroshot:
        return None
    from m1clip.evals.zeroshot import ZeroShotData, find_labels

    options: dict[str, Any] = dict.fromkeys(("image_column", "caption_column", "label_column", "caption_from"), "auto")
    data = replace(config, data=config.zeroshot, val_size="auto", group_by="none", labels="", **options)
    try:
        sources = open_sources(data, console.progress)
        has_splits = any(source.has_own_splits for source in sources)
        chosen = [validation_subset(source.val if has_splits else source.all, data) for source in sources]
        bad_rows = sum((source.bad_rows for source in sources), BadRows())
        pairs = open_eval_split(chosen, config.model.vision.preprocess, data, bad_rows, console.progress)
        bad_rows.require_at_most(config.max_bad_rows)
        return ZeroShotData(pairs, find_labels(pairs))
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"--zeroshot {config.zeroshot}: {error}") from None


def read_resumed_data(run: Run, sources: int, warn: Callable[[str], None]) -> dict[str, Any]:
    """data.json of a run, or its copy in a checkpoint; {} for a run that was killed before it was written."""
    file = run.path / "data.json"
    if not file.exists() and run.find_copy(file.name) is None:
        return {}
    values, note = run.read_or_copy(file.name)
    if note:
        warn(note)
    flags = values.get("on_the_fly", [])
    are_flags = isinstance(flags, list) and all(type(flag) is bool for flag in flags)
    expected = {
        "identity": isinstance(values.get("identity", ""), str),
        "on_the_fly": are_flags and len(flags) in (0, sources),
        "every": type(every := values.get("every", 1)) is int and every >= 1,
        "views": type(views := values.get("views", 0)) is int and views >= 0,
    }
    if wrong := [key for key, is_valid in expected.items() if not is_valid]:
        repair = "delete the file, and the copy in a checkpoint is used" if run.find_copy(file.name) else "correct it"
        raise ValueError(f"{file}: {', '.join(wrong)} cannot be what the run has written; {repair}")
    return values


def read_resumed_plan(run: Run, config: TrainConfig) -> Plan | None:
    """The device plan of a run; None if it cannot be read, and is chosen again."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        plan: Any = from_dict(Plan, run.read("machine.json")["plan"])
        check_config(replace(config, precision=plan.precision, threads=plan.threads))
        return cast(Plan, plan)
    return None


def choose_settings(
    config: TrainConfig, given: Given, is_final: bool, init: InitModel, sources: Sequence[Source], console: Console
) -> tuple[TrainConfig, str]:
    """The config with its recipe decided and with the defaults of that recipe or budget; and the reason."""
    recipe, reason = config.recipe, ""
    if not config.is_pretrained and recipe in ("auto", "scratch"):
        if config.budget_s and not is_final and "preset" not in given:
            from m1clip.training.autoconfig import fit_budget

            config, reason = fit_budget(config, given, sources, console)
        return replace(config, recipe="scratch"), reason
    if recipe == "auto":
        images = sum(len(source.train) for source in sources)
        counts = [len(source.train.captions(row)) for source in sources for row in range(min(100, len(source.train)))]
        captions = round(fmean(counts) * images)
        largest = max((source.train for source in sources), key=len)
        sample = [largest.captions(row)[0] for row in evenly_spaced(len(largest), 16)]
        recipe, reason = choose_recipe(config, init, images, captions, *measure_encoding(config, init, sample))
    if not is_final:
        config = with_defaults(config, recipe_defaults(config, recipe), given)
    return replace(config, recipe=recipe), reason


def choose_recipe(
    config: TrainConfig, init: InitModel, images: int, captions: int, image_s: float, caption_s: float
) -> tuple[Recipe, str]:
    """Choose by pretrained towers, number of images, and measured seconds per image and caption against the budget."""
    if not init.pretrained:
        return "full", "no tower is pretrained"
    if len(init.pretrained) < 2:
        only = f"only the {init.pretrained[0]} tower is pretrained"
        return "frozen", f"{only}: it is frozen, and the other one is trained to match it"
    if init.clip is None:
        apart = "the encoders were not trained together, so only the projection heads are trained"
        return "frozen", f"{apart}; {images:,} images are encoded once"
    recipe: Recipe = "full" if images >= FULL_FROM else "lora"
    seconds = RECIPES[recipe]["epochs"] * images * STEP_COST * (image_s + caption_s)
    about = f"about {duration(seconds)}"
    if config.budget_s is not None and seconds > config.budget_s:
        once = f"{images:,} images are encoded once"
        return "frozen", f"{once}; {recipe} would take {about} of the {duration(config.budget_s)}"
    if recipe == "full":
        return recipe, f"{images:,} images are enough to train all weights ({about})"
    few = "few enough to overfit" if images < OVERFIT_BELOW else "too few to train all weights"
    return recipe, f"{images:,} images are {few}: LoRA changes and forgets less ({about})"


def measure_encoding(config: TrainConfig, init: InitModel, captions: Sequence[str]) -> tuple[float, float]:
    """Seconds per image and per caption of a forward pass."""
    from m1clip.training.features import time_encoding

    model = build_model(config, init, init.tokenizer)
    return time_encoding(model.to_devices(*default_plan(config).plan.devices), captions)


def fit_vocabulary(config: TrainConfig, init: InitModel) -> TrainConfig:
    """OpenAI's tokenizer needs as many token embeddings as it has tokens, whatever the preset has."""
    text = config.model.text
    if init.tokenizer or not isinstance(text, TextConfig) or not is_clip_vocabulary(config.tokenizer):
        return config
    return override(config, {"model.text.vocab_size": max(text.vocab_size, OPENAI_VOCAB_SIZE)})


def settle(config: TrainConfig, init: InitModel, pairs: int) -> TrainConfig:
    """Write down which towers are frozen, for a resumed run; fine-tuning on a small set is one batch."""
    towers = frozen_towers(config, init)
    freeze: Any = config.freeze if not towers else "both" if len(towers) == 2 else towers[0]
    batch_size = config.batch_size if config.recipe == "scratch" else min(config.batch_size, pairs)
    return replace(config, freeze=freeze, batch_size=max(2, batch_size))


def frozen_towers(config: TrainConfig, init: InitModel) -> tuple[str, ...]:
    """The frozen towers, whose features are encoded once."""
    if config.recipe == "scratch" or (config.recipe != "frozen" and config.freeze == "auto"):
        return ()
    return {"both": TOWERS, "vision": ("vision",), "text": ("text",), "auto": init.pretrained}[config.freeze]


def check_recipe(config: TrainConfig, init: InitModel) -> None:
    """Refuse settings that contradict the recipe, and models that cannot be shipped to where they are meant for."""
    has_openai_tokenizer = init.tokenizer.is_openai if init.tokenizer else is_clip_vocabulary(config.tokenizer)
    check_targets(config.ship_to, config.model, has_openai_tokenizer)
    if config.wise_ft < 1 and (not init or config.vision or config.text):
        raise ValueError("--wise-ft averages a CLIP given by --init with its fine-tuned weights; there is no --init")
    if config.recipe == "scratch" and init:
        raise ValueError("--recipe scratch starts from random weights; leave out --init, --vision and --text")
    if config.recipe == "scratch" and config.unfreeze:
        raise ValueError("--unfreeze is about pretrained weights; from scratch all layers are trained")
    if config.recipe == "scratch" and config.freeze != "auto":
        random = "from scratch all weights are random; give --init, or leave out --freeze"
        raise ValueError(f"--freeze {config.freeze} keeps pretrained weights; {random}")
    if config.recipe != "scratch" and not init:
        examples = "--init CLIP, or --vision timm:NAME and --text hf:NAME"
        raise ValueError(f"--recipe {config.recipe} needs pretrained weights: {examples}")
    for flag in ("patch_dropout", "grad_checkpointing"):
        if getattr(config, flag) and not config.model.is_native:
            raise ValueError(f"--{flag.replace('_', '-')} is not available for towers of other libraries")
    if config.recipe == "frozen" and not frozen_towers(config, init):
        raise ValueError("--recipe frozen needs a pretrained tower")


def check_disk_space(config: TrainConfig, init: InitModel, runs: Path, resumed: Run | None) -> None:
    """Require space for the final model, the newest KEEP checkpoints, the best, and one more before the oldest goes.

    Each checkpoint has weights and two moments, with EMA the weights twice.
    """
    existing = len(list_checkpoints(resumed)) if resumed else 0
    with on_meta():
        model = init.clip or CLIP(config.model)
    weights = sum(weight.nbytes for weight in model.parameters())
    if not init:
        require_memory(weights, f"a model of {weights / 4e6:,.0f} M parameters")
    need = weights + max(1, checkpoint.KEEP + 2 - existing) * (4 if config.ema else 3) * weights
    folder = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(f"{folder} has {file_size(free)} free; checkpoints need {file_size(need)}")


def load_init(config: TrainConfig, resumed: Run | None, runs: Path = Path("runs")) -> tuple[TrainConfig, InitModel]:
    """Load what the config names, and the config with that model's shape."""
    torch.manual_seed(config.seed)  # new heads depend on the seed alone
    if resumed and (resumed.path / "start").is_dir():  # a run keeps its initial model
        clip = load(resumed.path / "start")
        return config, InitModel(clip, TOWERS, clip.tokenizer)
    if not config.is_pretrained:  # a resumed run without start/ was killed before that was written
        return config, InitModel()
    if config.init:
        from m1clip.model.pretrained_clip import import_clip

        requested = config.model
        spec = str(find_model(runs, config.init) or config.init)
        clip, note = import_clip(spec, config.tokenizer, requested.activation == "quick_gelu", config.model_name)
        if requested.loss == "sigmoid" and clip.config.loss == "softmax":
            raise ValueError("--init was trained with the softmax loss; --model.loss sigmoid cannot continue it")
        if requested.head != "linear" and clip.config.head == "linear":
            clip = replace_heads(clip, requested.head, requested.head_hidden)
        return replace(config, model=clip.config), InitModel(clip, TOWERS, clip.tokenizer, note=note)
    vision = load_timm(config.vision) if config.vision else None
    text, tokenizer = load_hf_text(config.text) if config.text else (None, None)
    shape: dict[str, Any] = {"vision": vision.config} if vision else {}
    shape |= {"text": text.config} if text else {}
    pretrained = tuple(name for name in shape if name == "text" or not config.vision.endswith("?weights=none"))
    return replace(config, model=replace(config.model, **shape)), InitModel(None, pretrained, tokenizer, vision, text)


def replace_heads(clip: CLIP, kind: Literal["standardized", "mlp"], hidden: int) -> CLIP:
    """The same model with larger projection heads, which compute the same until they are trained."""
    model = CLIP(replace(clip.config, head=kind, head_hidden=hidden), clip.tokenizer)
    weights = clip.state_dict()
    for name in ("vision_projection", "text_projection"):
        matrix_ED = weights.pop(f"{name}.weight")
        weights |= {f"{name}.linear.weight": matrix_ED, f"{name}.linear.bias": matrix_ED.new_zeros(len(matrix_ED))}
    model.load_state_dict(weights, strict=False)
    return model.eval()


def build_model(config: TrainConfig, init: InitModel, tokenizer: Tokenizer | None) -> CLIP:
    """The model before the first step; new parameters depend on the seed alone."""
    if init.clip is not None:
        return init.clip
    torch.manual_seed(config.seed)
    model = CLIP(config.model, tokenizer)
    for tower, weights in ((model.vision, init.vision), (model.text, init.text)):
        if weights is not None:
            tower.load_state_dict(weights.state_dict())
    return model


def set_trainable(model: CLIP, config: TrainConfig, frozen: tuple[str, ...]) -> None:
    """Freeze what the recipe does not train; its gradients are never computed."""
    trained = [name for name in TOWERS if name not in frozen]
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if config.recipe == "lora":
        from m1clip.model.lora import add_lora

        torch.manual_seed(config.seed)
        add_lora(model, trained, config.lora_rank)
    if config.recipe == "full" and config.unfreeze:
        for name, weight in model.named_parameters():
            if name.startswith(tuple(f"{tower}." for tower in trained)):
                weight.requires_grad_(layers_from_top(name, model) <= config.unfreeze)


@torch.no_grad()
def calibrate_heads(model: CLIP, init: InitModel, batches: BatchStream) -> None:
    """Standardize the inputs of new heads by the mean and deviation of their features."""
    if init.clip is not None or model.config.head == "linear":
        return
    batch, tables = batches.batch(0).split(CALIBRATION_PAIRS)[0].to(*model.devices), batches.features
    inputs = {
        "vision": tables.images.views[0] if tables.images else model.vision(model.normalize(batch.image[0])),
        "text": tables.captions.features_MD if tables.captions else model.text(batch.text[0].flatten(0, 1)),
    }
    for tower, features in inputs.items():
        sample = features[:: -(-len(features) // CALIBRATION_ROWS)]
        sample = sample if isinstance(sample, Tensor) else torch.from_numpy(np.array(sample))
        model.get_submodule(f"{tower}_projection").calibrate(sample)  # type: ignore[operator]


def sample_captions(pairs: Split) -> Iterator[str]:
    """All captions; of very many, those of evenly spaced images."""
    sample = evenly_spaced(len(pairs), 100)
    per_image = sum(len(pairs.captions(row)) for row in sample) / len(sample)
    rows = evenly_spaced(len(pairs), max(1, int(TOKENIZER_CAPTIONS / per_image)))
    return (caption for row in rows for caption in islice(pairs.captions(row), 20))


def evenly_spaced(count: int, limit: int) -> range:
    """At most `limit` of the numbers below `count`."""
    return range(0, count, -(-count // limit))
