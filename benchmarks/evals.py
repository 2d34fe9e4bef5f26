"""Zero-shot, retrieval and linear probe beside CLIP_benchmark and open_clip: equal scores, and how fast.

    pip install clip-benchmark 'm1clip[bench,openclip,eval]'
    python benchmarks/evals.py LABELLED_FOLDERS CAPTIONED_SPEC [--model RUN] [--rounds 3] [--out DIR]

Writes both datasets as WebDatasets in CLIP_benchmark's layout, and the model for open_clip. The same weights are
then evaluated by `clip_benchmark eval`'s own function and by `m1clip.evaluate`, each in its own process, one after
the other, for some rounds; m1clip with an empty cache. Times contain reading, decoding, encoding and scoring, not
the imports. Without --model, a ViT-B/32 with random weights is used: its speed is that of any ViT-B/32.
CLIP_benchmark runs with --no_amp, because its bfloat16 autocast is many times slower on most CPUs.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import tyro

TEMPLATES = ("a photo of a {c}.", "a close-up of a {c}.", "a {c}.", "art of the {c}.", "a good photo of the {c}.")
SHARDS, TEST_EVERY = 4, 3  # every third labelled image is for testing
RECALLS, SEEDS = (1, 5, 10), 3
NOUNS = (
    *("cat", "dog", "horse", "elephant", "giraffe", "zebra", "bear", "cow", "sheep", "bird", "train", "bus", "truck"),
    *("motorcycle", "bicycle", "boat", "airplane", "pizza", "sandwich", "cake", "donut", "banana", "broccoli"),
    *("toilet", "bed", "couch", "skateboard", "surfboard", "tennis", "baseball", "kite", "umbrella", "laptop"),
    *("clock", "vase"),
)


@dataclass(frozen=True)
class Args:
    labelled: Annotated[str, tyro.conf.Positional]
    """Folder of labelled folders, synthetic:N, or nouns: the captioned images, labelled by their captions."""
    captioned: Annotated[str, tyro.conf.Positional]
    """Spec of a dataset with captions; its validation split is used."""
    model: str | None = None
    """Run or model folder that open_clip can load; default: a ViT-B/32 with random weights."""
    rounds: int = 3
    images: int = 1000
    """Images with captions that are used at most."""
    out: Path = Path("bench/evals")
    tasks: tuple[str, ...] = ("zeroshot_classification", "zeroshot_retrieval", "linear_probe")
    """Only linear_probe takes models that open_clip cannot load: both libraries get our embeddings."""


@dataclass(frozen=True)
class Contestant:
    """One evaluation in this process: prints its metrics and seconds as JSON."""

    name: Annotated[Literal["m1clip", "clip_benchmark", "clip_benchmark_probe", "open_clip"], tyro.conf.Positional]
    task: Annotated[Literal["zeroshot_classification", "zeroshot_retrieval", "linear_probe"], tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]


def main(args: Args) -> None:
    from m1clip.config import DataConfig, get_preset
    from m1clip.data.splits import open_sources
    from m1clip.model.clip import CLIP
    from m1clip.model.interop import export_clip
    from m1clip.model.tokenizer import Tokenizer

    args.out.mkdir(parents=True, exist_ok=True)
    (captioned,) = open_sources(DataConfig(data=args.captioned))
    pairs = captioned.all if args.labelled == "nouns" else open_sources(DataConfig(data=args.labelled))[0].all
    if not (args.out / "labelled" / "test").exists():
        label = partial(noun_of, pairs) if args.labelled == "nouns" else pairs.label
        write_labelled(pairs, {row: label(row) for row in range(len(pairs))}, args.out / "labelled")
        write_captioned(captioned.val, args.out / "captioned", args.images)
    if args.model:
        import m1clip

        model = m1clip.load(args.model)
    else:
        import open_clip

        vocabulary = Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
        model = CLIP(get_preset("base").model, Tokenizer.from_clip_vocabulary(vocabulary)).eval()
    for name in ("model", "open_clip"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    model.save(args.out / "model")
    if args.tasks != ("linear_probe",):
        export_clip(model, "open_clip", args.out / "open_clip")
    for task in args.tasks:
        if task == "linear_probe":
            for name in ("clip_benchmark_probe", "m1clip"):
                print(json.dumps({f"{name}, linear probe": run(name, "linear_probe", args.out)}), flush=True)
        else:
            compare(args, task)
        if task == "zeroshot_classification":
            print(json.dumps({"open_clip, zero-shot": run("open_clip", task, args.out)["metrics"]}), flush=True)


def compare(args: Args, task: str) -> None:
    results: dict[str, list[dict[str, Any]]] = {"clip_benchmark": [], "m1clip": []}
    for _ in range(args.rounds):
        for name, rounds in results.items():
            rounds.append(run(name, task, args.out))
    for name, rounds in results.items():
        speeds = [result["images"] / result["seconds"] for result in rounds]
        print(f"{task}, {name}: {median(speeds):.1f} images/s ({min(speeds):.1f} to {max(speeds):.1f})")
        print(json.dumps(rounds[0]["metrics"]))
    ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in zip(*results.values(), strict=True)]
    print(
        f"{task}: m1clip is {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})\n", flush=True
    )


def run(name: str, task: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "contestant", name, task, str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# WebDatasets in CLIP_benchmark's layout.
def noun_of(pairs: Any, row: int) -> str:
    """The only one of the nouns in the captions of an image, if at least three captions have it; else empty."""
    captions = [caption.lower() for caption in pairs.captions(row)]
    counts = {noun: sum(bool(re.search(rf"\b{noun}s?\b", text)) for text in captions) for noun in NOUNS}
    found = [noun for noun, count in counts.items() if count]
    return found[0] if len(found) == 1 and counts[found[0]] >= 3 else ""


def write_labelled(pairs: Any, labels: dict[int, str], folder: Path) -> None:
    names = sorted({*filter(None, labels.values())})
    by_split: dict[str, list[dict[str, bytes]]] = {"train": [], "test": []}
    for number, (row, label) in enumerate((row, label) for row, label in labels.items() if label):
        members = {"jpg": read_jpeg(pairs, row), "cls": str(names.index(label)).encode()}
        by_split["test" if number % TEST_EVERY == 0 else "train"].append(members)
    for split, samples in by_split.items():
        write_shards(folder / split, samples)
    (folder / "classnames.txt").write_text("\n".join(names))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))


def read_jpeg(pairs: Any, row: int) -> bytes:
    if hasattr(pairs, "read"):
        return pairs.read(row)
    pairs.image(row).save(file := BytesIO(), "JPEG", quality=95)
    return file.getvalue()


def write_captioned(pairs: Any, folder: Path, images: int) -> None:
    rows = range(min(images, len(pairs)))
    write_shards(folder / "test", [{"jpg": pairs.read(r), "txt": "\n".join(pairs.captions(r)).encode()} for r in rows])
    (folder / "dataset_type.txt").write_text("retrieval")


def write_shards(folder: Path, samples: list[dict[str, bytes]]) -> None:
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number, members in list(enumerate(samples))[shard::SHARDS]:
                for suffix, data in members.items():
                    info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, BytesIO(data))
    (folder / "nshards.txt").write_text(str(SHARDS))


# Contestants.
def contestant(args: Contestant) -> None:
    if args.name == "m1clip":
        result = run_m1clip(args.task, args.out)
    elif args.name == "clip_benchmark":
        result = run_clip_benchmark(args.task, args.out)
    elif args.name == "clip_benchmark_probe":
        result = run_clip_benchmark_probe(args.out)
    else:
        result = run_open_clip(args.out)
    print(json.dumps(result))


def folder_of(task: str, out: Path) -> Path:
    return out / ("captioned" if task == "zeroshot_retrieval" else "labelled")


def run_m1clip(task: str, out: Path) -> dict[str, Any]:
    cache = out / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    os.environ["M1CLIP_CACHE"] = str(cache.absolute())
    import m1clip.evaluation

    names = {"zeroshot_classification": "zeroshot", "zeroshot_retrieval": "retrieval", "linear_probe": "probe"}
    folder, split = folder_of(task, out), "all" if task == "zeroshot_retrieval" else "test"
    data = str(folder / "test") if split == "all" else str(folder)
    templates = [str(folder / "zeroshot_classification_templates.txt")] if task != "zeroshot_retrieval" else []
    started = time.perf_counter()
    options: Any = {"tasks": [names[task]], "split": split, "templates": templates, "device": "cpu"}
    result = m1clip.evaluation.evaluate(out / "model", data=data, **options)
    seconds = time.perf_counter() - started
    return {"metrics": result.results.metrics()[task], "seconds": seconds, "images": result.images}


def benchmark_args(task: str, out: Path) -> Any:
    from clip_benchmark.cli import get_parser_args

    folder = folder_of(task, out)
    flags = ["eval", "--dataset", f"wds/{folder.name}", "--dataset_root", str(folder), "--task", task, "--no_amp"]
    flags += ["--model", f"local-dir:{out / 'open_clip'}", "--pretrained", "", "--output", str(out / "theirs.json")]
    sys.argv = ["clip_benchmark", *flags, "--recall_k", *map(str, RECALLS), "--num_workers", "2", "--quiet"]
    args = get_parser_args()[1]
    return args


def repair_accuracy() -> None:
    """clip_benchmark 1.6.2 converts an array of one element with float(), which NumPy 2.4 refuses."""
    from clip_benchmark.metrics import linear_probe, zeroshot_classification

    def accuracy(output: Any, target: Any, topk: tuple[int, ...] = (1,)) -> list[float]:
        correct = output.topk(max(topk), 1, True, True)[1].t() == target.view(1, -1)
        return [correct[:k].float().sum().item() / len(target) for k in topk]

    zeroshot_classification.accuracy = linear_probe.accuracy = accuracy


def run_clip_benchmark(task: str, out: Path) -> dict[str, Any]:
    from clip_benchmark.cli import main_eval

    repair_accuracy()
    args = benchmark_args(task, out)
    started = time.perf_counter()
    main_eval(args)
    seconds = time.perf_counter() - started
    metrics = json.loads((out / "theirs.json").read_text())["metrics"]
    return {"metrics": metrics, "seconds": seconds, "images": count_images(folder_of(task, out) / "test")}


def count_images(folder: Path) -> int:
    count = 0
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            count += sum(name.endswith(".jpg") for name in tar.getnames())
    return count


def run_clip_benchmark_probe(out: Path) -> dict[str, Any]:
    """Its linear probe asserts a CUDA device; here a CPU is accepted as one, and moving tensors there does nothing."""
    import torch
    from clip_benchmark.metrics import linear_probe

    repair_accuracy()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]
    torch.cuda.device_count = lambda: 0
    import m1clip

    model, tensors = m1clip.load(out / "model"), {}
    for split in ("train", "test"):
        images, truth = zip(*read_shards(out / "labelled" / split), strict=True)
        tensors[split] = (model.encode_image(images), torch.tensor(truth))
    options: dict[str, Any] = {"fewshot_k": -1, "batch_size": 64, "num_workers": 0, "lr": 0.1, "epochs": 10}
    options |= {"model_id": "m", "feature_root": str(out / "features"), "device": AcceptedCpu("cpu"), "amp": False}
    x, y = tensors["train"]
    results = []
    for seed in range(SEEDS):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        val, train = order[: len(order) // 5], order[len(order) // 5 :]
        parts = {"train": (x[train], y[train]), "val": (x[val], y[val]), "test": tensors["test"]}
        shutil.rmtree(out / "features", ignore_errors=True)
        (out / "features" / "m").mkdir(parents=True)
        for name, (images, truth) in parts.items():
            torch.save(images, out / "features" / "m" / f"features_{name}.pt")
            torch.save(truth, out / "features" / "m" / f"targets_{name}.pt")
        torch.manual_seed(seed)
        with contextlib.redirect_stdout(sys.stderr):  # it prints every twentieth step
            scores = linear_probe.evaluate(torch.nn.Identity(), None, None, seed=seed, **options, val_dataloader=[])
        results.append(scores["lp_acc1"])
    return {"metrics": {"lp_acc1 by seed": results}, "images": len(tensors["test"][1])}


class AcceptedCpu(str):
    """The name of a CPU that passes for that of a GPU."""

    def __eq__(self, other: object) -> bool:
        return other in ("cpu", "cuda")

    __hash__ = str.__hash__


def load_open_clip(out: Path) -> Any:
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{out / 'open_clip'}")
    return model.eval(), transform, open_clip.get_tokenizer(f"local-dir:{out / 'open_clip'}")


def encode_shards(model: Any, folder: Path) -> tuple[Any, Any]:
    """Unit vectors and labels, by open_clip."""
    import torch

    clip, transform, _ = model
    images, truth = [], []
    with torch.no_grad():
        for image, label in read_shards(folder):
            images.append(clip.encode_image(transform(image)[None], normalize=True))
            truth.append(label)
    return torch.cat(images), torch.tensor(truth)


def read_shards(folder: Path) -> Iterator[tuple[Any, int]]:
    from PIL import Image

    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
        for name in sorted(members):
            if name.endswith(".jpg"):
                yield Image.open(BytesIO(members[name])), int(members[name.replace(".jpg", ".cls")])


def run_open_clip(out: Path) -> dict[str, Any]:
    """Zero-shot accuracy by open_clip's classifier, and how many predictions are ours."""
    import open_clip
    import torch

    import m1clip.evaluation

    model = load_open_clip(out)
    clip, _, tokenizer = model
    names = (out / "labelled" / "classnames.txt").read_text().splitlines()
    templates = [lambda c, t=template: t.format(c=c) for template in TEMPLATES]
    with torch.no_grad():
        weights_EC = open_clip.build_zero_shot_classifier(clip, tokenizer, names, templates)
    images, truth = encode_shards(model, out / "labelled" / "test")
    predicted = (images @ weights_EC).argmax(1)
    options: Any = {"tasks": ["zeroshot"], "split": "test", "device": "cpu", "templates": list(TEMPLATES)}
    ours = m1clip.evaluation.evaluate(out / "model", data=str(out / "labelled"), **options)
    ours_by_rank = [names.index(one["predicted"]) for one in ours.results.predictions]
    same = sum(a == b for a, b in zip(predicted.tolist(), ours_by_rank, strict=True))
    accuracy = (predicted == truth).float().mean().item()
    return {"metrics": {"acc1": accuracy, "ours": ours.zeroshot.accuracy, "same": same, "images": len(truth)}}


if __name__ == "__main__":
    if sys.argv[1:2] == ["contestant"]:
        contestant(tyro.cli(Contestant, args=sys.argv[2:]))
    else:
        main(tyro.cli(Args))
