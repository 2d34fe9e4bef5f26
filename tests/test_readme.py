"""The README promises counts and verbs; they are the program's own."""

import re
from pathlib import Path

import torch

from m1clip.cli import VERBS
from m1clip.config import PRESETS
from m1clip.model.clip import CLIP

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_table_of_presets_has_the_computed_counts():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d,]{7,}) \|", README, re.MULTILINE))
    counts = {}
    for name, config in PRESETS.items():
        with torch.device("meta"):
            counts[name] = f"{sum(w.numel() for w in CLIP(config.model).parameters()):,}"
    assert rows == counts


def test_every_verb_is_named():
    assert all(f"`m1clip {verb}`" in README for verb in VERBS)
