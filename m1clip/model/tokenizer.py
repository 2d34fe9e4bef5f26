"""Captions to token ids: single characters, BPE learned from the captions, or OpenAI's CLIP vocabulary.

All three are a `tokenizer.json` of the tokenizers library; the start and end tokens are added here. No torch.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from gzip import GzipFile
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from pathlib import Path
from string import ascii_lowercase, punctuation
from typing import Any, Self

import numpy as np
import orjson
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers

from m1clip.config import ModelConfig, TextConfig, TokenizerSettings, require
from m1clip.errors import untrusted_input
from m1clip.files import read_file, read_json
from m1clip.format import unescape_html
from m1clip.targets import OPENAI_VOCAB_SIZE

PAD, START, END, UNK = "<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|unknown|>"
# Padded lengths. Only a few, because MPS compiles a graph for each new shape; beyond is the context length.
BUCKETS = (8, 16, 24, 32, 48, 64, 128, 256)
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"  # of OpenAI
CLIP_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
CLIP_MERGES = 49152 - 256 - 2  # OpenAI's file has more; CLIP uses these
TOKENIZER_BYTES = 48_000_000  # Gemma's tokenizer.json, the largest in use, has 34 MB
VOCABULARY_BYTES = 16_000_000  # of a CLIP vocabulary, uncompressed; OpenAI's has 3.2 MB
BPE_CAPTIONS = 50_000  # captions that BPE is learned from
BPE_BYTES = 32_000_000  # of them, at most
LONG_WORD = re.compile(r"(\S{256})\S+")  # the time of training BPE grows with the square of a word's length
PROBE, PROBE_TOKENS = "a photo of a cat", 1_000  # a text, and the most tokens it may become
TokenArray = NDArray[np.int64]


class Tokenizer:
    settings = TokenizerSettings(clip_tokens=True)

    def __init__(self, core: tokenizers.Tokenizer, settings: TokenizerSettings | None = None):
        core.no_padding()
        core.no_truncation()
        self.core, self.settings = core, settings or self.settings
        start, end = core.token_to_id(START), core.token_to_id(END)
        if start is None or end is None:
            raise ValueError(f"the tokenizer has no {START} or no {END}")
        self.start_id, self.end_id = start, end

    @classmethod
    def characters(cls) -> "Tokenizer":
        """33 tokens: pad, start, end, unknown, 26 letters, space, full stop, comma."""
        symbols = [PAD, START, END, UNK, *ascii_lowercase, " ", ".", ","]
        core = tokenizers.Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, UNK))
        steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        core.normalizer = normalizers.Sequence(steps)
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return cls(core)

    @classmethod
    def train_bpe(cls, captions: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Byte-level BPE, so that no text has unknown tokens."""
        core = tokenizers.Tokenizer(models.BPE())
        core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < len(alphabet) + 3:
            raise ValueError(f"BPE needs a vocab_size of at least {len(alphabet) + 3}, not {vocab_size}")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False
        )
        core.train_from_iterator(training_texts(captions), trainer)
        return cls.from_state(json.loads(core.to_str()))

    @classmethod
    def from_clip_vocabulary(cls, path: Path) -> "Tokenizer":
        """OpenAI's tokenizer from its `bpe_simple_vocab_16e6.txt.gz`."""
        try:
            data = read_file(path, VOCABULARY_BYTES)
            if path.suffix == ".gz":
                data = GzipFile(fileobj=BytesIO(data)).read(VOCABULARY_BYTES + 1)
            require(len(data) <= VOCABULARY_BYTES, f"it expands to more than {VOCABULARY_BYTES / 1e6:.0f} MB")
            lines = data.decode().split("\n", CLIP_MERGES + 1)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise ValueError(f"cannot read {path} as a CLIP vocabulary: {error}") from None
        merges = [tuple(line.split()) for line in lines[1 : CLIP_MERGES + 1]]  # after a version line
        if not merges or any(len(merge) != 2 for merge in merges):
            raise ValueError(f"{path} is not a CLIP vocabulary: a version line, then two symbols per line")
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
        symbols = letters + [s + "</w>" for s in letters] + ["".join(m) for m in merges] + [START, END]
        vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
        core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))  # type: ignore[arg-type]
        core.normalizer = normalizers.Lowercase()
        words = pre_tokenizers.Split(Regex(CLIP_WORDS), "removed", invert=True)
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
        return cls(core)

    @classmethod
    def load(cls, path: Path, *options: Any) -> Self:
        state = read_json(path, TOKENIZER_BYTES)
        with untrusted_input(f"{path} is not a tokenizer"):
            return cls(build_core(state), *options)

    @classmethod
    def from_clip_json(cls, path: Path) -> "Tokenizer":
        """The tokenizer.json of a CLIP of another library, which adds start and end tokens by itself."""
        state = read_json(path, TOKENIZER_BYTES)
        with untrusted_input(f"{path} is not the tokenizer of a CLIP"):
            vocab, added = state["model"]["vocab"], state.get("added_tokens") or []
            vocab |= {token["content"]: token["id"] for token in added if token["content"] in (START, END)}
            return cls(build_core({**state, "added_tokens": [], "post_processor": None}))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Tokenizer":
        """Without added tokens, so that "<|endoftext|>" in a caption is ordinary text."""
        return cls(tokenizers.Tokenizer.from_str(json.dumps({**state, "added_tokens": []})))

    def to_clip_json(self) -> dict[str, Any]:
        """A tokenizer.json for other libraries: it adds start and end tokens, and cleans white space."""
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        ids = [(START, self.start_id), (END, self.end_id)]
        white_space = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        core.normalizer = normalizers.Sequence([*white_space, core.normalizer])
        core.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ids)
        return json.loads(core.to_str())

    def save(self, path: Path) -> None:
        path.write_text(self.core.to_str(pretty=True), encoding="utf-8")  # its own save() raises no OSError

    def __len__(self) -> int:
        return self.core.get_vocab_size()

    @property
    def is_openai(self) -> bool:
        """Whether it has OpenAI's vocabulary."""
        return len(self) == OPENAI_VOCAB_SIZE and self.core.token_to_id(END) == OPENAI_VOCAB_SIZE - 1

    @property
    def highest_id(self) -> int:
        return max(self.core.get_vocab().values(), default=0)

    def __call__(self, texts: Sequence[str], length: int) -> TokenArray:
        """Padded ids (B, L) of at most `length` tokens."""
        for i, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"text {i} is empty: {text!r}")
        return self.pad(self.encode(texts, length), length)

    def encode(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Ids of each text, start and end included; too long ones are truncated and keep their end."""
        return [ids if len(ids) <= length else [*ids[: length - 1], ids[-1]] for ids in self.encode_full(texts)]

    def encode_full(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.start_id, *ids, self.end_id] for ids in self.encode_cleaned([clean(text) for text in texts])]

    def encode_cleaned(self, texts: list[str]) -> Iterator[list[int]]:
        with untrusted_input("the tokenizer cannot encode a text"):
            encodings = self.core.encode_batch_fast(texts)
        return (encoding.ids for encoding in encodings)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text before truncation, start and end included."""
        return [len(ids) for ids in self.encode_full(texts)]

    def pad(self, ids: Sequence[Sequence[int] | NDArray[np.int32]], length: int) -> TokenArray:
        """(B, L), where L is the smallest bucket that holds the longest text."""
        longest, settings = max(map(len, ids), default=0), self.settings
        buckets = () if settings.fixed_length else BUCKETS
        width = next((bucket for bucket in buckets if longest <= bucket < length), length)
        padded_BL = np.full((len(ids), width), settings.pad_id, np.int64)
        for row_L, text_ids in zip(padded_BL, ids, strict=True):
            start = width - len(text_ids) if settings.pad_left else 0
            row_L[start : start + len(text_ids)] = text_ids
        return padded_BL


class HFTokenizer(Tokenizer):
    """The tokenizer of another encoder, such as BERT, which adds special tokens by itself."""

    def __init__(self, core: tokenizers.Tokenizer, settings: TokenizerSettings):
        core.no_padding()
        core.no_truncation()
        self.core, self.settings = core, settings

    def encode_full(self, texts: Sequence[str]) -> list[list[int]]:
        clean_text, zeroed = CLEANERS[self.settings.clean], self.settings.zeroed_id
        all_ids = self.encode_cleaned([clean_text(text) for text in texts])
        return [[0 if id_ == zeroed else id_ for id_ in ids] for ids in all_ids]


def load_tokenizer(config: ModelConfig, path: Path) -> Tokenizer:
    if isinstance(config.text, TextConfig):
        return Tokenizer.load(path)
    settings = config.text.tokenizer
    return (Tokenizer if settings.clip_tokens else HFTokenizer).load(path, settings)


def build_core(state: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that a tokenizer.json describes, once its bounds are checked."""
    from m1clip.model.tokenizer_check import check_tokenizer_state  # training from scratch needs none of it

    check_tokenizer_state(state)
    if "dropout" in state["model"]:  # the same text would get other tokens each time
        state = {**state, "model": {**state["model"], "dropout": None}}
    # From what was checked, not from the file: two parsers may read the same file differently.
    core = tokenizers.Tokenizer.from_buffer(orjson.dumps({**state, "padding": None, "truncation": None}))
    length = len(core.encode(PROBE).ids)
    require(length <= PROBE_TOKENS, f"it turns {PROBE!r} into {length:,} tokens")
    return core


def training_texts(captions: Iterable[str]) -> Iterator[str]:
    """The captions that BPE is learned from, with words of bounded length."""
    size = 0
    for caption in islice(captions, BPE_CAPTIONS):
        text = LONG_WORD.sub(r"\1", clean(caption))
        size += len(text.encode())
        if size > BPE_BYTES:
            return
        yield text


def make_tokenizer(kind: str, captions: Iterable[str], vocab_size: int) -> Tokenizer:
    check_tokenizer(kind)
    if kind == "char":
        return Tokenizer.characters()
    if kind == "bpe":
        return Tokenizer.train_bpe(captions, vocab_size)
    return Tokenizer.from_clip_vocabulary(find_openai_vocabulary() if kind == "openai" else Path(kind))


def find_clip_tokenizer(path: Path, tokenizer: str) -> Tokenizer:
    """CLIP's: from the given vocabulary, from beside the weights, or OpenAI's from an installed open_clip."""
    if tokenizer not in ("", "bpe", "char", "openai"):
        return Tokenizer.from_clip_vocabulary(Path(tokenizer))
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_clip_json(folder / "tokenizer.json")
    for file in (folder / "merges.txt", folder / VOCABULARY, *installed_vocabularies()):
        if file.is_file():
            return Tokenizer.from_clip_vocabulary(file)
    files = f"tokenizer.json, merges.txt or {VOCABULARY}"
    raise FileNotFoundError(f"{path} has no tokenizer; put {files} beside it, or use --tokenizer FILE")


def installed_vocabularies() -> list[Path]:
    """OpenAI's vocabulary in an installed open_clip."""
    package = find_spec("open_clip")
    folders = (package and package.submodule_search_locations) or ()
    return [path for path in (Path(folder) / VOCABULARY for folder in folders) if path.is_file()]


def find_openai_vocabulary() -> Path:
    if found := installed_vocabularies():
        return found[0]
    raise ValueError("OpenAI's CLIP vocabulary comes with open_clip: pip install 'm1clip[openclip]'")


def is_clip_vocabulary(kind: str) -> bool:
    """Whether --tokenizer names OpenAI's vocabulary or one like it."""
    return kind not in ("char", "bpe")


def check_tokenizer(kind: str) -> None:
    if kind == "openai":
        find_openai_vocabulary()
    elif is_clip_vocabulary(kind) and not Path(kind).is_file():
        raise ValueError(f"tokenizer must be bpe, char, openai or a CLIP vocabulary; there is no file {kind!r}")


def clean(text: str) -> str:
    """Fix encodings, HTML entities and white space, and lower the case, as OpenAI's CLIP does."""
    return clean_white_space(text).lower()  # in Python, because Rust lowers a final sigma differently


def clean_white_space(text: str) -> str:
    if not (text.isascii() and text.isprintable() and "&" not in text):
        import ftfy  # slow to import, and most captions do not need it

        text = unescape_html(ftfy.fix_text(text))
    return " ".join(text.split())


def strip_punctuation(text: str) -> str:
    return " ".join(text.lower().translate(str.maketrans("", "", punctuation)).split())


CLEANERS: dict[str, Callable[[str], str]] = {
    "none": str,
    "lower": clean,
    "whitespace": clean_white_space,
    "canonicalize": lambda text: strip_punctuation(clean_white_space(text).replace("_", " ")),
    "strip_punctuation": strip_punctuation,
}
