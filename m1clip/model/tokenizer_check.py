"""Bounds of a tokenizer.json from outside, checked before the tokenizers library builds anything from it.

The library trusts the file: a regex may backtrack for hours (in Rust, where Ctrl-C is not seen) or panic, and a
normalizer may turn a caption into gigabytes.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from m1clip.config import require

MAX_STEPS = 64  # normalizers, pre-tokenizers and post-processors together
MAX_ITEMS = 1_000  # of a list in a step
MAX_TEXT = 64  # characters that a step may insert
MAX_GROWTH = 64  # of a text by all steps together
MAX_IDS = 64  # special tokens that a step adds
MAX_WORD = 1_000  # max_input_chars_per_word of WordPiece, which takes quadratic time; BERT's is 100
MAX_REGEX, MAX_REPEATS, MAX_CHOICES, MAX_DEGREE, MAX_DEPTH = 4_000, 1_000, 128, 1, 16
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_tokenizer_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError for a tokenizer.json whose steps could take unbounded time or memory."""
    growth, steps = 1.0, [step for part in PARTS for step in iterate_steps(state.get(part))]
    require(len(steps) <= MAX_STEPS, f"it has more than {MAX_STEPS} steps")
    for step in steps:
        kind = step.get("type")
        texts = [str(step.get(key) or "") for key in ("prepend", "content", "replacement")]
        require(max(map(len, texts)) <= MAX_TEXT, f"{kind} inserts more than {MAX_TEXT} characters")
        growth *= step_growth(step)
    require(growth <= MAX_GROWTH, f"its steps could make a text more than {MAX_GROWTH} times as long")
    check_core(state["model"])


def check_core(model: Mapping[str, Any]) -> None:
    affixes = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    require(all(len(str(model.get(key) or "")) <= MAX_TEXT for key in affixes), "its model inserts a long text")
    check_merges(model)
    longest = model.get("max_input_chars_per_word") or 0
    require(isinstance(longest, int) and longest <= MAX_WORD, f"max_input_chars_per_word is above {MAX_WORD:,}")


def check_merges(model: Mapping[str, Any]) -> None:
    """The library cuts the prefix off the second part of a merge without looking: it may cut a letter in two."""
    prefix = model.get("continuing_subword_prefix")
    if not prefix or not isinstance(model.get("merges"), list):
        return
    seconds = [merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] for merge in model["merges"]]
    is_prefix = str(prefix).isascii() and all(str(second).startswith(str(prefix)) for second in seconds)
    require(is_prefix, "its merges do not begin with its continuing_subword_prefix")


def iterate_steps(part: Any) -> Iterator[dict[str, Any]]:
    """Every dict with a type in a component of a tokenizer: a step, or a sequence of steps."""
    if isinstance(part, dict):
        if "type" in part:
            yield part
        part = list(part.values())
    require(not isinstance(part, list) or len(part) <= MAX_ITEMS, f"a step of it has more than {MAX_ITEMS:,} entries")
    for item in part if isinstance(part, list) else ():
        yield from iterate_steps(item)


def step_growth(step: Mapping[str, Any]) -> float:
    """How many times as long a step can make a text."""
    kind, pattern, width = step.get("type"), step.get("pattern"), 1
    if isinstance(pattern, dict):
        regex, text = pattern.get("Regex"), pattern.get("String")
        width = check_regex(regex) if isinstance(regex, str) else len(str(text or ""))
    if kind == "Replace":
        inserted = len(str(step.get("content") or ""))
        return max(1.0, inserted / width) if width else 1.0 + inserted
    if kind == "Precompiled":
        check_charsmap(str(step.get("precompiled_charsmap") or ""))
    if kind == "TemplateProcessing":
        return check_template(step)
    return 2.0 if kind == "ByteLevel" else 1.0  # a byte above 127 becomes a letter of two bytes


def check_template(step: Mapping[str, Any]) -> float:
    """The number of times that a template repeats the text."""
    single, special = step.get("single") or [], step.get("special_tokens") or {}
    require(isinstance(single, list) and isinstance(special, dict), "TemplateProcessing is malformed")
    added = [len(token.get("ids") or ()) for token in special.values() if isinstance(token, dict)]
    require(len(single) * max(added, default=1) <= MAX_IDS, f"TemplateProcessing adds more than {MAX_IDS} tokens")
    return max(1.0, sum(isinstance(piece, dict) and "Sequence" in piece for piece in single))


def check_charsmap(charsmap: str) -> None:
    """A sentencepiece normalizer: the size of a trie (Darts), the trie, and the texts it inserts, ended by zeros.

    The library follows the trie without looking: an offset that leaves it is a panic.
    """
    data = base64.b64decode(charsmap)
    end = 4 + int.from_bytes(data[:4], "little")
    require(4 < end <= len(data) and end % 4 == 0, "Precompiled has no trie")
    units, texts = np.frombuffer(data[4:end], "<u4").astype(np.int64), data[end:]
    require(max(map(len, texts.split(b"\0"))) <= 4 * MAX_TEXT, f"Precompiled inserts more than {MAX_TEXT} characters")
    inner = units >> 31 == 0
    inner[0] = True
    children = (np.arange(len(units)) ^ (units >> 10 << ((units & 512) >> 6)))[inner]
    require(bool((children | 255).max() < len(units)), "Precompiled has offsets outside of its trie")
    starts = units[children[units[inner] >> 8 & 1 == 1]] & 2**31 - 1
    is_letter = np.frombuffer(texts + b"\0", np.uint8) & 0xC0 != 0x80  # the first byte of one
    require(bool(np.all(starts <= len(texts)) and is_letter[starts].all()), "Precompiled has no text at an offset")


