"""m1clip info: what the presets are and what they cost."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from m1clip.commands import flags, tables
from m1clip.config import PRESETS, get_preset
from m1clip.format import percent


@dataclass(frozen=True)
class Args:
    """Parameters by part, FLOPs per pair and memory of a batch, computed without allocating the model."""

    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """One preset in detail; by default a table of all."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Batch for the memory estimate; by default the preset's."""
    json: bool = False
    """Print as one line of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    if words and not words[0].startswith("-"):
        words = ["--preset", *words]  # `m1clip info seed` is what one types first
    args = flags.read(Args, prog, words)
    if args.preset is not None:
        get_preset(args.preset)
    if args.batch is not None and args.batch < 1:
        raise ValueError(f"batch must be at least 1, not {args.batch}")
    return args


def main(args: Args) -> int:
    with tables.loading():
        rows = [describe(name, args.batch) for name in ([args.preset] if args.preset else PRESETS)]
    if args.json:
        print(json.dumps(rows[0] if args.preset else rows))
    elif args.preset:
        show_one(rows[0])
    else:
        show_all(rows)
    return 0


def describe(name: str, batch: int | None) -> dict[str, Any]:
    from m1clip.model.cost import cost

    config = get_preset(name)
    made, batch = cost(config.model), batch or config.batch_size
    return {
        "preset": name,
        "vision": asdict(config.model.vision),
        "text": asdict(config.model.text),
        "embed": config.model.embed_dim,
        "parameters": made.parameters,
        "total": made.total,
        "forward_gflop": made.forward_gflop,
        "step_gflop": made.step_gflop,
        "batch": batch,
        "memory_gb": made.memory_gb(batch),
    }


def show_one(row: dict[str, Any]) -> None:
    vision, text, total = row["vision"], row["text"], row["total"]
    print(
        f"{row['preset']}\n"
        f"  vision   {vision['image_size']} px, {vision['stem']} stem {vision['patch']}, {shape(vision)}\n"
        f"  text     {text['vocab']:,} tokens, length {text['length']}, {shape(text)}\n"
        f"  meet in  {row['embed']} dimensions\n"
    )
    parts = tables.table("part", "number", "share")
    for part, number in row["parameters"].items():
        parts.add_row(part, f"{number:,}", percent(number / total))
    parts.add_row("total", f"{total:,}", "", style="bold")
    tables.show("parameters", parts)
    print(
        f"\nwork per pair   {row['forward_gflop']:,.4g} GFLOP forward, {row['step_gflop']:,.4g} with backward"
        " (text at full length)\n"
    )
    memory = tables.table("part", "GB")
    for part, gigabytes in row["memory_gb"].items():
        memory.add_row(part, f"{gigabytes:.3f}")
    memory.add_row("total", f"{sum(row['memory_gb'].values()):.3f}", style="bold")
    tables.show(f"memory of a training step, batch {row['batch']}, float32", memory)


def shape(tower: dict[str, Any]) -> str:
    return f"width {tower['width']} × depth {tower['depth']} × {tower['heads']} heads"


def show_all(rows: list[dict[str, Any]]) -> None:
    made = tables.table("", "image", "vision", "text", "parameters", "GFLOP/pair", "batch", "memory")
    for row in rows:
        vision, text = row["vision"], row["text"]
        made.add_row(
            row["preset"],
            f"{vision['image_size']}/{vision['patch']}",
            f"{vision['width']}×{vision['depth']}",
            f"{text['width']}×{text['depth']}",
            f"{row['total'] / 1e6:.2f} M",
            f"{row['step_gflop']:,.4g}",
            f"{row['batch']}",
            f"{sum(row['memory_gb'].values()):.2f} GB",
        )
    tables.show("presets", made)
    print(
        "\nGFLOP/pair: forward and backward. Memory: one float32 step with AdamW."
        " More: m1clip info --preset NAME"
    )
