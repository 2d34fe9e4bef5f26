"""A run as it is written, read by a second process: what is new since the last look, and no more."""

import json
import math
import os
from array import array
from bisect import bisect_left
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from m1clip.run import Run

Record = dict[str, Any]
Column = NDArray[np.float64]
BLOCK = 1 << 16  # what is parsed at once stays in the processor's cache: twice as fast as 4 MB
KINDS = ("logger", "eval", "epoch")
NAN = float("nan")
LARGEST = 1e200
NO_NUMBERS = ("kind", "rows")
LISTS = ("cpu_percent",)
TREES = ("grad_norms", "weight_norms", "memory_gb", "negatives")
STEP = itemgetter("step")


class Log:
    """metrics.jsonl as far as it has whole lines: steps as columns, the rest as records with their line.

    Each step once: where one comes again, as after a restart, what was measured from there on is forgotten,
    but for events. A file that was replaced is read anew; what cannot be read is counted and passed over.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.offset, self.lines, self.file = 0, 0, (0, 0)
        self.size, self.ended = 0, -1  # as it was at the last look, and when it was last read to its end
        self.end = b""  # what was read last, by which the file is known again
        self.latest, self.repeated = 0, 0
        self.columns: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.records: dict[str, list[Record]] = {kind: [] for kind in KINDS}
        self.events: list[Record] = []
        self.broken: list[int] = []

    def refresh(self, most: float = math.inf) -> bool:
        """Read what has been added, about `most` bytes of it; whether anything was."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self.file or not self._goes_on(file):
                    self._forget()
                    self.file = (found.st_dev, found.st_ino)
                if found.st_size == self.ended:
                    return False
                self.size = found.st_size
                file.seek(self.offset)
                return self._read(file, most)
        except OSError:  # not written yet, or gone with the run's folder
            known = self.offset > 0
            self._forget()
            return known

    def _goes_on(self, file: IO[bytes]) -> bool:
        """Whether it is still the file that was read: a new one may have the old one's number."""
        file.seek(self.offset - len(self.end))
        return file.read(len(self.end)) == self.end

    def _read(self, file: IO[bytes], most: float) -> bool:
        before, rest = self.offset, list[bytes]()
        block = b"?"
        while self.offset - before < most and (block := file.read(BLOCK)):
            head, newline, tail = block.rpartition(b"\n")
            rest.append(head if newline else tail)
            if newline:
                whole = b"".join(rest)
                self.offset += len(whole) + 1
                self.end = (whole + newline)[-256:]
                self._take(whole.split(b"\n"))
                rest = [tail]
        if not block:
            self.ended = file.tell()
        return self.offset > before

    def _take(self, lines: list[bytes]) -> None:
        steps: list[Record] = []
        for line in lines:
            self.lines += 1
            record = parsed(line)
            if record is None:
                self.broken.append(self.lines) if line.strip() else None
                continue
            record["line"], kind, step = self.lines, record["kind"], record["step"]
            if kind == "step":
                if step <= self.latest:
                    self._add_steps(steps)
                    self._forget_from(step)
                    steps = []
                steps.append(record)
                self.latest = step
            elif kind == "event":
                self.events.append(record)
            elif kind in KINDS:
                record = cleaned(record)
                mine = self.records[kind]
                del mine[bisect_left(mine, step, key=STEP) :]
                mine.append(record)
        self._add_steps(steps)

    def _forget_from(self, step: int) -> None:
        """A step comes again: what was measured from there on is being measured anew."""
        self.repeated += 1
        start = bisect_left(self.columns["step"], step)
        for column in self.columns.values():
            del column[start:]
        for mine in self.records.values():
            del mine[bisect_left(mine, step, key=STEP) :]

    def _add_steps(self, rows: list[Record]) -> None:
        if not rows:
            return
        length, names = len(self), dict.fromkeys([*self.columns, *rows[0]])
        for row in rows:
            if len(row) != len(rows[0]):  # as one that was skipped, which says so
                names |= dict.fromkeys(row)
        for name in (name for name in names if name.isidentifier() and name not in NO_NUMBERS):
            column = self.columns[name]
            column.extend([NAN] * (length - len(column)))
            try:
                column.extend(array("d", [row[name] for row in rows]))
            except (KeyError, TypeError, OverflowError):  # missing, null, or something that is no number
                column.extend([number(row.get(name)) for row in rows])

    def column(self, name: str) -> Column:
        """Of every step; NaN where it is not known."""
        if name not in self.columns:
            return np.full(len(self), np.nan)
        values = np.array(self.columns[name])
        return np.where(np.abs(values) < LARGEST, values, np.nan)

    def recorded(self, kind: str, name: str) -> Column:
        return np.array([number(row.get(name)) for row in self.records[kind]], np.float64)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def last(self, kind: str) -> Record | None:
        rows = self.records[kind]
        return rows[-1] if rows else None

    def recent(self, name: str, count: int = 50) -> float | None:
        """The mean of the last steps, as far as it is known."""
        some = self._last(name, count)
        return float(some.mean()) if len(some) else None

    def rate(self, count: int) -> float | None:
        """PairDataset a second over the last steps: all their pairs by all their time, not the mean of rates."""
        some = self._last("pairs_per_s", count)
        some = some[some > 0]
        return float(len(some) / (1 / some).sum()) if len(some) else None

    def _last(self, name: str, count: int) -> Column:
        some = np.array(self.columns[name][-count:] if name in self.columns else [])
        sound: Column = some[np.abs(some) < LARGEST]  # which NaN is not
        return sound

    @property
    def unread(self) -> float:
        """The part of the file that has not been read yet."""
        return max(0.0, 1 - self.offset / self.size) if self.size else 0.0


