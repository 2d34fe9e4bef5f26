"""Reads the files of a run while another process writes them; each refresh reads only what is new."""

import json
import math
import os
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from m1clip.config import PRESETS, to_json
from m1clip.files import MAX_LINE_BYTES, open_regular, parse_json, require_shallow
from m1clip.format import printable
from m1clip.run import Run, is_record

Record = dict[str, Any]
Array = NDArray[np.float64]
STEP_PHASES = ("data", "copy", "forward", "backward", "optimizer")
RECENT_STEPS = 50  # that the monitors average
RECORD_KINDS = ("diagnostics", "eval", "epoch")
BLOCK_SIZE = 1 << 16  # blocks that stay in the CPU cache are parsed twice as fast as blocks of 4 MB
PART_BYTES = 8_000_000  # of a log that the monitors read at a time: a tenth of a second
TAIL_BYTES = 4_000_000  # of a long log that is shown until the rest is read
# What one file may make us hold: a longer line is skipped, and more columns are ignored. Of more records of a
# kind, or of more numbers (10 million steps of today's columns), the older half is dropped.
MAX_COLUMNS, MAX_RECORDS, MAX_NUMBERS, MAX_BAD_LINES = 128, 200_000, 250_000_000, 100
MAX_VALUE = 1e200  # a larger magnitude counts as missing: sums and squares of it would overflow
DICT_DEPTHS = {"grad_norms": 1, "weight_norms": 1, "memory_gb": 1, "hard_negatives": 2}
EVENT_METADATA = ("kind", "step", "time", "event", "line", "rows")
BY_STEP = itemgetter("step")
ALL_ROWS = slice(None)


