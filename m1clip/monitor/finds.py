"""Sections of a report about what the model finds: by how hard the negatives are, and examples."""

from pathlib import Path

from m1clip.format import percent
from m1clip.monitor import figures
from m1clip.monitor.log import Followed, Record
from m1clip.monitor.values import figure, part, shown
from m1clip.pages import Page


def negatives(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Accuracy by difficulty of the negative")
    rows = [row for row in one.log.records["eval"] if row.get("negatives")]
    if not rows:
        page.text("Not measured: too few validation pairs, no evaluation, or a log older than this measure.")
        return
    first, last = rows[0], rows[-1]
    tiers = {name: tier for name, tier in last["negatives"].items() if isinstance(tier, dict)}
    about = next(iter(tiers.values()), {})
    among, pairs = int(about.get("among") or 2), int(about.get("pairs") or last.get("images") or 0)
    several = among - 1
    steps = [last] if first is last else [first, last]
    table = []
    for name, found in tiers.items():
        seen = [row["negatives"].get(name) or {} for row in steps]
        cells = [part(each.get(key)) for key in ("pairwise", "first") for each in seen]
        table.append([name, figure(found.get("similarity"), ".2f"), shown(found.get("negatives")), *cells])
    table.append(["chance", "", "", *len(steps) * ["50.0 %"], *len(steps) * [percent(1 / among)]])
    columns = [f"{words}, step {row['step']:,}" for words in ("1", f"{several}") for row in steps]
    page.table(["negatives", "similarity", "couples", *columns], table)
    page.text(
        "For every validation pair the others are ordered by how alike the captions are in their words "
        "(cosine of tf-idf, which knows nothing of the model). Easy are the less similar half, hard the most "
        "similar tenth, medium those between; pairs with the very same caption are no negatives. A cell is "
        f"how often the truth scores above 1 such negative, or above {several} of them at once, as in a "
        f"batch of {among}: the mean of image→text and text→image, of the first {pairs:,} validation "
        "images with their first captions."
    )
    lines = " and ".join(str(row["line"]) for row in steps)
    page.text(f"From line{'s' * (len(steps) > 1)} {lines}.", note=True)


def found_words(query: Record) -> str:
    where = "found first" if query["rank"] == 1 else f"the true image is number {query['rank']:,}"
    return f"“{query['text']}”: {where}"


def examples(page: Page, one: Followed, folder: Path) -> None:
    page.heading("What it finds")
    found = one.retrievals()
    queries = found.get("queries", [])
    if not queries:
        page.text("No evaluation has left examples (`retrievals.json`).")
        return
    errors, sample = ([row for row in queries if row["group"] == group] for group in ("errors", "sample"))
    if not errors:
        page.text("There is no error to show: each caption finds its own image, or one captioned alike.")
    groups = {
        "errors": (errors[:6], "Errors in which a wrong image beats the true one by most:"),
        "sample": (sample[:4], "Captions at equal distances through the validation set, right or wrong:"),
    }
    for name, (some, words) in groups.items():
        if some:
            page.text(words)
            page.points([found_words(query) for query in some])
            page.image(figures.retrievals(some, found["shown"], folder / f"{name}.png"), words)
    page.text(
        f"From `retrievals.json`, written at step {shown(found.get('step'))}. Numbers are ranks and cosines; "
        "the true image has a green frame, and stands last where it is not among the first five.",
        note=True,
    )
