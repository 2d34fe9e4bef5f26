"""Do these weights belong to this model? All that does not fit is told at once, and nothing is taken."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

MOST = 8  # lines of each kind


class WeightMismatch(ValueError):  # noqa: N818 - it is said of the weights
    """What is missing, unexpected or misshapen, as a table."""

    def __init__(
        self,
        where: object,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshapen: Sequence[tuple[str, Sequence[int], Sequence[int]]] = (),
    ):
        self.missing, self.unexpected, self.misshapen = list(missing), list(unexpected), list(misshapen)
        rows = [("missing", name, "") for name in sorted(missing)]
        rows += [("unexpected", name, "") for name in sorted(unexpected)]
        rows += [
            ("misshapen", name, f"{shown(found)} in the file, {shown(want)} in the model")
            for name, found, want in sorted(misshapen)
        ]
        super().__init__(f"{where} does not fit, and nothing was taken from it:\n{table(rows)}")


def shown(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "–"


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    lines = []
    for kind in ("missing", "unexpected", "misshapen"):
        some = [row for row in rows if row[0] == kind]
        wide = max((len(name) for _, name, _ in some[:MOST]), default=0)
        lines += [f"  {kind:<11} {name:<{wide}}  {more}".rstrip() for _, name, more in some[:MOST]]
        if len(some) > MOST:
            lines.append(f"  {kind:<11} … and {len(some) - MOST} more")
    return "\n".join(lines)


def check_weights(where: object, found: Mapping[str, Tensor], want: Mapping[str, Any]) -> None:
    """Every name and every shape, or WeightMismatch."""
    misshapen = [
        (name, tuple(found[name].shape), tuple(want[name].shape))
        for name in want.keys() & found.keys()
        if found[name].shape != want[name].shape
    ]
    missing, unexpected = want.keys() - found.keys(), found.keys() - want.keys()
    if missing or unexpected or misshapen:
        raise WeightMismatch(where, list(missing), list(unexpected), misshapen)
