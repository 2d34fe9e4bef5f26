"""Untrusted model files: each is refused in one sentence, within 200 MB, and none of its code runs."""

import json
import re
import resource
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_models import all_cases, template, tokenizer_state
from tokenizers import Regex, pre_tokenizers

import m1clip
from m1clip import cli
from m1clip.config import TokenizerSettings
from m1clip.files import read_file
from m1clip.model.clip import CLIP
from m1clip.model.safe_load import check_module_size, load_tensors, require_memory
from m1clip.model.tokenizer import HFTokenizer, Tokenizer, build_core
from m1clip.model.tokenizer_check import check_regex, check_tokenizer_state

CASES = list(all_cases(Path("unused")))
# Runs commands in one process; prints exit code and message of each, and the peak of memory so far in MB.
CHILD = """
import contextlib, io, json, resource, sys
import m1clip.model.pretrained_clip, m1clip.api, open_clip
import transformers.models.siglip.modeling_siglip, transformers.models.bert.modeling_bert
from m1clip.cli import run_command
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for line in sys.stdin:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = run_command(json.loads(line))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (2**20 if sys.platform == "darwin" else 1024)
    print(json.dumps([code, text.getvalue(), peak]), flush=True)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, float]]:
    """By case: exit code, message, and the most memory so far on top of the imported program, in MB."""
    pytest.importorskip("transformers", reason="needs m1clip[hf]")
    pytest.importorskip("open_clip", reason="needs m1clip[openclip]")
    root = tmp_path_factory.mktemp("cases")
    commands = []
    for number, case in enumerate(CASES):
        (root / str(number)).mkdir()
        commands.append(json.dumps(all_cases(root / str(number))[case]()) + "\n")
    child = [sys.executable, "-c", CHILD]
    done = subprocess.run(child, input="".join(commands), capture_output=True, text=True, timeout=300, cwd=root)
    assert not done.stderr  # no panic of Rust, no stack of C++
    assert not (root / "RAN").exists()
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_sentence_and_little_memory(case, refusals):
    code, message, peak_mb = refusals[case]
    assert code in (1, 2)
    assert re.fullmatch(r"m1clip: (?!unexpected \w+Error).{10,1000}\n", message)
    assert not re.search("weights.only|safe_globals|Traceback", message, re.IGNORECASE)
    assert peak_mb < 200


REGEXES = {
    "CLIP": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "GPT-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "Kimi K2": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    "thousands": r"\d{1,3}(?=(?:\d{3})*\b)",
    "sentencepiece": r" {2,}",
}


@pytest.mark.parametrize("model", REGEXES)
def test_the_regex_of_a_known_tokenizer_is_accepted(model):
    assert check_regex(REGEXES[model]) >= 1
    assert pre_tokenizers.Split(Regex(REGEXES[model]), "isolated").pre_tokenize_str("a b")


@pytest.mark.parametrize(
    "regex",
    [
        *(r"(a+)+$", r"(a|a)*b", r"(a|ab)*c", r"(?:a?){30}", r"a?" * 30 + "b", "(a|a)" * 30, r"a+a+b", r".*.*(?<=Q)"),
        *(
            r"((a{1000}){1000})",
            "a{100000}",
            r"(a)\1",
            r"(?<n>a\g<n>?)",
            r"(?=a+b+c)",
            "a{1,3}+",
            "a{2}{3}",
            "(?x:a+ +)",
        ),
        *(r"(?~a)", "(*FAIL)", "(?#)", "[a", "(a", "a)", "\\", "[]a]+", "(" * 5_000, "|".join(["a"] * 500)),
    ],
)
def test_a_regex_that_could_backtrack_without_bound_or_is_not_understood_is_refused(regex):
    with pytest.raises(ValueError, match="regular expression"):
        check_regex(regex)


def test_a_charsmap_with_long_texts_and_a_long_max_word_are_refused():
    charsmap = b64encode(bytes([0, 4, 0, 0]) + bytes(1024) + b"a" * 10_000).decode()
    with pytest.raises(ValueError, match="inserts more than"):
        check_tokenizer_state(tokenizer_state(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap}))
    model = {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 10**9}
    with pytest.raises(ValueError, match="max_input_chars_per_word"):
        check_tokenizer_state(tokenizer_state(model=model))
    check_tokenizer_state(tokenizer_state(post_processor=template(1, 1)))


def test_padding_and_truncation_of_the_file_are_ignored():
    fixed = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    cut = {"max_length": 0, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    core = build_core(tokenizer_state(padding=fixed, truncation=cut))
    assert len(HFTokenizer(core, TokenizerSettings()).encode_full(["a"])[0]) == 1


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_panic_while_encoding_is_a_value_error_but_ctrl_c_is_not():
    class Core:
        def encode_batch_fast(self, texts: list[str]) -> Any:
            raise self.error

    tokenizer, core = Tokenizer.characters(), Core()
    tokenizer.core = core
    core.error = Panic("retry-limit-in-match over")
    with pytest.raises(ValueError, match="the tokenizer cannot encode a text: retry-limit"):
        tokenizer.encode_full(["a"])
    core.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_full(["a"])


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (Panic("index out of bounds"), "unexpected Panic: index out of bounds"),
        (RuntimeError("can't start new thread"), r"a thread cannot be started: it needs .*stack"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "not enough memory: libtorch_cpu"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
            "of 99 bytes failed",
        ),
        (MemoryError(), "not enough memory: an allocation failed"),
        (RuntimeError("Storage size calculation overflowed\nException raised from x.cpp\nframe #0"), "overflowed$"),
    ],
)
def test_every_error_is_one_sentence(error, sentence, monkeypatch, capsys):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(cli, "import_command", fail)
    assert cli.run_command(["runs"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert re.search(sentence, message.strip())


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not enforce RLIMIT_AS")
@pytest.mark.parametrize("command", ["train", "info", "data check x"])
def test_a_small_address_space_is_refused_with_the_number_needed(command):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (500_000_000, 500_000_000))

    argv = [sys.executable, "-m", "m1clip", *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True, preexec_fn=limit, timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(r"m1clip: m1clip .* needs [\d.]+ GB of address space, and .* allows 0\.5 GB\n", done.stderr)


def test_a_model_larger_than_memory_is_refused_with_the_number_needed():
    with pytest.raises(MemoryError, match=r"the model needs 4,398\.\d GB of memory; this machine has [\d.]+ GB"):
        check_module_size("the model", lambda: torch.nn.Linear(2**20, 2**20))
    with pytest.raises(ValueError, match="more than 10,000 weight tensors"):
        check_module_size("the model", lambda: [torch.nn.Linear(1, 1) for _ in range(10**7)])
    require_memory(1_000, "a small model")


def test_a_model_is_loaded_without_compilers(tiny, tmp_path):
    """torch imports its compiler, 160 MB, to fill a meta tensor with random numbers."""
    CLIP(tiny, Tokenizer.characters()).save(tmp_path / "m")
    code = "import m1clip, sys; m1clip.load(sys.argv[1]); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=True)
    loaded = m1clip.load(tmp_path / "m")
    assert all(weight.device.type == "cpu" for weight in loaded.state_dict().values())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_pipes_devices_and_folders_are_never_opened(name, tiny, tmp_path):
    CLIP(tiny, Tokenizer.characters()).save(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    (tmp_path / "m" / name).symlink_to("/dev/zero")
    with pytest.raises((FileNotFoundError, ValueError), match=name):
        m1clip.load(tmp_path / "m")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_file(tmp_path / "m" / name, 10)
    with pytest.raises(ValueError, match="is not a regular file"):
        read_file(tmp_path, 10)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_pickle_of_weights_is_still_read(legacy, tmp_path):
    weights = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    torch.save({"state_dict": weights}, tmp_path / "w.pth", _use_new_zipfile_serialization=not legacy)
    for name, tensor in load_tensors(tmp_path / "w.pth").items():
        torch.testing.assert_close(tensor, weights[name])


class Reduced:
    """Pickled as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("value", [Reduced(bytearray, 10**13), torch.zeros(1).as_strided((10**13,), (0,))])
def test_a_few_bytes_of_pickle_do_not_become_terabytes(tmp_path, value, is_zip):
    torch.save({"a": value, "b": torch.zeros(1)}, tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ValueError, match=r"m\.pt is refused"):
        load_tensors(tmp_path / "m.pt")


def test_dropout_of_a_tokenizer_is_off(tmp_path):
    state = json.loads(Tokenizer.train_bpe(["a photo of a cat"] * 9, 300).core.to_str())
    state["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert Tokenizer.load(tmp_path / "tokenizer.json").core.model.dropout is None
