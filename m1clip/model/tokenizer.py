"""Captions to token ids: letters, BPE learned from the captions, or OpenAI's CLIP vocabulary.

All three are one `tokenizer.json` of the `tokenizers` library; start and end are added here.
"""

import gzip
import html
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

PAD, START, END, UNKNOWN = "<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|unknown|>"
LETTERS = [*ascii_lowercase, " ", ".", ","]
# Few lengths, because on MPS each new shape compiles a graph of its own; the last is the model's own.
BUCKETS = (8, 16, 24, 32, 48, 64)
CLIP_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""


class Tokenizer:
    pad_id = 0

    def __init__(self, core: tokenizers.Tokenizer):
        self.core = core
        start, end = core.token_to_id(START), core.token_to_id(END)
        if start is None or end is None:
            raise ValueError(f"the tokenizer has no {START} or no {END}")
        self.start_id, self.end_id = start, end

    @classmethod
    def characters(cls) -> "Tokenizer":
        """The seeds' 33 symbols: three marks, unknown, 26 letters, space, full stop, comma."""
        symbols = [PAD, START, END, UNKNOWN, *LETTERS]
        core = tokenizers.Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, UNKNOWN))
        core.normalizer = normalizers.Sequence(
            [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        )
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return cls(core)

    @classmethod
    def learned(cls, captions: Iterable[str], vocab: int, most: int = 50_000) -> "Tokenizer":
        """BPE over bytes, so nothing is unknown; learned from the first `most` captions."""
        core = tokenizers.Tokenizer(models.BPE())
        core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab < len(alphabet) + 3:
            raise ValueError(f"a BPE vocabulary needs {len(alphabet) + 3} tokens or more, not {vocab}")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[PAD, START, END],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        core.train_from_iterator(map(clean, islice(captions, most)), trainer)
        return cls.from_state(json.loads(core.to_str()))

    @classmethod
    def clip(cls, path: Path) -> "Tokenizer":
        """OpenAI's tokenizer from its `bpe_simple_vocab_16e6.txt.gz`."""
        merges = _read_merges(path)
        letters = _byte_letters()
        symbols = letters + [s + "</w>" for s in letters] + ["".join(m) for m in merges] + [START, END]
        core = tokenizers.Tokenizer(
            models.BPE({s: i for i, s in enumerate(symbols)}, merges, end_of_word_suffix="</w>")
        )
        core.normalizer = normalizers.Lowercase()
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(CLIP_WORDS), "removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return cls(core)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer of ours: {error}") from None

    @classmethod
    def borrowed(cls, path: Path) -> "Tokenizer":
        """A CLIP's tokenizer.json from elsewhere, without the marks that it would add by itself."""
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            vocab, added = state["model"]["vocab"], state.get("added_tokens") or []
            vocab |= {one["content"]: one["id"] for one in added if one["content"] in (START, END)}
            return cls.from_state({**state, "post_processor": None, "padding": None, "truncation": None})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no tokenizer of a CLIP: {error}") from None

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Tokenizer":
        """Where a caption that spells out "<|endoftext|>" cannot end itself."""
        return cls(tokenizers.Tokenizer.from_str(json.dumps({**state, "added_tokens": []})))

    def with_marks(self) -> dict[str, Any]:
        """Its tokenizer.json for other libraries, which expect it to add start and end by itself."""
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        ids = [(START, self.start_id), (END, self.end_id)]
        tidy = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]  # as `clean` does
        core.normalizer = normalizers.Sequence([*tidy, core.normalizer])
        core.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ids)
        state: dict[str, Any] = json.loads(core.to_str())
        return state

    def save(self, path: Path) -> None:
        self.core.save(str(path))

    def __len__(self) -> int:
        return self.core.get_vocab_size()

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, start and end included, before any cut."""
        return [len(one) for one in self.ids(texts)]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Of each text, start and end included."""
        found = self.core.encode_batch_fast([clean(text) for text in texts])
        return [[self.start_id, *one.ids, self.end_id] for one in found]

    def shortened(self, ids: list[int], length: int) -> list[int]:
        """Cut to what the model reads, the end kept."""
        return ids if len(ids) <= length else [*ids[: length - 1], self.end_id]

    def __call__(self, texts: Sequence[str], length: int, rows: Sequence[str] | None = None) -> Tensor:
        """Ids (B, L): L is the smallest bucket that holds the longest text; too long is cut, end kept.

        `rows` names where each text came from, for the message when one is empty.
        """
        for i, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"empty caption in {rows[i] if rows else f'text {i}'}: {text!r}")
        return self.padded(self.cut(texts, length), length)

    def cut(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Ids of each text, as many as the model reads."""
        return [self.shortened(one, length) for one in self.ids(texts)]

    def padded(self, ids: Sequence[Sequence[int] | NDArray[np.int32]], length: int) -> Tensor:
        longest = max(map(len, ids))
        width = next((bucket for bucket in BUCKETS if longest <= bucket < length), length)
        padded = np.full((len(ids), width), self.pad_id, np.int64)
        for row_L, one in zip(padded, ids, strict=True):
            row_L[: len(one)] = one
        return torch.from_numpy(padded)


class HFTokenizer(Tokenizer):
    """One that adds its own marks and cleans by its own rules, as those of BERT and its kin do."""

    def __init__(self, core: tokenizers.Tokenizer, pad_id: int):
        core.no_padding()
        core.no_truncation()
        self.core, self.pad_id = core, pad_id

    @classmethod
    def load_for(cls, path: Path, pad_id: int) -> "HFTokenizer":
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), pad_id)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer: {error}") from None

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self.core.encode_batch_fast(list(texts))]

    def shortened(self, ids: list[int], length: int) -> list[int]:
        return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


def make(kind: str, captions: Iterable[str], vocab: int) -> Tokenizer:
    """What `--tokenizer` means."""
    require(kind)
    if kind == "char":
        return Tokenizer.characters()
    if kind == "bpe":
        return Tokenizer.learned(captions, vocab)
    return Tokenizer.clip(Path(kind))


def require(kind: str) -> None:
    if kind not in ("char", "bpe") and not Path(kind).is_file():
        raise ValueError(
            f"tokenizer must be bpe, char or the path of a CLIP vocabulary; there is no file {kind!r}"
        )


def clean(text: str) -> str:
    """Mend what the web does to captions (encodings, HTML entities, odd spaces), as OpenAI's CLIP does."""
    if not (text.isascii() and text.isprintable() and "&" not in text):
        import ftfy  # slow to import, and most captions do not need it

        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()  # Python's rules: Rust's differ on a final sigma


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as a CLIP vocabulary: {error}") from None
    # The file has a version line first, and more merges than the 49,152 - 256 - 2 that CLIP uses.
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise ValueError(
            f"{path} is not a CLIP vocabulary: a version line, then two symbols a line, was expected"
        )
    return merges  # type: ignore[return-value]


def _byte_letters() -> list[str]:
    """A visible letter for each of the 256 bytes, in the order of OpenAI's table."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) for byte in visible] + [chr(256 + i) for i in range(len(hidden))]
