"""Untrusted model folders and files; as a program, a table of what each costs in time and memory."""

import gzip
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|unknown|>", *"abcdefghijklmnopqrstuvwxyz"]
TINY = {
    "vision": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "heads": 2},
    "text": {"vocab_size": 64, "context_length": 16, "width": 32, "layers": 1, "heads": 2},
    "embed_dim": 24,
}
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
DUAL = {"model_type": "siglip", "vision_config": {**SIGLIP, "image_size": 32, "patch_size": 16}}
DUAL |= {"text_config": {**SIGLIP, "vocab_size": 64, "max_position_embeddings": 16}}
BERT = {"model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


VIT = {"image_size": 32, "patch_size": 16, "width": 32, "head_width": 16, "layers": 1, "no_ln_pre": True}
HF_VALUES = [("num_hidden_layers", 10**7), ("hidden_size", 2**40), ("hidden_size", "32"), ("hidden_size", [32])]
HF_VALUES += [("num_labels", 10**8), ("hidden_size", 2**23), ("num_attention_heads", 0), ("hidden_size", None)]
OPEN_CLIP_VALUES = [("layers", 10**7), ("width", 2**40), ("width", 2**20), ("layers", "9"), ("image_size", 10**9)]
OPEN_CLIP_VALUES += [("patch_size", 0), ("width", None), ("timm_model_name", "hf-hub:some/one")]


def tokenizer_state(**changes: Any) -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<|unknown|>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **parts, "added_tokens": [], "model": model, **changes}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(kind: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def template(pieces: int, ids: int) -> dict[str, Any]:
    special = {"x": {"id": "x", "ids": [1] * ids, "tokens": ["x"] * ids}}
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}, *[{"Sequence": {"id": "A", "type_id": 0}}] * pieces]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


