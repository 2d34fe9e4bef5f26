"""m1clip convert: a model for other libraries, or a checkpoint of theirs as an m1clip model."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from m1clip.console import loading
from m1clip.run import find_model, find_run

LOAD_CODE = {
    "transformers": 'CLIPModel.from_pretrained("{}")',
    "open_clip": 'open_clip.create_model_and_transforms("local-dir:{}")',
    "m1clip": 'm1clip.load("{}")',
}


@dataclass(frozen=True)
class Args:
    """Convert a CLIP between libraries: weights, configuration, preprocessing and tokenizer.

    m1clip convert runs/mine --to transformers      a folder for CLIPModel.from_pretrained
    m1clip convert runs/mine --to open_clip         a folder for open_clip
    m1clip convert ViT-B-32.pt --to m1clip          OpenAI's or OpenCLIP's weights as an m1clip model
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|MODEL|CHECKPOINT")]
    """Run (name or path), model folder, or a CLIP of another library: file, folder or hub name."""
    to: Literal["transformers", "open_clip", "m1clip"]
    """Target library."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Output folder; by default beside the model, named after the library."""
    tokenizer: str = ""
    """Vocabulary of a checkpoint without one (bpe_simple_vocab_16e6.txt.gz or merges.txt)."""
    model_name: str = ""
    """Architecture of a checkpoint by its name in open_clip, such as ViT-B-16-SigLIP."""
    quick_gelu: bool = False
    """The checkpoint was trained with quick_gelu, but has no configuration that says so."""
    runs: Path = Path("runs")
    """Folder of runs."""
    overwrite: bool = False
    """Replace the output folder."""


def main(args: Args) -> None:
    run = find_run(args.runs, args.model)
    path = Path(args.model)
    name = f"{path.stem if path.is_file() else path.name}-{args.to}"
    out = args.out or (run.path / args.to if run else path.with_name(name))
    if out.exists() and not args.overwrite:
        raise FileExistsError(f"{out} exists; --overwrite replaces it, --out DIR writes elsewhere")
    with loading():
        from m1clip.model.interop import export_clip
        from m1clip.model.pretrained_clip import import_clip
    spec = str(find_model(args.runs, args.model) or args.model)
    model, note = import_clip(spec, args.tokenizer, args.quick_gelu, args.model_name)
    if note:
        print(f"{spec}: {note}", file=sys.stderr)
    if args.to == "m1clip":
        model.save(out)
    else:
        export_clip(model, args.to, out)
    print(f"{out}\n\n{LOAD_CODE[args.to].format(out)}")
