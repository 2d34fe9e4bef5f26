"""m1clip info: the presets, and their parameters, FLOPs and memory."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from m1clip.commands import flags
from m1clip.config import PRESETS, get_preset
from m1clip.console import loading, show, table
from m1clip.format import number, percent


@dataclass(frozen=True)
class Args:
    """Parameters by part, FLOPs per pair and memory of a batch, computed without allocating the model."""

    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """One preset in detail; by default a table of all."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Batch size of the memory estimate; by default the preset's."""
    json: bool = False
    """Print as one line of JSON."""


def parse(prog: str, argv: list[str]) -> Args:
    if argv and not argv[0].startswith("-"):
        argv = ["--preset", *argv]  # `m1clip info nano` is what people type first
    args = flags.parse_flags(Args, prog, argv)
    if args.preset is not None:
        get_preset(args.preset)
    if args.batch_size is not None and args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, not {args.batch_size}")
    return args


def main(args: Args) -> int:
    with loading():
        presets = [describe_preset(name, args.batch_size) for name in ([args.preset] if args.preset else PRESETS)]
    if args.json:
        print(json.dumps(presets[0] if args.preset else presets))
    elif args.preset:
        show_preset(presets[0])
    else:
        show_presets(presets)
    return 0


def describe_preset(name: str, batch_size: int | None) -> dict[str, Any]:
    from m1clip.model.cost import model_cost

    config = get_preset(name)
    cost, batch_size = model_cost(config.model), batch_size or config.batch_size
    return {
        "preset": name,
        "vision": asdict(config.model.vision),
        "text": asdict(config.model.text),
        "embed_dim": config.model.embed_dim,
        "parameters": cost.parameters,
        "total": cost.total,
        "forward_gflop": cost.forward_gflop,
        "step_gflop": cost.step_gflop,
        "batch_size": batch_size,
        "memory_gb": cost.memory_gb(batch_size),
    }


def show_preset(preset: dict[str, Any]) -> None:
    vision, text, total = preset["vision"], preset["text"], preset["total"]
    print(
        f"{preset['preset']}\n"
        f"  vision     {vision['image_size']} px, {vision['stem']} stem, patch {vision['patch_size']}, "
        f"{tower_shape(vision)}\n"
        f"  text       {text['vocab_size']:,} tokens, context length {text['context_length']}, "
        f"{tower_shape(text)}\n"
        f"  embedding  {preset['embed_dim']} dimensions\n"
    )
    parameters = table("part", "parameters", "share")
    for part, count in preset["parameters"].items():
        parameters.add_row(part, f"{count:,}", percent(count / total))
    parameters.add_row("total", f"{total:,}", "", style="bold")
    show("parameters", parameters)
    print(
        f"\ncompute per pair: {number(preset['forward_gflop'], 4)} GFLOP forward, "
        f"{number(preset['step_gflop'], 4)} forward and backward (captions of full context length)\n"
    )
    memory = table("part", "GB")
    for part, gigabytes in preset["memory_gb"].items():
        memory.add_row(part, f"{gigabytes:.3f}")
    memory.add_row("total", f"{sum(preset['memory_gb'].values()):.3f}", style="bold")
    show(f"memory of a training step, batch size {preset['batch_size']}, float32, AdamW", memory)


def tower_shape(tower: dict[str, Any]) -> str:
    return f"width {tower['width']}, {tower['layers']} layers, {tower['heads']} heads"


def show_presets(presets: list[dict[str, Any]]) -> None:
    overview = table("", "image/patch", "vision", "text", "parameters", "GFLOP/pair", "batch", "memory")
    for preset in presets:
        vision, text = preset["vision"], preset["text"]
        overview.add_row(
            preset["preset"],
            f"{vision['image_size']}/{vision['patch_size']}",
            f"{vision['width']}×{vision['layers']}",
            f"{text['width']}×{text['layers']}",
            f"{preset['total'] / 1e6:.2f} M",
            number(preset["step_gflop"], 4),
            f"{preset['batch_size']}",
            f"{sum(preset['memory_gb'].values()):.2f} GB",
        )
    show("presets", overview)
    print(
        "\nvision and text: width × layers. GFLOP/pair: forward and backward. Memory: one float32 step with "
        "AdamW. More: m1clip info NAME"
    )
