"""m1clip data check: what is in a set of pairs, what is wrong with it, and whether it can be trained on."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m1clip.commands import flags
from m1clip.commands.data_preview import require_image
from m1clip.config import DataConfig, get_preset
from m1clip.format import printable

if TYPE_CHECKING:  # they bring pyarrow
    from m1clip.data.pairs import ProgressFactory
    from m1clip.data.rows import BadRows
    from m1clip.data.sources import NoUsablePairs, Source

SHOWN = 15
SAMPLE = 50_000  # images whose captions are counted in tokens
Report = dict[str, Any]
Line = Callable[..., None]


@dataclass(frozen=True)
class Args(DataConfig):
    """Look at every image and caption: counts, faults by file and line, doubles, leaks between the sides.

    m1clip data check photos/
    m1clip data check products.csv --caption-column title
    m1clip data check coco:~/coco --json > coco.json
    Exit code 1 says that more rows are unusable than --max-bad-rows allows, so that training would refuse.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")] = ""
    """A folder, a .csv, .tsv, .jsonl or .parquet, coco:DIR, flickr30k:DIR, flickr8k:DIR, shards/{00..99}.tar,
    hf:NAME or synthetic:N, as train --data has it."""
    preset: str = "nano"
    """Whose vocabulary and text length captions are measured by."""
    tokenizer: str = "bpe"
    """bpe (learned from these captions), char, or the path of a CLIP vocabulary, as in train."""
    sheet: Path = Path("check.png")
    """The contact sheet to write: images from all over the set, then odd ones and doubles."""
    json: bool = False
    """Print everything as one line of JSON, with up to 10,000 faults by name."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.read(Args, prog, words)
    if not args.data:
        raise ValueError("data check needs a SPEC: a folder, a table, coco:DIR …; m1clip data check --help")
    get_preset(args.preset)
    require_image(args.sheet)
    return args


def main(args: Args) -> int:
    from m1clip.console import Console
    from m1clip.data.sources import NoUsablePairs, open_sources

    bars = Console().working
    reports = []
    try:
        sources = open_sources(replace(args, max_bad_rows=1.0), bars)
    except NoUsablePairs as error:
        return nothing(error, args)
    for number, source in enumerate(sources):
        sheet = args.sheet.with_stem(f"{args.sheet.stem}-{number + 1}") if number else args.sheet
        reports.append(check(source, args, sheet, bars))
        if not args.json:
            tell(reports[-1], args)
    if args.json:
        print(json.dumps(reports[0] if len(reports) == 1 else {"sources": reports}))
    return int(any(is_refused(report, args) for report in reports))


def nothing(error: "NoUsablePairs", args: Args) -> int:
    """Where not one row can be used, its faults are the whole report."""
    report = {"data": error.spec, "images": 0, "captions": 0, **faults_of(error.faults)}
    if args.json:
        print(json.dumps(report))
    else:
        line = liner()
        line("data", f"{error.spec}: not one row can be used", "bold red")
        tell_faults(report, args, line)
    return 1


def faults_of(faults: "BadRows") -> Report:
    return {
        "rows": faults.rows,
        "unusable": len(faults),
        "share": faults.share,
        "faults": dict(faults.counts.most_common()),
        "named": [fault._asdict() for fault in faults.named],
    }


def is_refused(report: Report, args: Args) -> bool:
    return bool(report["share"] > args.max_bad_rows)


def check(source: "Source", args: Args, sheet: Path, bars: "ProgressFactory") -> Report:
    from m1clip.data import check
    from m1clip.data.contact_sheet import contact_sheet, shot, shown

    pairs, faults = source.every, source.faults
    found, bad = check.survey(pairs, args.workers, bars)
    for fault in bad:
        faults.add(fault, image=True)
    twice = check.doubles(source, found)
    notable = check.notable(found, twice)[:18]
    contact_sheet([*shown(pairs, 12), *(shot(pairs, row, f"[{why}] ") for row, why in notable)], 6).save(
        sheet
    )
    top = check.largest(found)
    sides = {"train": source.train, "val": source.val, "test": source.test}
    return {
        "data": source.spec,
        "images": len(found),
        "sides": {name: len(side) for name, side in sides.items() if side is not None},
        "split": source.why,
        **faults_of(faults),
        "sizes": check.sizes(found),
        "largest": None if top is None else [*found[["width", "height"]][top].item(), pairs.row(top)],
        "megabytes": round(int(found["bytes"].sum()) / 1e6, 1),
        "odd": check.odd(found),
        **{
            key: [[pairs.row(row) for row in couple] for couple in some[:1000]] for key, some in twice.items()
        },
        **check.captions_of(pairs, bars),
        **tokens(source, args),
        "sheet": str(sheet),
    }


def tokens(source: "Source", args: Args) -> Report:
    """Lengths under the tokenizer that training would use; of very many captions, those of a sample."""
    import numpy as np

    from m1clip.model.tokenizer import make_tokenizer

    text = get_preset(args.preset).model.text
    rows = range(0, len(source.train), max(1, len(source.train) // SAMPLE))
    captions = [caption for row in rows for caption in islice(source.train.captions(row), 20)]
    tokenizer = make_tokenizer(args.tokenizer, captions, text.vocab_size)
    lengths = np.array(tokenizer.lengths(captions))
    return {
        "tokens_per_caption": {"median": int(np.median(lengths)), "most": int(lengths.max())},
        "text_length": text.context_length,
        "too_long": int((lengths > text.context_length).sum()),
        "too_long_of": len(lengths),
        "kinds_of_token": len(tokenizer),
    }


def liner() -> Line:
    """Prints a name and what there is to say of it; on a terminal, long lines go on below themselves."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)

    def line(name: str, text: str, style: str = "") -> None:
        words = escape(printable(text))
        words = f"[{style}]{words}[/]" if style else words
        if not console.is_terminal:
            console.print(f"[dim]{name:>10}[/]  {words}", soft_wrap=True)
            return
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(width=10, justify="right", style="dim")
        row.add_column(overflow="fold")
        row.add_row(name, words)
        console.print(row)

    return line


