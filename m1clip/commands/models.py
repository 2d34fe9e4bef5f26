"""m1clip models: the pretrained models that training can start from, and what each of them needs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from m1clip.console import loading, show_rows

PACKAGES = {"openclip": "open_clip", "hf": "transformers", "timm": "timm"}  # by extra
# Example of the flags, what they read, whose towers compute it, and the extra that is needed.
FAMILIES = (
    ("--init runs/mine", "a run or model folder of m1clip", "own", ""),
    ("--init ViT-B-32.pt", "ViTs of OpenAI and OpenCLIP: a .pt or .safetensors file", "own", ""),
    ("--init open_clip:ViT-B-32/openai", "any model of open_clip: NAME/TAG", "own or open_clip", "openclip"),
    ("--init FILE --model-name NAME", "a checkpoint of open_clip, such as SigLIP", "own or open_clip", "openclip"),
    ("--init hf:openai/clip-vit-base-patch32", "CLIP in the format of transformers", "own", ""),
    ("--init hf:google/siglip2-base-patch16-224", "SigLIP, SigLIP 2", "transformers", "hf"),
    ("--init hf:BAAI/AltCLIP", "AltCLIP, Chinese-CLIP, MetaCLIP 2, AIMv2, ALIGN, BLIP", "transformers", "hf"),
    ("--init hf:clip-italian/clip-italian", "VisionTextDualEncoder: any two encoders", "transformers", "hf"),
    ("--vision timm:vit_small_patch16_224", "any image encoder of timm", "timm", "timm"),
    ("--text hf:sentence-transformers/all-MiniLM-L6-v2", "BERT-like text encoders", "transformers", "hf"),
)


@dataclass(frozen=True)
class Args:
    """Pretrained models that `m1clip train` can start from, and the extra that each needs.

    m1clip models                what is supported
    m1clip models siglip         architectures of open_clip whose names contain siglip, with the tags of their weights
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None
    """Part of the name of an architecture of open_clip."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print as one line of JSON."""


def main(args: Args) -> None:
    rows: list[dict[str, Any]]
    if args.name is None:
        rows = list(families())
    else:
        with loading("loading open_clip"):
            rows = list(architectures(args.name))
    if args.json:
        print(json.dumps(rows))
    elif args.name is None:
        show_families(rows)
    else:
        show_architectures(args.name, rows)


def families() -> Iterator[dict[str, Any]]:
    for example, reads, towers, extra in FAMILIES:
        installed = not extra or find_spec(PACKAGES[extra]) is not None
        yield {"example": example, "reads": reads, "towers": towers, "extra": extra, "installed": installed}


def show_families(rows: list[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        needs = f"extra {row['extra']}" + ("" if row["installed"] else ", not installed") if row["extra"] else "nothing"
        cells.append((row["example"], row["reads"], row["towers"], needs))
    show_rows("pretrained models", ("flags", "reads", "towers", "needs"), cells)
    print("\nOwn towers are m1clip's, where they compute the same; otherwise the library's own modules are trained.")
    missing = sorted({row["extra"] for row in rows if not row["installed"]})
    if missing:
        print(f"pip install 'm1clip[{','.join(missing)}]' installs what is missing.")
    if names := open_clip_names():
        print(f"m1clip models NAME lists those of open_clip's {len(names)} architectures whose names contain NAME.")
    print("m1clip export MODEL --to m1clip stores any of them as a folder that needs no network.")


def open_clip_names() -> list[str]:
    """From the files of an installed open_clip, without importing it."""
    package = find_spec("open_clip")
    folders = [Path(folder) / "model_configs" for folder in (package and package.submodule_search_locations) or ()]
    return sorted(file.stem for folder in folders for file in folder.glob("*.json"))


def architectures(name: str) -> Iterator[dict[str, Any]]:
    names = [known for known in open_clip_names() if name.lower() in known.lower()]
    if not open_clip_names():
        raise ValueError("open_clip, whose architectures are listed, is not installed: pip install 'm1clip[openclip]'")
    if not names:
        raise ValueError(f"open_clip has no architecture with {name!r} in its name")
    from m1clip.model.pretrained_clip import is_native, named_config, open_clip_tags

    for known in names:
        model_cfg = named_config(known)["model_cfg"]
        own = [tower for tower in ("vision", "text") if is_native(model_cfg[f"{tower}_cfg"])]
        size = model_cfg["vision_cfg"].get("image_size", 224)
        yield {"name": known, "image_size": size, "own_towers": own, "tags": open_clip_tags(known)}


def show_architectures(name: str, rows: list[dict[str, Any]]) -> None:
    cells = [
        (row["name"], str(row["image_size"]), ", ".join(row["own_towers"]) or "none", ", ".join(row["tags"]) or "none")
        for row in rows
    ]
    show_rows(f"open_clip architectures with {name}", ("name", "pixels", "own towers", "tags of weights"), cells)
    tagged = next((row for row in rows if row["tags"]), None)
    if tagged:
        print(f"\nm1clip train --init open_clip:{tagged['name']}/{tagged['tags'][0]} --data photos/")
