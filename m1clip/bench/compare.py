"""The same training on each device, side by side: from the runs' own metrics, and from nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from m1clip import plots
from m1clip.bench.report import short
from m1clip.pages import Page
from m1clip.run import Run
from m1clip.training.timing import quartiles

Row = dict[str, Any]
COLUMNS = (
    "device",
    "ms/step",
    "middle half",
    "pairs/s",
    "speed",
    "GB",
    "J",
    "W",
    "loss, last 10",
    "validation R@1",
    "apart",
)
FIRST = 3  # steps that are not counted: kernels, caches and threads are made in them


@dataclass(frozen=True)
class Contestant:
    requested: str
    run: Run
    scores: Row
    """What it said at its end."""
    failed: str | None = None
    """What it said where it did not finish."""

    @property
    def steps(self) -> list[Row]:
        return list(self.run.records("step"))

    @property
    def counted(self) -> list[float]:
        return [float(row["step_ms"]) for row in self.steps[FIRST:] or self.steps]

    @property
    def why(self) -> str:
        machine = self.run.read("machine.json")
        return f"{machine['device']}: {machine['why']}" + (f"; {machine['parity']}" if machine["parity"] else "")

    def record(self, first: "Contestant") -> Row:
        """Flat; what could not be read is None."""
        if self.failed:
            return {"requested": self.requested, "failed": self.failed}
        steps, ms = self.steps, self.counted
        looks = list(self.run.records("logger"))
        low, middle, high = quartiles(ms)
        joules = looks[-1]["joules"] if looks else None
        seconds = sum(row["step_ms"] + row["between_ms"] for row in steps) / 1e3
        losses = [row["loss"] for row in steps if row["loss"] is not None]
        theirs = {row["step"]: row["loss"] for row in first.steps}
        pairs = [(row["loss"], theirs.get(row["step"])) for row in steps]
        apart = [abs(a - b) for a, b in pairs if a is not None and b is not None]
        return {
            "requested": self.requested,
            "device": self.run.read("machine.json")["device"],
            "step_ms": middle,
            "low_ms": low,
            "high_ms": high,
            "pairs_per_s": 1e3 * self.run.read("config.json")["batch"] / middle,
            "speed": median(first.counted) / middle,
            "peak_gb": max((max(look["peak_rss_gb"], look["device_gb"] or 0.0) for look in looks), default=None),
            "joules": joules,
            "watts": None if joules is None else joules / seconds,
            "last_loss": mean(losses[-10:]) if losses else None,
            "mean_r1": self.scores.get("mean_r1"),
            "losses_apart": max(apart, default=None),
        }


def table(contestants: Sequence[Contestant]) -> list[list[str]]:
    lines = []
    for one in contestants:
        row = one.record(contestants[0])
        if one.failed:
            lines.append([one.requested, *["–"] * (len(COLUMNS) - 2), one.failed])
            continue
        name = one.requested if row["device"] == one.requested else f"{one.requested} → {row['device']}"
        recall = row["mean_r1"]
        lines.append(
            [
                name,
                short(row["step_ms"]),
                f"{short(row['low_ms'])}–{short(row['high_ms'])}",
                short(row["pairs_per_s"]),
                f"{row['speed']:.2f}×",
                "–" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}",
                short(row["joules"]),
                short(row["watts"]),
                "–" if row["last_loss"] is None else f"{row['last_loss']:.3f}",
                "–" if recall is None else f"{100 * recall:.1f} %",
                "" if one is contestants[0] or row["losses_apart"] is None else f"{row['losses_apart']:.1e}",
            ]
        )
    return lines


def image(contestants: Sequence[Contestant], path: Path) -> Path:
    """Loss over steps, where equal devices lie on each other, and over seconds, where the faster leads."""
    figure, panels = plots.axes(2, 5.5, 4)
    for one, color in zip(contestants, plots.COLORS, strict=False):
        if one.failed:
            continue
        rows = [row for row in one.steps if row["loss"] is not None]
        passed, seconds = 0.0, []
        for row in rows:
            passed += (row["step_ms"] + row["between_ms"]) / 1e3
            seconds.append(passed)
        style = "-" if one is contestants[0] else "--"
        for panel, x in zip(panels, ([row["step"] for row in rows], seconds), strict=True):
            panel.plot(x, [row["loss"] for row in rows], style, color=color, label=one.requested, lw=1.6)
    chance = next(row["chance_loss"] for one in contestants if not one.failed for row in one.steps)
    for panel, words in zip(panels, ("step", "seconds of training"), strict=True):
        panel.axhline(chance, color=plots.COLORS[6], lw=1, ls=":")
        panel.annotate(
            "chance",
            (1, chance),
            (-4, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        panel.set_xlabel(words)
        panel.set_ylabel("loss")
    panels[0].legend(frameon=False, fontsize=9)
    return plots.save(figure, path)


def page(contestants: Sequence[Contestant], folder: Path) -> Path:
    config = next(one for one in contestants if not one.failed).run.read("config.json")
    document = Page(f"The same training of {config['preset']}, device by device")
    document.text(
        f"{config['steps']} steps of {config['batch']} pairs of {config['data']}, seed {config['seed']}, one "
        f"device after the other. The first {FIRST} steps are not counted in the times."
    )
    document.table(COLUMNS, table(contestants))
    document.text(
        "speed: against the first line. GB: the most that the whole process, or torch on a GPU, held. J, W: "
        "what the machine's counters told, – where they tell nothing. apart: the largest difference of a "
        "step's loss from that of the first line: rounding grows with the steps."
    )
    document.image(image(contestants, folder / "compare.png"), "loss over steps and over time")
    document.points([f"{one.requested}: {one.failed}" if one.failed else one.why for one in contestants])
    return document.write(folder, "compare")
