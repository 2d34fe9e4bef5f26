"""m1clip convert: a model of ours for other libraries, or one of theirs as ours."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from m1clip import run as runs
from m1clip.commands import flags, tables

NEXT = {
    "transformers": 'CLIPModel.from_pretrained("{}")',
    "open_clip": 'open_clip.create_model_and_transforms("local-dir:{}")',
    "m1clip": 'm1clip.load("{}")',
}


@dataclass(frozen=True)
class Args:
    """Write a CLIP as another library knows it: weights, configuration, preprocessing and tokenizer.

    m1clip convert runs/mine --to transformers      a folder for CLIPModel.from_pretrained
    m1clip convert runs/mine --to open_clip         configuration and weights for open_clip
    m1clip convert ViT-B-32.pt --to m1clip          OpenAI's or OpenCLIP's weights as a model of ours
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|MODEL|CHECKPOINT")]
    """A run (name or path), a model folder, or a CLIP of another library (a file, a folder, a hub name)."""
    to: Literal["transformers", "open_clip", "m1clip"]
    """Whose form it gets."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where it goes; by default beside the model, under the library's name."""
    tokenizer: str = ""
    """The vocabulary of a checkpoint that comes without one (bpe_simple_vocab_16e6.txt.gz, merges.txt)."""
    quick_gelu: bool = False
    """The checkpoint was trained with quick-GELU, though nothing beside it says so."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    overwrite: bool = False
    """Replace what is there."""


def parse(prog: str, words: list[str]) -> Args:
    return flags.read(Args, prog, words)


def main(args: Args) -> int:
    named = Path(args.runs) / args.model
    spec = str(named) if not Path(args.model).exists() and runs.is_run(named) else args.model
    out = args.out or beside(Path(spec), args.to)
    if out.exists() and not args.overwrite:
        raise FileExistsError(f"{out} is there already; --overwrite replaces it, --out goes elsewhere")
    with tables.loading():
        from m1clip.model.export_clip import convert
        from m1clip.model.import_clip import import_clip
    model, told = import_clip(spec, args.tokenizer, args.quick_gelu)
    if told:
        print(f"{spec}: {told}", file=sys.stderr)
    if args.to == "m1clip":
        model.save(out)
    else:
        convert(model, args.to, out)
    print(f"{out}\n\n{NEXT[args.to].format(out)}")
    return 0


def beside(path: Path, library: str) -> Path:
    """A folder of the library's name: in a run, or next to a model or a file."""
    if runs.is_run(path):
        return path / library
    return path.with_name(f"{path.stem if path.is_file() else path.name}-{library}")
