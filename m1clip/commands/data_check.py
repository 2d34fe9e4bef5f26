"""m1clip data check: statistics of a dataset, its problems, and whether it can be trained on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console as RichConsole
from rich.text import Text

from m1clip.commands.data_preview import require_image_path
from m1clip.config import DataConfig, check_config, get_preset
from m1clip.console import NOTABLE_LEAK, Console
from m1clip.format import percent, printable

if TYPE_CHECKING:  # imports pyarrow
    from m1clip.data.splits import Source

NOTABLE_EQUAL, MANY_EQUAL = 0.2, 0.55  # fractions of pairs with an equal caption or image; two labels are half
MAX_SHOWN = 15  # bad rows
MAX_TOKENIZED_IMAGES = 50_000
Report = dict[str, Any]
Line = tuple[str, str] | tuple[str, str, str]  # label, text and style


@dataclass(frozen=True)
class Args(DataConfig):
    """Decode all images and read all captions: bad rows by file and line, duplicates, leaks between splits.

    m1clip data check photos/
    m1clip data check products.csv --caption-column title
    m1clip data check coco:~/coco --json > coco.json
    The exit code is 1 if more rows are bad than --max-bad-rows allows: training would refuse the data.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")] = tyro.MISSING
    preset: str = "nano"
    """Preset whose vocabulary and context length captions are compared with."""
    tokenizer: str = "bpe"
    """bpe (learned from these captions), char, or the path of a CLIP BPE vocabulary, as in `m1clip train`."""
    sheet: Path = Path("check.png")
    """Contact sheet to write: evenly spaced images, then unusual ones and duplicates."""
    json: bool = False
    """Print the report as one line of JSON, with up to 10,000 bad rows."""

    def check(self) -> None:
        check_config(self)
        get_preset(self.preset)
        require_image_path(self.sheet)


def main(args: Args) -> int:
    from m1clip.data.splits import NoUsablePairs, open_sources

    console = Console()
    try:
        sources = open_sources(replace(args, max_bad_rows=1.0), console.progress)
        reports = [check_source(source, args, number, console) for number, source in enumerate(sources, 1)]
    except NoUsablePairs as error:
        bad = {"rows": error.bad_rows.rows, "bad_rows": error.bad_rows.record(), "notes": error.bad_rows.note_lines()}
        reports = [{"data": error.spec, "images": 0, "captions": 0, **bad}]
    if args.json:
        print(json.dumps(reports[0] if len(reports) == 1 else {"sources": reports}))
    else:
        output = RichConsole(highlight=False)
        for label, text, *style in (line for report in reports for line in report_lines(report, args)):
            output.print(Text(f"{label:>10}  ", "dim"), Text(printable(text), *style), sep="", soft_wrap=True)
    return int(any(report["bad_rows"]["fraction"] > args.max_bad_rows for report in reports))


def check_source(source: "Source", args: Args, number: int, console: Console) -> Report:
    from m1clip.data import check
    from m1clip.data.splits import caption_advice

    pairs, bad_rows = source.all, source.bad_rows
    sheet = args.sheet.with_stem(f"{args.sheet.stem}-{number}") if number > 1 else args.sheet
    stats = check.image_stats(pairs, bad_rows, args.workers, console.progress)
    duplicates = check.duplicate_images(source, stats)
    traits = zip(check.TRAITS, stats["traits"].sum(0).tolist(), strict=True)
    notable = check.notable_images(stats, duplicates)[:18]
    with console.progress("drawing the contact sheet", len(notable)) as advance:
        tiles = check.sample_tiles(pairs, 12)
        for index, reason in notable:
            tiles.append(check.make_tile(pairs, index, f"[{reason}] "))
            advance(1)
    check.save_image(check.contact_sheet(tiles, 6), sheet)
    largest = int((stats["width"].astype(int) * stats["height"]).argmax())
    width, height = stats[["width", "height"]][largest].item()
    is_test = source.test is source.val  # no validation split of its own
    splits = {"train": source.train, "val": None if is_test else source.val, "test": source.test}
    return {
        "data": source.spec,
        "images": len(stats),
        "splits": {name: len(split) for name, split in splits.items() if split is not None},
        "split_reason": source.split_reason,
        "own_splits": source.has_own_splits,
        "rows": bad_rows.rows,
        "bad_rows": bad_rows.record(),
        "advice": caption_advice(source.spec, bad_rows, args.caption_from),
        "notes": bad_rows.note_lines(),
        "sizes": check.size_histogram(stats),
        "largest": None if not width else [width, height, pairs.location(largest)],
        "megabytes": round(int(stats["bytes"].sum()) / 1e6, 1),
        "unusual": {name: count for name, count in traits if count},
        **{kind: [list(map(pairs.location, pair)) for pair in found[:1000]] for kind, found in duplicates.items()},
        "equal_images": check.equal_images(stats),
        **check.caption_stats(pairs, console.progress),
        **check.split_captions(source, console.progress),
        **token_stats(source, args),
        "sheet": str(sheet),
    }