# What is written as tokenizer.json: a state, or text.
TOKENIZERS: dict[str, Callable[[], dict[str, Any] | str]] = {
    "60 MB": lambda: " " * 49_000_000,
    "5 million lists": lambda: '{"normalizer": [' + "[]," * 5_000_000 + "0]}",
    "nested": lambda: nested(200_000),
    "prepends 10 MB": lambda: tokenizer_state(normalizer={"type": "Prepend", "prepend": "a" * 10_000_000}),
    "doubles 40 times": lambda: tokenizer_state(normalizer=sequence("normalizers", [replace("a", "aa")] * 40)),
    "bytes of bytes": lambda: tokenizer_state(
        pre_tokenizer=sequence(
            "pretokenizers",
            [{"type": "ByteLevel", "add_prefix_space": True, "use_regex": False, "trim_offsets": True}] * 40,
        )
    ),
    "template repeats": lambda: tokenizer_state(post_processor=template(100_000, 1)),
    "template inserts": lambda: tokenizer_state(post_processor=template(1, 200_000)),
    "exponential regex": lambda: tokenizer_state(pre_tokenizer=split(r"([a-z ]|[a-z ])+(?=[^a-z ])")),
    "optional regex": lambda: tokenizer_state(pre_tokenizer=split("[a-z ]?" * 30 + "(?<=Q)")),
    "cubic regex": lambda: tokenizer_state(pre_tokenizer=split(r"[\s\S]*[\s\S]*(?<=Q)")),
    "large regex": lambda: tokenizer_state(pre_tokenizer=split("((((a{1000}){1000}){1000}){1000})b")),
    "pads to 2^40": lambda: tokenizer_state(
        padding={
            "strategy": {"Fixed": 2**40},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
    ),
    "ids of 2^31": lambda: tokenizer_state(
        model={"type": "WordLevel", "vocab": {w: i + 2**31 for i, w in enumerate(WORDS)}, "unk_token": "<|unknown|>"}
    ),
    "trie of no units": lambda: tokenizer_state(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA" * 9}),
    "trie with an exit": lambda: tokenizer_state(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAQAAP" + "/" * 1398}
    ),
    "prefix cuts a letter": lambda: tokenizer_state(
        model={
            "type": "BPE",
            "vocab": {"é": 0, "<|startoftext|>": 1, "<|endoftext|>": 2},
            "merges": [["é", "é"]],
            "continuing_subword_prefix": "#",
        }
    ),
}
TOO_DEEP = {**TINY, "text": {**TINY["text"], "layers": 10**7}}
CONFIGS: dict[str, str] = {
    "10^7 layers": json.dumps(TOO_DEEP),
    "10^5 layers": json.dumps({**TINY, "vision": {**TINY["vision"], "layers": 10**5}}),
    "embed 2^70": json.dumps({**TINY, "embed_dim": 2**70}),
    "embed 2^40": json.dumps({**TINY, "embed_dim": 2**40}),
    "image of 10^9": json.dumps({**TINY, "vision": {**TINY["vision"], "image_size": 16 * 10**8}}),
    "crop 1e-9": json.dumps({**TINY, "vision": {**TINY["vision"], "crop_pct": 1e-9}}),
    "NaN": json.dumps({**TINY, "vision": {**TINY["vision"], "mean": [float("nan")] * 3}}),
    "1e999": json.dumps(TINY).replace("24}", "1e999}"),
    "text for numbers": json.dumps({**TINY, "embed_dim": "24"}),
    "5,000 digits": json.dumps(TINY).replace("24}", f"{'9' * 5000}}}"),
    "nested": nested(200_000),
    "NUL bytes": "\0" * 1000,
    "1 GB": "sparse",
}


def header(content: dict[str, Any] | bytes, length: int | None = None, data: int = 0) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def tensor(shape: list[int], end: int, start: int = 0) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "header of 2^63": lambda: header(b"{}", 2**63),
    "100,000 tensors": lambda: header(b"{" + b'"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' * 100_000),
    "petabytes": lambda: header({"a": tensor([2**50], 2**52)}, data=16),
    "overflowing shape": lambda: header({"a": tensor([2**40, 2**40], 16)}, data=16),
    "overlapping": lambda: header({"a": tensor([4], 16), "b": tensor([4], 16)}, data=16),
    "long name": lambda: header({"a" * 3_000_000: tensor([4], 16)}, data=16),
}


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch RAN",)


def archive(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in files.items():
            file.writestr(name, data)


def zip_bomb(path: Path) -> None:
    """A state dict whose one tensor of 256 MB is stored in 0.3 MB."""
    import torch

    torch.save({"a": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as file:
        files = {name: file.read(name) for name in file.namelist()}
    prefix = next(iter(files)).partition("/")[0]
    files[f"{prefix}/data.pkl"] = files[f"{prefix}/data.pkl"].replace(b"K\x04tq", b"J\x00\x00\x00\x04tq")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            if name.endswith("data/0"):
                with file.open(name, "w", force_zip64=True) as entry:
                    for _ in range(16):
                        entry.write(bytes(1 << 24))
            else:
                file.writestr(name, data)


def memo_bomb(path: Path) -> None:
    """A TorchScript archive whose pickle asks for a memo of 2^31 entries."""
    script = {"x/constants.pkl": b"", "x/data.pkl": b"\x80\x02Nr\xff\xff\xff\x7f."}
    archive(path, script)


def many_entries(path: Path) -> None:
    """One file, listed 60,000 times."""
    archive(path, {"x": b""})
    data = path.read_bytes()
    start, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    entries, last = data[start:end] * 60_000, bytearray(data[end:])
    last[8:16] = struct.pack("<HHI", 60_000, 60_000, len(entries))
    path.write_bytes(data[:start] + entries + last)


# A tuple that contains the one before twice, 60 times, as a key of a dict.
HASH_BOMB = b"\x80\x02}K\x01K\x01\x86" + b"q\x01h\x01\x86" * 60 + b"K\x01s."
PICKLES: dict[str, Callable[[Path], Any]] = {
    "runs a command (zip)": lambda path: archive(
        path, {"x/data.pkl": pickle.dumps(Evil()), "x/version": b"3", "x/byteorder": b"little"}
    ),
    "runs a command (pickle)": lambda path: path.write_bytes(pickle.dumps(Evil(), 2)),
    "runs a command (TorchScript)": lambda path: archive(
        path, {"x/data.pkl": pickle.dumps(Evil()), "x/constants.pkl": b""}
    ),
    "zip bomb": zip_bomb,
    "60,000 entries": lambda path: many_entries(path),
    "memo bomb": memo_bomb,
    "hash bomb": lambda path: path.write_bytes(HASH_BOMB),
    "hash bomb (zip)": lambda path: archive(path, {"x/data.pkl": HASH_BOMB, "x/version": b"3"}),
    "hash bomb (TorchScript)": lambda path: archive(path, {"x/data.pkl": HASH_BOMB, "x/constants.pkl": b""}),
    "2 million marks": lambda path: path.write_bytes(b"\x80\x02" + b"(" * 2_000_000),
    "2 million marks (zip)": lambda path: archive(
        path, {"x/data.pkl": b"\x80\x02" + b"(" * 2_000_000, "x/version": b"3"}
    ),
}


def our_folder(folder: Path, config: str = "", tokenizer: str = "", weights: bytes = b"") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config or json.dumps(TINY))
    (folder / "tokenizer.json").write_text(tokenizer or json.dumps(tokenizer_state()))
    (folder / "model.safetensors").write_bytes(weights or header({}))
    return folder


def sparse(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def gzip_bomb(path: Path) -> Path:
    path.write_bytes(gzip.compress(b"a b\n" * (1 << 22)) * 120)  # 2 GB
    return path


def text_folder(folder: Path, **config: Any) -> Path:
    """A text encoder of transformers without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**BERT, **config}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_state()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "model.safetensors").write_bytes(header({}))
    return folder


def dual_folder(folder: Path, **config: Any) -> Path:
    text_folder(folder)
    (folder / "config.json").write_text(json.dumps({**DUAL, **config}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    return folder


def open_clip_folder(folder: Path, **model_cfg: Any) -> Path:
    folder.mkdir()
    text = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1, "no_causal_mask": True}
    config = {"model_cfg": {"embed_dim": 24, "vision_cfg": VIT, "text_cfg": text, **model_cfg}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_state()))
    (folder / "open_clip_model.safetensors").write_bytes(header({}))
    return folder


def all_cases(root: Path) -> dict[str, Callable[[], list[str]]]:
    """The command line of each case; its files are written when it is called."""
    cases: dict[str, Callable[[], list[str]]] = {}
    convert = lambda path: ["export", str(path), "--to", "m1clip", "--out", str(root / "out")]  # noqa: E731
    train = ["train", "--data", "synthetic:40", "--runs", str(root / "runs"), "--steps", "1", "--batch-size", "8"]

    def encoded(make: Callable[[], dict[str, Any] | str]) -> str:
        state = make()
        return state if isinstance(state, str) else json.dumps(state)

    for name, make in TOKENIZERS.items():
        cases[f"tokenizer.json: {name}"] = lambda make=make: convert(our_folder(root / "m", tokenizer=encoded(make)))
    for name, config in CONFIGS.items():
        if config != "sparse":
            cases[f"config.json: {name}"] = lambda config=config: convert(our_folder(root / "m", config))
    cases["config.json: 1 GB"] = lambda: convert(sparse(our_folder(root / "m") / "config.json", 1 << 30).parent)
    for name, data in SAFETENSORS.items():
        cases[f"safetensors: {name}"] = lambda data=data: convert(our_folder(root / "m", weights=data()))
    cases["safetensors: sparse 1 TB"] = lambda: convert(
        sparse(our_folder(root / "m") / "model.safetensors", 1 << 40).parent
    )
    for name, write in PICKLES.items():

        def pickled(write: Callable[[Path], Any] = write) -> list[str]:
            write(root / "m.pt")
            return convert(root / "m.pt")

        cases[f".pt: {name}"] = pickled
    cases["vocabulary: gzip bomb"] = lambda: [*train, "--tokenizer", str(gzip_bomb(root / "v.gz"))]
    cases["vocabulary: /dev/zero"] = lambda: [*train, "--tokenizer", str(link(root / "zero.txt", "/dev/zero"))]
    for key, value in HF_VALUES:
        cases[f"hf: {key} {value}"] = lambda c={key: value}: [*train, "--text", f"hf:{text_folder(root / 'm', **c)}"]
        vision = {**DUAL["vision_config"], key: value}
        cases[f"transformers: {key} {value}"] = lambda c=vision: convert(dual_folder(root / "m", vision_config=c))
    for key, value in OPEN_CLIP_VALUES:
        vision = {**VIT, key: value}
        cases[f"open_clip: {key} {value}"] = lambda c=vision: convert(open_clip_folder(root / "m", vision_cfg=c))
    cases["open_clip: lists"] = lambda: convert(open_clip_folder(root / "m", vision_cfg=[], text_cfg=[1]))
    cases["config.json: pipe"] = lambda: convert(pipe(our_folder(root / "m") / "config.json").parent)
    cases["tokenizer.json: pipe"] = lambda: convert(pipe(our_folder(root / "m") / "tokenizer.json").parent)
    cases["config.json: /dev/zero"] = lambda: convert(link(our_folder(root / "m") / "config.json", "/dev/zero").parent)
    return cases


def pipe(path: Path) -> Path:
    path.unlink()
    os.mkfifo(path)
    return path


def link(path: Path, target: str) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


MEASURE = """
import resource, sys, time
name = sys.argv.pop(1)
import m1clip.model.pretrained_clip, m1clip.api
if "transformers" in name or "hf:" in name:
    import transformers.models.siglip.modeling_siglip, transformers.models.bert.modeling_bert
if "open_clip" in name: import open_clip
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
from m1clip.cli import run_command
code = run_command(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(f"{code} {time.monotonic() - start:.2f} {peak / 1024:.0f}")
"""


def measure(name: str, argv: list[str]) -> str:
    """Exit code, seconds and MB on top of the imported libraries, and the message."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (20 << 30, 20 << 30))  # noqa: E731
    command = [sys.executable, "-c", MEASURE, name, *argv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit, errors="replace")
    except subprocess.TimeoutExpired:
        return "| > 60 | | |"
    figures = done.stdout.splitlines()[-1].split() if done.stdout.strip() else [f"signal {-done.returncode}", "", ""]
    lines = done.stderr.strip().splitlines() or [""]
    return f"{figures[0]} | {figures[1]} | {figures[2]} | {len(lines)} line(s): {lines[-1][:230]}"


def main(only: str = "") -> None:
    root = Path(tempfile.mkdtemp())
    print("case | exit code | s | MB | message")
    for name, make in all_cases(root).items():
        if only in name:
            print(name, "|", measure(name, make()), flush=True)
            for path in root.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(root)


if __name__ == "__main__":
    started = time.monotonic()
    main(*sys.argv[1:])
    print(f"{time.monotonic() - started:.0f} s")