def tell(report: Report, args: Args) -> None:
    line = liner()
    line("data", f"{report['data']}: {report['images']:,} images, {report['captions']:,} captions", "bold")
    counts = ", ".join(f"{count:,} {side}" for side, count in report["sides"].items())
    line("sides", f"{counts} ({report['split']})")
    tell_faults(report, args, line)
    tell_images(report, line)
    tell_captions(report, args, line)
    line("sheet", report["sheet"])


def tell_faults(report: Report, args: Args, line: Line) -> None:
    bad, rows, refused = report["unusable"], report["rows"], is_refused(report, args)
    if not bad:
        line("unusable", "nothing", "green")
        return
    so = (
        f"more than --max-bad-rows {args.max_bad_rows:.2%}: training would refuse"
        if refused
        else "training skips them"
    )
    line(
        "unusable",
        f"{bad:,} of {rows:,} rows ({report['share']:.2%}), {so}",
        "bold red" if refused else "yellow",
    )
    line("", ", ".join(f"{count:,} {kind}" for kind, count in report["faults"].items()))
    for fault in report["named"][:SHOWN]:
        line("", f"{fault['where']}: {fault['what']}")
    if bad > SHOWN:
        line("", f"… and {bad - SHOWN:,} more; --json names them")


def tell_images(report: Report, line: Line) -> None:
    most, label = max(report["sizes"].values()), "pixels"
    for name, count in report["sizes"].items():
        if count:
            line(label, f"{name:>9}  {'█' * max(1, round(30 * count / most))} {count:,}")
            label = ""
    if report["largest"]:
        width, height, where = report["largest"]
        line("", f"(shorter side); the largest has {width:,} × {height:,}: {where}")
    line("odd", ", ".join(f"{count:,} {name}" for name, count in report["odd"].items()) or "nothing")
    same, near, leaks = (report[key] for key in ("same_bytes", "look_alike", "leaks"))
    line("doubles", f"same bytes: {count_of(same, 'couple')}; look alike: {count_of(near, 'couple')}")
    if not leaks:
        line("leaks", "none: no image was found on two sides", "green")
        return
    line("leaks", f"{count_of(leaks, 'couple')} of these on different sides", "bold red")
    for a, b in leaks[:5]:
        line("", f"{a}  and  {b}")


def count_of(things: list[Any], word: str) -> str:
    return f"{len(things):,} {word}{'s' * (len(things) != 1)}"


def tell_captions(report: Report, args: Args, line: Line) -> None:
    each, words, long = (
        report[f"{key}"] for key in ("captions_per_image", "words_per_caption", "tokens_per_caption")
    )
    span = f"{each['least']}" if each["least"] == each["most"] else f"{each['least']} to {each['most']}"
    length = f"{words['least']} to {words['most']} words, the median {words['median']}"
    line("captions", f"{span} an image; {length}; {report['vocabulary']:,} different words")
    cut = report["too_long"] / report["too_long_of"]
    reads = f"{args.preset} reads {report['text_length']}: {cut:.1%} are cut short"
    line("tokens", f"up to {long['most']}, the median {long['median']}; {reads}")
    repeated, doubled = report["repeated_captions"], report["doubled_captions"]
    if repeated or doubled:
        line("repeated", f"{repeated:,} captions stand on several images, {doubled:,} twice on one")
    for text, times in report["most_repeated"][:3]:
        line("", f"{times:,} × {text[:90]!r}")
