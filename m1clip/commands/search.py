"""m1clip search: find images of a folder by text, by another image, or by both."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m1clip.commands import RunsFolder, ServerFlags
from m1clip.config import require
from m1clip.console import Console
from m1clip.format import plural, printable

if TYPE_CHECKING:
    from m1clip.onnx_model import OnnxCLIP
    from m1clip.search.index import ImageFile, Index
    from m1clip.search.query import Answer, Library

MAX_RESULTS, SHOWN_BAD = 10_000, 5
OPERATORS = ("+", "-")
Off = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class Args(ServerFlags, RunsFolder):
    """Search the images of a folder by text, by image, or by both.

    m1clip search "a dog in the snow" photos/                       the ten best images, with cosine similarities
    m1clip search dog + "0.5 * snow" - "a person" photos/           terms with weights
    m1clip search "a dog" "a cat" photos/ --json                    several queries, a line of JSON for each
    m1clip search photos/ --like cat.jpg -n 3                       images like another one
    m1clip search "a dog" photos/ --print0 -n 100 | xargs -0 …      paths for other programs
    m1clip search photos/ --duplicates                              files that look the same
    m1clip search photos/ --web                                     a page in the browser
    m1clip search photos/ --static site/                            the page as a folder that any web server can host

    The first search of a folder encodes its images, later ones only those that are new or changed. Nothing is written
    into the folder: the index is in the cache (~/.cache/m1clip, or M1CLIP_CACHE).
    """

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[QUERY ...] [FOLDER]")] = ()
    """Queries, then the folder; by default the current folder."""
    model: Annotated[str | None, tyro.conf.arg(metavar="RUN|MODEL")] = None
    """Run (name or path; by default the newest), model folder, ONNX export, or a CLIP of another library."""
    top_k: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 10
    """Number of results."""
    min: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Lowest cosine similarity of a result, -1 to 1, instead of the model's own threshold."""
    like: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="IMAGE")] = ()
    """Find images like this one; repeatable, and can be combined with a query."""
    json: Off = False
    """Print a line of JSON for each query."""
    paths: Off = False
    """Print only paths, one per line."""
    print0: Off = False
    """Print only paths, each followed by a NUL byte, for xargs -0."""
    thumbnails: bool = True
    """Show thumbnails in terminals that can: kitty, Ghostty, iTerm2, WezTerm, Konsole, mintty."""
    duplicates: Off = False
    """Print groups of files that have the same bytes or look the same."""
    update: bool = True
    """Look for new, changed and removed files first."""
    exclude: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = ()
    """Skip files and folders whose name or path matches, such as thumbs or '*.gif'; repeatable."""
    follow_links: Off = False
    """Also search folders that symbolic links lead to."""
    workers: int = 0
    """Processes that decode images; 0: one per core, 1: none beside this one."""
    web: Off = False
    """Serve a page; --host, --port, --token and --open say where and to whom."""
    static: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write the page with all vectors and thumbnails, to be hosted anywhere. Needs npm the first time."""
    overwrite: Off = False
    """With --static: replace an earlier one."""

    @classmethod
    def arrange(cls, argv: Sequence[str]) -> list[str]:
        """Queries and folder in one place: they may stand before, between and after flags."""
        switches = {f"--{field.name}" for field in fields(cls) if field.type in (bool, Off)}
        words, flags, rest = list[str](), list[str](), iter(argv)
        for word in rest:
            if word == "--":
                return [*flags, word, *words, *rest]
            if not word.startswith("-") or word == "-":
                words.append(word)
                continue
            flags.append(word)
            if word == "-n" or (word[:2] == "--" and "=" not in word and not is_switch(word, switches)):
                flags += islice(rest, 1)
        return [*words, *flags]

    def check(self) -> None:
        is_page = self.web or self.static is not None
        modes = [name for name in ("web", "static", "duplicates") if getattr(self, name)]
        require(len(modes) <= 1, f"--{' and --'.join(modes)} exclude each other")
        require(
            self.update or not self.exclude, "--exclude leaves files out of the index, so --no-update cannot use it"
        )
        formats = [name for name in ("json", "paths", "print0") if getattr(self, name)]
        require(len(formats) <= 1, f"--{' and --'.join(formats)} exclude each other")
        require(not (is_page and (formats or self.like)), f"--{modes[0] if modes else ''} takes no queries")
        require(1 <= self.top_k <= MAX_RESULTS, f"--top-k must be 1 to {MAX_RESULTS:,}, not {self.top_k}")
        require(self.min is None or -1 <= self.min <= 1, f"--min must be -1 to 1, not {self.min}")
        require(self.workers >= 0, f"--workers must be 0 or more, not {self.workers}")
        require(self.static is not None or not self.overwrite, "--overwrite needs --static")
        self.check_server("your images", self.web)
        queries, _ = self.split_words()
        needed = not (is_page or self.duplicates or self.like)
        is_only_folder = len(self.words) == 1 and is_path(self.words[0]) and Path(self.words[0]).expanduser().is_dir()
        has_query = bool(queries) and not is_only_folder
        require(has_query or not needed, 'what to search for? m1clip search "a dog" photos/')
        given = (
            f"--{modes[0] if modes else ''} takes no query, and there is no folder {queries[0] if queries else ''!r}"
        )
        require(not queries or not (is_page or self.duplicates), given)

    def split_words(self) -> tuple[list[str], Path]:
        """The queries and the folder: the last word if it is one, unless it is the only one and a query is needed."""
        words = list(self.words)
        is_query_needed = not (self.web or self.static or self.duplicates or self.like)
        is_term = len(words) > 1 and words[-2] in OPERATORS
        if words and not is_term and (len(words) > 1 or not is_query_needed):
            path = Path(words[-1]).expanduser()
            if path.is_dir() or is_path(words[-1]):
                return join_terms(words[:-1]), path
        return join_terms(words), Path()


def is_switch(word: str, switches: Set[str]) -> bool:
    return word.replace("_", "-").replace("--no-", "--") in {*switches, "--help"}


def is_path(word: str) -> bool:
    return os.sep in word or word in (".", "..", "~")


def join_terms(words: Sequence[str]) -> list[str]:
    """Queries: words around an operator, as in `dog + snow`, are one."""
    queries = list[str]()
    for previous, word in zip(["", *words], words, strict=False):
        if queries and (word in OPERATORS or previous in OPERATORS):
            queries[-1] += f" {word}"
        else:
            queries.append(word)
    return queries


def main(args: Args) -> None:
    from m1clip.onnx_cache import find_onnx
    from m1clip.onnx_model import load_onnx
    from m1clip.search.index import index_of
    from m1clip.search.query import Library, Searcher, parse_query
    from m1clip.search.scan import existing_folder
    from m1clip.search.update import scan_images

    console = Console()
    queries, folder = args.split_words()
    folder = existing_folder(folder)
    terms = [parse_query(query) for query in queries]
    for image in args.like:
        require(image.expanduser().is_file(), f"--like: there is no image {image}")
    if args.static:
        from m1clip.search.static import check_static

        check_static(args.static, args.overwrite, folder, console)  # before images are indexed
    check_folder = partial(scan_images, folder, args.exclude, args.follow_links)
    model = load_onnx(find_onnx(args.runs, args.model, console, check_folder))
    index = index_of(model)
    if terms and index.row_count:  # loads the text encoder meanwhile; an error is raised when it is used
        ThreadPoolExecutor(1).submit(model.text.session)
    if args.update:
        update(index, folder, model, args, console)
    library = Library(index, folder, reads_once=not args.web)
    hint = "" if args.update else "; --no-update searches only what was indexed before"
    require(len(library) > 0, f"{folder} has no image that can be searched{hint}")
    if args.web:
        from m1clip.search.web import serve_library

        serve_library(model, index, folder, args.address)
        return
    if args.static:
        from m1clip.search.static import write_static

        write_static(model, library, args.static, args.overwrite, console)
        return
    if args.duplicates:
        show_duplicates(library, args)
        return
    searcher = Searcher(model, library)
    write = WRITERS["json" if args.json else "paths" if args.paths or args.print0 else "text"]
    for query, of_query in zip(queries or [""], terms or [[]], strict=True):
        answer = searcher.search(of_query, list(args.like), args.top_k, args.min)
        write(query or f"images like {', '.join(map(str, args.like))}", answer, args)


def update(index: "Index", folder: Path, model: "OnnxCLIP", args: Args, console: Console) -> None:
    """Bring the index up to date, and print what that changed."""
    from m1clip.search.update import update_index

    def report_wait() -> None:
        console.warn(
            "another process is updating the index: waiting for it, because it has no image of this folder yet"
        )

    with index.locked(not len(index.rows_below(folder)), report_wait) as is_mine:
        if not is_mine:
            console.warn("another process is updating the index: new images may be missing")
            return
        changes = update_index(index, folder, model, console, args.exclude, args.follow_links, args.workers)
    if not args.web:  # where images can be queries
        model.vision.unload()
    counts = {"new": changes.added, "moved or copied": changes.known, "removed": changes.removed}
    counts |= {"bad": len(changes.bad), "changed or gone while they were read": changes.vanished}
    if texts := [f"{count:,} {name}" for name, count in counts.items() if count]:
        console.print_fact("index", f"{plural(len(changes.found.files), 'file')} in {folder}: {', '.join(texts)}")
    if changes.found.placeholders:
        count = plural(changes.found.placeholders, "image")
        console.warn(f"not searched, because only in iCloud: {count}; download them to search them")
    for path, reason in list(changes.found.unreadable.items())[:SHOWN_BAD]:
        console.warn(f"{shown_path(Path(os.fsdecode(path)))}: {reason}")
    for name, reason in list(changes.bad.items())[:SHOWN_BAD]:
        console.warn(f"{shown_path(Path(name))}: {reason}")
    if len(changes.bad) > SHOWN_BAD:
        reasons = Counter(changes.bad.values()).most_common(3)
        console.warn(f"… and {len(changes.bad) - SHOWN_BAD:,} more; most often: {reasons[0][0]} ({reasons[0][1]:,})")


def shown_path(path: Path) -> str:
    """On one line, and relative to the current folder if it is in that."""
    cwd = Path.cwd()
    path = path.relative_to(cwd) if path.is_relative_to(cwd) else path
    return printable(str(path)).replace("\n", "?")


def write_text(query: str, answer: "Answer", args: Args) -> None:
    if len(args.split_words()[0]) > 1 or args.like:
        print(printable(f"{query}:"))
    if answer.is_nothing:
        best = answer.nearest
        nearest = f"; the nearest, {best.score:.3f}: {shown_path(best.file.path)}" if best else ""
        print(printable(f"nothing like it among {plural(answer.images, 'image')}{nearest}"))
    for hit in answer.hits:
        copies = f"  (+ {plural(len(hit.files) - 1, 'identical file')})" if len(hit.files) > 1 else ""
        print(f"{hit.score:6.3f}  {shown_path(hit.file.path)}{copies}")
        if args.thumbnails and sys.stdout.isatty():
            from m1clip.search.terminal import inline_thumbnail

            print(inline_thumbnail(hit.file.path, os.environ), end="", flush=True)


def write_json(query: str, answer: "Answer", args: Args) -> None:
    results = [
        {
            "path": str(hit.file.path),
            "score": round(hit.score, 6),
            **describe_file(hit.file),
            "copies": [str(file.path) for file in hit.files[1:]],
        }
        for hit in answer.hits
    ]
    print(json.dumps({"query": query, "images": answer.images, "nothing": answer.is_nothing, "results": results}))


def describe_file(file: "ImageFile") -> dict[str, Any]:
    return {"row": file.row, "width": file.width, "height": file.height, "date": file.date.isoformat()}


def write_paths(query: str, answer: "Answer", args: Args) -> None:
    """As bytes: names need not be text of any encoding."""
    for hit in answer.hits:
        sys.stdout.buffer.write(os.fsencode(hit.file.path) + (b"\0" if args.print0 else b"\n"))
    sys.stdout.buffer.flush()


WRITERS: dict[str, Callable[[str, "Answer", Args], None]] = {
    "text": write_text,
    "json": write_json,
    "paths": write_paths,
}


def show_duplicates(library: "Library", args: Args) -> None:
    groups = library.duplicates()
    for group in groups:
        if args.json:
            print(json.dumps([{"path": str(file.path), **describe_file(file)} for file in group]))
        elif args.paths or args.print0:
            for file in group:
                sys.stdout.buffer.write(os.fsencode(file.path) + (b"\0" if args.print0 else b"\n"))
        else:
            for file in group:
                print(f"{file.width} × {file.height}  {shown_path(file.path)}")
            print()
    if not (args.json or args.paths or args.print0):
        print(f"{plural(len(groups), 'group')} among {plural(len(library), 'image')}")