class Log:
    """The complete lines of metrics.jsonl: steps as columns, other kinds as records with their line number.

    When a step is logged again, as after a restart, the earlier records from that step on are dropped, except
    events. A replaced file is read from its start. Lines that cannot be parsed are counted and skipped.
    With a `start`, only the lines after that byte are read, and line numbers are unknown.
    """

    def __init__(self, path: Path, start: int = 0):
        self.path = path
        self._clear(start)

    def _clear(self, start: int = 0) -> None:
        self.start, self.line_count = start, 0
        self.offset = max(0, start - 1)  # it may be the end of the line before
        self.is_skipping = start > 0  # until the end of a line
        self.size = self.size_at_end = 0  # of the file: at the last refresh, and when its end was reached
        self.tail = b""  # the last bytes read, which tell whether the file was replaced
        self.last_step, self.restarts = 0, 0
        self.columns: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.records: dict[str, list[Record]] = {kind: [] for kind in RECORD_KINDS}
        self.events: list[Record] = []
        self.bad_lines: list[int] = []  # the first of them
        self.bad_line_count = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the last refresh reached the end of the file."""
        return self.size_at_end >= self.size

    def refresh(self, max_bytes: float = math.inf) -> bool:
        """Read about `max_bytes` of what was appended; return whether anything changed."""
        before = self.offset, self.tail
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset - len(self.tail))
                if file.read(len(self.tail)) != self.tail:  # another file, even if it has the same inode
                    self._clear()
                self.size = os.fstat(file.fileno()).st_size
                if self.size != self.size_at_end:
                    self._read_blocks(file, self.offset + max_bytes)
        except OSError:  # not written yet, or deleted with the run
            self._clear()
        return (self.offset, self.tail) != before

    def _read_blocks(self, file: IO[bytes], stop: float) -> None:
        while self.offset < stop:
            file.seek(self.offset)
            block = file.read(BLOCK_SIZE)
            is_last = len(block) < BLOCK_SIZE
            if not (is_last or self.is_skipping or b"\n" in block):  # a long line
                block += file.read(MAX_LINE_BYTES - BLOCK_SIZE)
                is_last = len(block) < MAX_LINE_BYTES
            end = block.rfind(b"\n") + 1
            if not end and is_last:
                self.size_at_end = self.offset + len(block)
                return
            if end:
                lines = block[: end - 1].split(b"\n")
                self._add_lines([b"a line that is too long", *lines[1:]] if self.is_skipping else lines)
            self.is_skipping = not end
            self.tail = block[: end or None][-256:]
            self.offset += end or len(block)

    def _add_lines(self, lines: list[bytes]) -> None:
        steps: list[Record] = []
        for line in lines:
            self.line_count += 1
            record = parse_record(line)
            if record is None:
                if line.strip() and not self.start:
                    self._count_bad_line()
                continue
            kind, step = record["kind"], record["step"]
            record["line"] = None if self.start else self.line_count
            if kind == "step":
                if step <= self.last_step:
                    self._add_steps(steps)
                    self._drop_from(step)
                    steps = []
                steps.append(record)
                self.last_step = step
            elif kind == "event":
                append_record(self.events, record)
            elif kind in RECORD_KINDS:
                records = self.records[kind]
                del records[bisect_left(records, step, key=BY_STEP) :]
                append_record(records, clean_record(record))
        self._add_steps(steps)

    def _count_bad_line(self) -> None:
        self.bad_line_count += 1
        if self.bad_line_count <= MAX_BAD_LINES:
            self.bad_lines.append(self.line_count)

    def _drop_from(self, step: int) -> None:
        self.restarts += 1
        start = bisect_left(self.columns["step"], step)
        for column in self.columns.values():
            del column[start:]
        for records in self.records.values():
            del records[bisect_left(records, step, key=BY_STEP) :]

    def _add_steps(self, steps: list[Record]) -> None:
        length, names = len(self), dict.fromkeys(chain(self.columns, *steps))
        for name in (name for name in names if name.isidentifier() and name not in ("kind", "rows")):
            if name not in self.columns and len(self.columns) >= MAX_COLUMNS:
                continue
            column = self.columns[name]
            column.extend([math.nan] * (length - len(column)))
            try:
                column.extend(array("d", [step[name] for step in steps]))
            except (KeyError, TypeError, OverflowError):  # missing, null or not a number
                column.extend([float_or_nan(step.get(name)) for step in steps])
        if len(self) * len(self.columns) > MAX_NUMBERS:
            for column in self.columns.values():
                del column[: len(column) // 2]

    def column(self, name: str, kind: str = "step", rows: slice = ALL_ROWS) -> Array:
        """A field of every record of a kind, or of some steps; NaN where it is unknown."""
        if kind != "step":
            return np.array([float_or_nan(record.get(name)) for record in self.records[kind]], np.float64)
        values = np.array(
            self.columns[name][rows] if name in self.columns else [math.nan] * len(self.columns["step"][rows])
        )
        return np.where(np.abs(values) < MAX_VALUE, values, np.nan)

    def known_column(self, name: str, kind: str = "step", last: int = 0) -> Array:
        """The known values among the last records of a kind; by default, among all."""
        values = self.column(name, kind, slice(-last, None))[-last:]
        return np.extract(np.isfinite(values), values)

    def known_records(self, kind: str, name: str) -> list[Record]:
        """The records in which a field is known and not empty; 0 is known."""
        return [record for record in self.records[kind] if record.get(name) not in (None, {}, [])]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def last(self, kind: str) -> Record:
        """The latest record of a kind; empty if there is none."""
        return self.records[kind][-1] if self.records[kind] else {}

    def recent_mean(self, name: str, count: int) -> float | None:
        values = self.known_column(name, last=count)
        return float(values.mean()) if len(values) else None

    def recent_rate(self, count: int) -> float | None:
        """Pairs per second over the last steps: all pairs by all time, not the mean of the rates."""
        rates = self.known_column("pairs_per_s", last=count)
        rates = rates[rates > 0]
        return float(len(rates) / (1 / rates).sum()) if len(rates) else None


def append_record(records: list[Record], record: Record) -> None:
    records.append(record)
    if len(records) > MAX_RECORDS:
        del records[: MAX_RECORDS // 2]


def parse_record(line: bytes) -> Record | None:
    try:
        record = orjson.loads(line)
        require_shallow(line, record)
    except ValueError:
        try:
            record = parse_json(line)  # accepts NaN, which strict JSON does not
        except ValueError:
            return None
    return record if is_record(record) else None


def float_or_nan(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_VALUE else math.nan


def number_or_none(value: Any) -> float | int | None:
    return value if math.isfinite(float_or_nan(value)) else None


def clean_record(record: Record) -> Record:
    """The record with the types that training writes: numbers or None, dicts of them, a list of core loads."""
    clean = {key: clean_value(value, DICT_DEPTHS.get(key, 0)) for key, value in record.items()}
    if "cpu_percent" in record:
        loads = record["cpu_percent"] if isinstance(record["cpu_percent"], list) else []
        clean["cpu_percent"] = [load for load in loads if number_or_none(load) is not None]
    return clean | {"kind": record["kind"]}


def clean_value(value: Any, depth: int) -> Any:
    """A number or None; at a depth of n, a dict of values at a depth of n - 1."""
    if depth == 0:
        return number_or_none(value)
    return {key: clean_value(item, depth - 1) for key, item in value.items()} if isinstance(value, dict) else {}


def subsample(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items at equal distances, with the first and the last."""
    return [items[index] for index in np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)]


