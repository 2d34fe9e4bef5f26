"""Class names and prompt templates of zero-shot classification, from flags, files and open_clip. No torch."""

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from m1clip.files import parse_json, read_file

MAX_FILE_BYTES = 16_000_000  # of a file with labels, templates or descriptions
MAX_LABELS, MAX_LABEL_LENGTH = 100_000, 500
OPEN_CLIP = {"openai": "OPENAI_IMAGENET_TEMPLATES", "simple": "SIMPLE_IMAGENET_TEMPLATES"}
# {} is the label and {an} the label with its article: an owl. docs/benchmarks.md has what they gain.
DEFAULT_TEMPLATES = (
    "{}",
    "a photo of {an}.",
    "a photo of the {}.",
    "a close-up of {an}.",
    "a picture of {an} in the distance.",
    "a photo of several {}.",
    "there is {an} in the image.",
)
# Texts that fit any image: the best label must fit better than each of them.
NULL_PROMPTS = ("a photo.", "an image.", "a picture of something.", "something", "an object.", "a scene.")
PLACEHOLDER = re.compile(r"\{(c|an)?\}")  # {c} is CLIP_benchmark's


def fill(template: str, label: str) -> str:
    """A template with its label. `{}` and `{c}` are the label as it is, `{an}` has its article."""
    article = "an" if label[:1].lower() in "aeiou" else "a"
    return PLACEHOLDER.sub(lambda found: f"{article} {label}" if found[1] == "an" else label, template)


@dataclass(frozen=True)
class Prompts:
    """Texts for each label: its templates, and descriptions of its own if there are any."""

    templates: tuple[str, ...] = DEFAULT_TEMPLATES
    descriptions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    name: str = "default templates"

    @cached_property
    def described(self) -> dict[str, list[str]]:
        texts = {label: [text] if isinstance(text, str) else list(text) for label, text in self.descriptions.items()}
        return {label_key(label): of_label for label, of_label in texts.items()}

    def of(self, label: str) -> list[str]:
        texts = [fill(text, label) for text in (*self.templates, *self.described.get(label_key(label), ()))]
        return list(dict.fromkeys(text for text in texts if text.strip()))

    def check(self, labels: Sequence[str]) -> None:
        """Require at least one text of every label, and descriptions of some of them if there are any."""
        if self.described and not any(label_key(label) in self.described for label in labels):
            raise ValueError(f"the descriptions are of none of the labels: {', '.join([*self.described][:3])} …")
        if missing := [label for label in labels if not self.of(label)]:
            given = f"{len(missing)} of {len(labels)} labels have no description, such as {missing[0]!r}"
            raise ValueError(f"{given}; add them, or a template for all labels")


def parse_prompts(templates: Sequence[str]) -> Prompts:
    """From --template: texts with {}, files of templates (.txt, .json), descriptions (.json), `openai`, `default`."""
    if not templates:
        return Prompts()
    texts, descriptions = list[str](), dict[str, list[str]]()
    for template in templates:
        if template == "default":
            texts += DEFAULT_TEMPLATES
        elif template in OPEN_CLIP:
            texts += [make("{}") for make in open_clip_metadata(OPEN_CLIP[template], f"--template {template}")]
        elif PLACEHOLDER.search(template):
            texts.append(template)
        else:
            read_template_file(template, texts, descriptions)
    if wrong := [text for text in texts if not PLACEHOLDER.search(text)]:
        raise ValueError(f"a template needs a {{}} for the label: {wrong[0]!r}")
    if unknown := [found for text in texts for found in re.findall(r"\{\w*\}", PLACEHOLDER.sub("", text))]:
        raise ValueError(f"a template has {{}}, {{c}} or {{an}} for the label, not {unknown[0]}")
    return Prompts(tuple(dict.fromkeys(texts)), descriptions, ", ".join(templates)[:200])


