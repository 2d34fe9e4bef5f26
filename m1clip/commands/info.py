"""m1clip info: the presets, and their parameters, FLOPs and memory."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from m1clip.config import PRESETS, get_preset, require
from m1clip.console import loading, show_rows
from m1clip.format import number, percent

VISION = "{image_size} px, {stem} stem, patch {patch_size}, width {width}, {layers} layers, {heads} heads"
TEXT = "{vocab_size:,} tokens, context length {context_length}, width {width}, {layers} layers, {heads} heads"


@dataclass(frozen=True)
class Args:
    """Parameters by part, FLOPs per pair and memory of a batch, computed without allocating the model."""

    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """One preset in detail; by default a table of all."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Batch size of the memory estimate; by default the preset's."""
    json: bool = False
    """Print as one line of JSON."""

    def check(self) -> None:
        require(
            self.batch_size is None or 1 <= self.batch_size <= 10**7,
            f"--batch-size must be at least 1 and at most 10,000,000, not {self.batch_size}",
        )


def main(args: Args) -> None:
    with loading():
        presets = [describe_preset(name, args.batch_size) for name in ([args.preset] if args.preset else PRESETS)]
    if args.json:
        print(json.dumps(presets[0] if args.preset else presets))
    elif args.preset:
        show_preset(presets[0])
    else:
        show_presets(presets)


def describe_preset(name: str, batch_size: int | None) -> dict[str, Any]:
    config = get_preset(name)
    from m1clip.model.cost import model_cost

    model, cost, batch_size = config.model, model_cost(config.model), batch_size or config.batch_size
    shape = {"vision": asdict(model.vision), "text": asdict(model.text), "embed_dim": model.embed_dim}
    memory = {"batch_size": batch_size, "memory_gb": cost.memory_gb(batch_size)}
    return {"preset": name, **shape, "total": cost.total, **asdict(cost), **memory}


def show_preset(preset: dict[str, Any]) -> None:
    print(f"{preset['preset']}\n  vision     {VISION.format(**preset['vision'])}")
    print(f"  text       {TEXT.format(**preset['text'])}\n  embedding  {preset['embed_dim']} dimensions\n")
    total, forward, step = preset["total"], number(preset["forward_gflop"], 4), number(preset["step_gflop"], 4)
    counts = [(part, f"{count:,}", percent(count / total)) for part, count in preset["parameters"].items()]
    show_rows("parameters", ("part", "parameters", "share"), [*counts, ("total", f"{total:,}", "")])
    compute = f"{forward} GFLOP forward, {step} forward and backward (captions of full context length)"
    print(f"\ncompute per pair: {compute}\n")
    memory_gb = {**preset["memory_gb"], "total": sum(preset["memory_gb"].values())}
    title = f"memory of a training step, batch size {preset['batch_size']}, float32, AdamW"
    show_rows(title, ("part", "GB"), [(part, f"{size:.3f}") for part, size in memory_gb.items()])


def show_presets(presets: list[dict[str, Any]]) -> None:
    columns = ("", "image/patch", "vision", "text", "parameters", "GFLOP/pair", "batch", "memory")
    rows = []
    for preset in presets:
        image = "{image_size}/{patch_size}".format(**preset["vision"])
        towers = ["{width}×{layers}".format(**preset[tower]) for tower in ("vision", "text")]
        parameters, memory = f"{preset['total'] / 1e6:.2f} M", f"{sum(preset['memory_gb'].values()):.2f} GB"
        cost = (parameters, number(preset["step_gflop"], 4), str(preset["batch_size"]), memory)
        rows.append([preset["preset"], image, *towers, *cost])
    show_rows("presets", columns, rows)
    legend = "vision and text: width × layers. GFLOP/pair: forward and backward. Memory: one float32 step with AdamW."
    print(f"\n{legend} More: m1clip info --preset NAME")