def event_text(event: Record) -> str:
    name = event.get("event")
    if name == "diagnosis":
        return printable(f"{event.get('about')}: {event.get('text')}")
    if name == "chunk":
        return printable(f"{event.get('chunk')} pairs in memory at once: {event.get('reason')}")
    if name in ("start", "resume"):
        skipped = event.get("skipped_rows")
        return printable(f"{name}: {skipped} of {event.get('rows')} rows skipped" if skipped else f"{name}")
    fields = ", ".join(
        f"{key.replace('_', ' ')} {', '.join(map(str, value[:3])) if isinstance(value, list) else value}"
        for key, value in event.items()
        if key not in EVENT_METADATA
    )
    return printable(f"{name}: {fields}" if fields else f"{name}")


class RunView:
    """A run's files as they were at the last refresh."""

    def __init__(self, run: Run, name: str | None = None):
        self.run, self.path, self.name = run, run.path, name or run.name
        self.log = self.whole_log = Log(run.path / "metrics.jsonl")
        self.summary, self.config, self.machine, self.data = Record(), Record(), Record(), Record()

    @property
    def fraction_read(self) -> float:
        """Of the log; below 1, `log` may have only its newest part."""
        log = self.whole_log
        return 1.0 if log.is_at_end else log.offset / max(1, log.size)

    def _refresh_log(self, max_bytes: float) -> bool:
        """Read on; while more than TAIL_BYTES are unread, `log` has only the newest part of the file."""
        shown, whole = self.log, self.whole_log
        changed = whole.refresh(max_bytes)
        is_behind = not whole.is_at_end and whole.size - whole.offset > TAIL_BYTES
        if whole.is_at_end:
            self.log = whole
        elif is_behind and not self.log.start:  # the first part, or a replaced file
            self.log = Log(whole.path, whole.size - TAIL_BYTES)
        if self.log is not whole:
            changed = self.log.refresh(2 * TAIL_BYTES)
        return changed or self.log is not shown

    def refresh(self, max_bytes: float = math.inf) -> bool:
        """Read about `max_bytes` of what is new in the log; return whether what is shown of the run changed."""
        changed = self._refresh_log(max_bytes)
        try:
            summary = self.run.summary()
        except OSError:  # the folder was deleted, as by --overwrite
            summary = {**self.summary, "state": "gone", "reason": f"{self.path} was deleted"}
        changed |= summary != self.summary
        self.summary = summary
        self.config = self.run.read_or_empty("config.json") or self.config
        self.machine = self.run.read_or_empty("machine.json") or self.machine
        self.data = self.run.read_or_empty("data.json") or self.data
        return changed

    def changed_settings(self) -> Record:
        """Settings that differ from the preset, with the preset's value; empty for an unknown preset."""
        preset = PRESETS.get(str(self.config.get("preset")))
        defaults, settings = flatten(json.loads(to_json(preset))) if preset else {}, flatten(self.config)
        return {key: value for key, value in defaults.items() if key in settings and settings[key] != value}

    def retrievals(self) -> Record:
        """Example queries of the latest evaluation, without malformed ones; empty before the first."""
        content = self.run.read_or_empty("retrievals.json")
        queries, images = content.get("queries"), content.get("shown")
        if not isinstance(queries, list) or not isinstance(images, dict):
            return {}
        images = {row: image for row, image in images.items() if isinstance(image, dict)}
        return {"step": content.get("step"), "queries": list(filter(is_query, queries)), "shown": images}


def flatten(nested: Record, prefix: str = "") -> Record:
    flat: Record = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def is_query(value: Any) -> bool:
    """Whether a value is a caption with its retrieved images, as training writes them."""
    try:
        hits = [*value["top"], {"row": value["truth"], "score": value["true_score"]}]
        known = all(type(hit["row"]) is int and number_or_none(hit["score"]) is not None for hit in hits)
        is_text = isinstance(value["text"], str) and value["group"] in ("errors", "sample")
        return known and is_text and type(value["rank"]) is int
    except (KeyError, TypeError):
        return False