def token_stats(source: "Source", args: Args) -> Report:
    """Caption lengths with the tokenizer that training would use; of large datasets, from a sample."""
    from m1clip.data.check import min_median_max
    from m1clip.model.tokenizer import make_tokenizer

    text = get_preset(args.preset).model.text
    rows = range(0, len(source.train), max(1, len(source.train) // MAX_TOKENIZED_IMAGES))
    captions = [caption for row in rows for caption in islice(source.train.captions(row), 20)]
    tokenizer = make_tokenizer(args.tokenizer, captions, text.vocab_size)
    lengths = tokenizer.lengths(captions)
    return {
        "tokens_per_caption": min_median_max(lengths),
        "context_length": text.context_length,
        "truncated_captions": sum(length > text.context_length for length in lengths) / len(lengths),
        "vocab_size": len(tokenizer),
    }


def report_lines(report: Report, args: Args) -> Iterator[Line]:
    counts = f"{report['images']:,} images, {report['captions']:,} captions"
    yield "data", f"{report['data']}: {counts}", "bold" if report["images"] else "bold red"
    if report["images"]:
        splits = ", ".join(f"{count:,} {split}" for split, count in report["splits"].items())
        yield "splits", f"{splits} ({report['split_reason']})"
    yield from (("" if number else "notes", note) for number, note in enumerate(report["notes"]))
    yield from bad_row_lines(report, args)
    if report["images"]:
        yield from image_lines(report)
        yield from caption_lines(report, args)
        yield "sheet", report["sheet"]


def bad_row_lines(report: Report, args: Args) -> Iterator[Line]:
    bad = report["bad_rows"]
    refused = bad["fraction"] > args.max_bad_rows
    if not bad["count"]:
        yield "bad rows", "none", "green"
        return
    verdict = f"above --max-bad-rows {percent(args.max_bad_rows)}: training refuses this data{report.get('advice', '')}"
    counted = f"{bad['count']:,} of {report['rows']:,} rows ({percent(bad['fraction'])})"
    yield "bad rows", f"{counted}, {verdict if refused else 'training skips them'}", "bold red" if refused else "yellow"
    yield "", ", ".join(f"{count:,} {kind}" for kind, count in bad["kinds"].items())
    yield from (("", f"{row['location']}: {row['reason']}") for row in bad["examples"][:MAX_SHOWN])
    if bad["count"] > MAX_SHOWN:
        yield "", f"… and {bad['count'] - MAX_SHOWN:,} more; --json lists them"


def image_lines(report: Report) -> Iterator[Line]:
    sizes = [(name, count) for name, count in report["sizes"].items() if count]
    for number, (name, count) in enumerate(sizes):
        bar = "█" * max(1, round(30 * count / max(report["sizes"].values())))
        yield "" if number else "pixels", f"{name:>9}  {bar} {count:,}"
    if report["largest"]:
        width, height, location = report["largest"]
        yield "", f"(shorter edge); the largest image is {width:,} × {height:,}: {location}"
    yield "unusual", ", ".join(f"{count:,} {name}" for name, count in report["unusual"].items()) or "none"
    exact, near, leaks = (report[key] for key in ("exact_duplicates", "near_duplicates", "leaks"))
    yield "duplicates", f"{len(exact):,} pairs of equal files, {len(near):,} pairs that look the same"
    advice = "" if report["own_splits"] else "; --group-by duplicates keeps them in one split"
    found = f"{len(leaks):,} of these pairs are in different splits{advice}"
    yield ("leaks", found, "bold red") if leaks else ("leaks", "none: no duplicate image is in two splits", "green")
    yield from (("", f"{a}  and  {b}") for a, b in leaks[:5])


def caption_lines(report: Report, args: Args) -> Iterator[Line]:
    words, tokens = report["words_per_caption"], report["tokens_per_caption"]
    low, high = report["captions_per_image"]["min"], report["captions_per_image"]["max"]
    length = f"{words['min']} to {words['max']} words (median {words['median']})"
    counts = f"{low if low == high else f'{low} to {high}'} per image"
    yield "captions", f"{counts}; {length}; {report['vocabulary']:,} distinct words"
    context = f"{args.preset} has a context of {report['context_length']}"
    truncated = f"{percent(report['truncated_captions'])} of the captions are truncated"
    yield "tokens", f"up to {tokens['max']} (median {tokens['median']}); {context}: {truncated}"
    shared, twice = report["shared_captions"], report["duplicate_captions"]
    if shared or twice:
        yield "repeated", f"{shared:,} captions are shared by several images, {twice:,} repeated on one"
    yield from (("", f"{images:,} × {caption[:90]!r}") for caption, images in report["most_shared"][:3])
    yield from negative_lines(report)
    seen, captions = report["seen_captions"], report["val_captions"]
    if report["labels"]:
        text = f"{report['labels']:,} captions have many images each: training reports the accuracy over them"
        advice = "" if report["own_splits"] else "; --group-by label holds whole labels out, to score new ones"
        yield "labels", text + advice
    elif seen:
        advice = "" if report["own_splits"] else "; --group-by caption keeps equal captions in one split"
        style = "bold red" if seen >= NOTABLE_LEAK * captions else ""
        yield "leaks", f"{seen:,} of {captions:,} validation captions also occur in training{advice}", style


def negative_lines(report: Report) -> Iterator[Line]:
    """Equal captions or images are masked in training; a warning if few negatives are left."""
    equal = {kind: report[f"equal_{kind}"] for kind in ("captions", "images")}
    kind, fraction = max(equal.items(), key=lambda item: item[1])
    if fraction >= max(NOTABLE_EQUAL, 2 / report["images"]):
        text = f"{percent(fraction)} of the pairs in a batch have equal {kind}, and are no negatives of each other"
        style = "bold red" if fraction > MANY_EQUAL else "yellow"
        yield "negatives", text + ("; with none, nothing can be learned" if fraction > MANY_EQUAL else ""), style