class Part(NamedTuple):
    """What a part of a regex can cost: at each position of a text it is tried choices * length ** degree times."""

    width: int = 1  # of the shortest match
    choices: int = 1
    unbounded: int = 0  # quantifiers * + {n,}
    degree: int = 0  # those before something that can fail, so that each length is tried
    repeats: int = 1
    can_fail: bool = True


# Oniguruma's syntax, without back-references, recursion, absent operators, callouts and comments.
REGEX_TOKEN = re.compile(
    r"""\\(?:[pP]\{\^?[\w\ ]+\}|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^0-9gkKXRyYcCMNOpPxu])
    |(?P<option>\(\?i\))|(?P<open>\((?:\?(?:i?:|[=!>]|<[=!]))?(?![?*]))|(?P<close>\))|(?P<or>\|)|(?P<class>\[\^?(?!\]))
    |(?P<repeat>[*+?][+?]?|\{(?=\d|,\d)(?P<low>\d{0,6})(?P<comma>,?)(?P<high>\d{0,6})\}\??)|[^\\()|*+?\[]""",
    re.VERBOSE | re.DOTALL,
)
CLASS_TOKEN = re.compile(r"\\(?:[pP]\{[^}]*\}|.)|\[:\^?\w+:\]|(?P<open>\[\^?(?!\]))|(?P<close>\])|[^\[\]\\]", re.DOTALL)
QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
ZERO_WIDTH = {"^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G"}


def check_regex(pattern: str) -> int:
    """The length of the shortest match; ValueError if the pattern could backtrack more than quadratically."""
    shown = repr(pattern if len(pattern) <= 60 else pattern[:60] + "…")
    require(len(pattern) <= MAX_REGEX, f"the regular expression {shown} has more than {MAX_REGEX:,} characters")
    parser = RegexParser(pattern)
    part = parser.alternatives()
    require(parser.position == len(pattern), f"the regular expression {shown} is not supported")
    max_choices = MAX_CHOICES if part.degree == 0 else MAX_CHOICES // 2  # GPT-4o's has 40
    slow = part.choices > max_choices or part.degree > MAX_DEGREE or part.repeats * part.choices > MAX_REPEATS
    require(not slow, f"the regular expression {shown} could take very long")
    return part.width


@dataclass
class RegexParser:
    pattern: str
    position: int = 0
    depth: int = 0

    def alternatives(self) -> Part:
        """Up to the end of a group, or of the pattern."""
        branches = [self.sequence()]
        while self.pattern.startswith("|", self.position):
            self.position += 1
            branches.append(self.sequence())
        width, choices, unbounded, degree, repeats, can_fail = zip(*branches, strict=True)
        return Part(min(width), sum(choices), max(unbounded), max(degree), max(repeats), all(can_fail))

    def sequence(self) -> Part:
        parts: list[Part] = []
        can_repeat = False
        while token := REGEX_TOKEN.match(self.pattern, self.position):
            if token["or"] or token["close"]:
                break
            if token["repeat"]:
                require(can_repeat, "a regular expression has a quantifier without a character or group")
                parts.append(repeat(parts.pop(), token))
                self.position = token.end()
            else:
                parts.append(self.item(token))
            can_repeat = not token["repeat"]
        whole = Part(0, can_fail=False)
        for part in reversed(parts):
            whole = Part(
                part.width + whole.width,
                part.choices * whole.choices,
                part.unbounded + whole.unbounded,
                (part.unbounded if whole.can_fail else part.degree) + whole.degree,
                max(part.repeats, whole.repeats),
                part.can_fail or whole.can_fail,
            )
        return whole

    def item(self, token: re.Match[str]) -> Part:
        """One character, class or group."""
        self.position = token.end()
        if token["class"]:
            return self.character_class()
        if not token["open"]:
            return Part(0 if token[0] in ZERO_WIDTH or token["option"] else 1, can_fail=not token["option"])
        self.depth += 1
        require(self.depth <= MAX_DEPTH, f"a regular expression has more than {MAX_DEPTH} groups in groups")
        inner = self.alternatives()
        self.depth -= 1
        require(self.pattern.startswith(")", self.position), "a regular expression has a group without end")
        self.position += 1
        return inner._replace(width=0, can_fail=True) if token[0][2:3] in ("=", "!", "<") else inner

    def character_class(self) -> Part:
        """After its opening bracket; classes may contain classes."""
        depth = 1
        while depth:
            token = CLASS_TOKEN.match(self.pattern, self.position)
            if token is None:
                raise ValueError("a regular expression has a character class that is not supported")
            self.position = token.end()
            depth += bool(token["open"]) - bool(token["close"])
        return Part()


def repeat(part: Part, token: re.Match[str]) -> Part:
    """A part with a quantifier. What is repeated must match in one way only, or the ways multiply."""
    low, high = QUANTIFIERS.get(token["repeat"][0], (0, 0))
    if token["repeat"][0] == "{":
        low = int(token["low"] or 0)
        high = int(token["high"]) if token["high"] else None if token["comma"] else low
    if high != 1:
        require(part.choices == 1 and not part.unbounded, "a regular expression repeats a group with choices")
    count = (low if high is None else high) or 1
    choices = 1 if high is None else max(1, (high - low + 1) * part.choices if high > 1 else high - low + part.choices)
    unbounded = part.unbounded + (high is None)
    return Part(low * part.width, choices, unbounded, part.degree, max(1, part.repeats * count), low > 0)