def parsed(line: bytes) -> Record | None:
    """A record of the log; None for what is none."""
    try:
        record = orjson.loads(line)
    except ValueError:
        try:
            record = json.loads(line)  # a NaN, which strict JSON does not know
        except (ValueError, RecursionError):
            return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 2**53 else None


def number(value: Any) -> float:
    """NaN for what is not one."""
    if isinstance(value, int | float) and abs(value) < LARGEST:
        return float(value)
    return NAN


def cleaned(record: Record) -> Record:
    """As training writes it, whatever was written: numbers or None, trees of numbers, lists of numbers."""
    made: Record = {"kind": record["kind"], "step": record["step"], "line": record["line"]}
    for key, value in record.items():
        if key in made:
            continue
        if key in TREES:
            made[key] = tree(value)
        elif key in LISTS:
            made[key] = [each for each in value if known(each) is not None] if isinstance(value, list) else []
        else:
            made[key] = known(value)
    return made


def tree(value: Any) -> Record:
    if not isinstance(value, dict):
        return {}
    return {key: tree(one) if isinstance(one, dict) else known(one) for key, one in value.items()}


def known(value: Any) -> float | int | None:
    """A number as it is, or None."""
    return value if math.isfinite(number(value)) else None


class Followed:
    """A run and what is known of it now."""

    def __init__(self, run: Run, name: str | None = None):
        self.run, self.name = run, name or run.name
        self.log = Log(run.path / "metrics.jsonl")
        self.summary: Record = {}
        self.config: Record = {}
        self.machine: Record = {}
        self.data: Record = {}
        self._seen: dict[str, float] = {}

    def refresh(self, most: float = math.inf) -> bool:
        """Whether there is anything new."""
        changed = self.log.refresh(most)
        try:
            summary = self.run.summary()
        except OSError:  # the folder is gone, as under --overwrite
            summary = {**self.summary, "state": "gone", "reason": f"{self.run.path} is not there any more"}
        changed |= summary != self.summary
        self.summary = summary
        for name in ("config", "machine", "data"):
            setattr(self, name, self._file(f"{name}.json", getattr(self, name)))
        return changed

    def _file(self, name: str, before: Record) -> Record:
        """A JSON file of the run, read again only if it has changed."""
        try:
            changed = (self.run.path / name).stat().st_mtime
            if self._seen.get(name) == changed:
                return before
            value = self.run.read(name)
            self._seen[name] = changed
            return value if isinstance(value, dict) else {}
        except (OSError, ValueError):
            return before

    def retrievals(self) -> Record:
        """What the latest evaluation found; {} where there was none yet. What is malformed is left out."""
        self._seen.pop("retrievals.json", None)
        found = self._file("retrievals.json", {})
        queries, shown = found.get("queries"), found.get("shown")
        if not isinstance(queries, list) or not isinstance(shown, dict):
            return {}
        images = {row: about for row, about in shown.items() if isinstance(about, dict)}
        return {"step": found.get("step"), "queries": list(filter(is_query, queries)), "shown": images}


def is_query(value: Any) -> bool:
    """Whether it is a caption with what was found for it, as training writes them."""
    if not isinstance(value, dict) or not isinstance(value.get("top"), list):
        return False
    hits = [*value["top"], {"row": value.get("truth"), "score": value.get("true_score")}]
    return (
        isinstance(value.get("text"), str)
        and value.get("group") in ("errors", "sample")
        and type(value.get("rank")) is int
        and all(isinstance(hit, dict) and type(hit.get("row")) is int for hit in hits)
        and all(known(hit.get("score")) is not None for hit in hits)
    )