def read_template_file(name: str, texts: list[str], descriptions: dict[str, list[str]]) -> None:
    """Append the templates of a text file or a JSON list, or the texts by label of a JSON object."""
    path = Path(name).expanduser()
    if not path.is_file():
        expected = "a text with {}, a file of templates, openai, simple or default"
        raise ValueError(f"--template {name!r} is neither a file nor a template; expected {expected}")
    if path.suffix.lower() != ".json":
        texts += read_text_lines(path)
        return
    values = read_json_file(path)
    if isinstance(values, list) and values and all(isinstance(text, str) for text in values):
        texts += values
        return
    values = {label: [text] if isinstance(text, str) else text for label, text in _items(values)}
    is_valid = all(isinstance(of, list) and of and all(isinstance(text, str) for text in of) for of in values.values())
    if not values or not is_valid:
        raise ValueError(f'{path} must be a list of templates, or an object {{"label": ["text", …], …}}')
    for label, of_label in values.items():
        descriptions.setdefault(label, []).extend(of_label)


def parse_labels(text: str) -> list[str]:
    """From --labels: cat,dog,… or a file with one label per line (or a JSON list), or `imagenet` of open_clip."""
    path = Path(text).expanduser()
    if text == "imagenet":
        labels = list(open_clip_metadata("IMAGENET_CLASSNAMES", "--labels imagenet"))
    elif "," not in text and (path.is_file() or path.suffix.lower() in (".txt", ".json")):
        if not path.is_file():
            raise FileNotFoundError(f"--labels: there is no file {path}")
        labels = read_label_file(path)
    else:
        labels = [label.strip() for label in text.split(",") if label.strip()]
    return check_labels(labels)


def read_label_file(path: Path) -> list[str]:
    if path.suffix.lower() != ".json":
        return read_text_lines(path)
    values = read_json_file(path)
    labels = values if isinstance(values, list) else [name for _, name in _items(values)]
    if not all(isinstance(label, str) and label.strip() for label in labels):
        raise ValueError(f"{path} must be a list of labels")
    return [label.strip() for label in labels]


def check_labels(labels: Sequence[str]) -> list[str]:
    """At least two labels, each once and of bounded length."""
    if len(labels) < 2:
        given = f"only {labels[0]!r} is given" if labels else "none is given"
        given += ", and there is no such file" if labels and Path(str(labels[0])).suffix else ""
        raise ValueError(f"labels must be at least two, and {given}: with one there is nothing to choose")
    if len(labels) > MAX_LABELS or max(len(str(label)) for label in labels) > MAX_LABEL_LENGTH:
        raise ValueError(f"labels must be at most {MAX_LABELS:,}, each of at most {MAX_LABEL_LENGTH} characters")
    seen = dict[str, str]()
    for label in labels:
        if not isinstance(label, str) or not label.strip():
            raise ValueError(f"a label must be text, not {label!r}")
        if first := seen.get(label_key(label)):
            raise ValueError(f"label {label!r} is given twice" + ("" if first == label else f", also as {first!r}"))
        seen[label_key(label)] = label
    return list(labels)


def label_key(label: str) -> str:
    """Equal for equal labels, whatever their case, spaces and underscores: golden_retriever is Golden retriever."""
    return " ".join(label.replace("_", " ").split()).lower()


def read_text_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    data = read_file(path, MAX_FILE_BYTES)
    try:
        text = data.decode("utf-16" if data[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    if "\0" in text:
        raise ValueError(f"{path} is not a text file")
    lines = text.splitlines()
    if not (lines := [line.strip() for line in lines if line.strip()]):
        raise ValueError(f"{path} has no lines")
    return lines


def read_json_file(path: Path) -> Any:
    try:
        return parse_json(read_file(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _items(values: Any) -> list[tuple[str, Any]]:
    """The entries of an object, those with numbers as keys in their order: {"0": "cat", "1": "dog"}."""
    if not isinstance(values, dict):
        return []
    is_numbered = bool(values) and all(key.isdecimal() and len(key) < 10 for key in values)
    return sorted(values.items(), key=lambda item: int(item[0])) if is_numbered else list(values.items())


def open_clip_metadata(name: str, flag: str) -> Any:
    if find_spec("open_clip") is None:
        raise ValueError(f"{flag} is of open_clip, which is not installed: pip install 'm1clip[openclip]'")
    from open_clip import zero_shot_metadata  # imports torch

    return getattr(zero_shot_metadata, name)
