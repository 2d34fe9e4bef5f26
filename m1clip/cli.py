"""The command table. A command's module is imported when it is called; errors end here as one sentence."""

import os
import re
import resource
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

from m1clip import __version__, signals
from m1clip.format import did_you_mean, printable

MAX_MESSAGE = 3_000  # characters; a message may quote a file
COMMANDS = {
    "train": "train a model; without flags, the nano preset on synthetic data",
    "runs": "list runs: state, progress, best score, device",
    "stop": "stop a background run, with a checkpoint",
    "monitor": "watch a run live: curves, speed, gradients, events; --web for the browser",
    "report": "write a report of a run, or a comparison of several, with figures",
    "eval": "zero-shot accuracy, retrieval, probes and robustness of a model, with chance",
    "classify": "label images with a trained model: zero-shot, with probabilities",
    "search": "find images of a folder by text or by image; --web for the browser",
    "index export": "write the vectors of a searched folder as Parquet, NumPy or Qdrant files",
    "export": "export a model to ONNX, INT8, Core ML, and to the products and libraries that open it",
    "serve": "serve embeddings over HTTP: the APIs of OpenAI, Cohere, Hugging Face, immich and others",
    "models": "list the pretrained models that training can start from, and the extra each needs",
    "info": "list presets: parameters, FLOPs per pair, memory of a batch",
    "bench": "benchmark this machine's devices on real training steps; tables, figures, report",
    "bench scaling": "time and memory of model sizes up to 1 B parameters, measured or extrapolated",
    "compare": "train the same on each device: speed, memory, energy and loss curves",
    "advise": "recommend device, precision, threads, chunk and time for a model, with reasons",
    "doctor": "check this machine: versions, memory, power, heat, and whether its devices agree",
    "data check": "inspect a dataset: counts, bad rows by file and line, duplicates, leaks",
    "data convert": "convert a dataset to WebDataset shards or Parquet, with checksums",
    "data preview": "contact sheet of a dataset with its captions",
    "data template": "table of the images of a folder, to fill in their captions",
}
HELP = f"""m1clip {__version__}: train, understand and ship a CLIP model on the computer you own

usage: m1clip COMMAND [flags]

{chr(10).join(f"  {name:15}{text}" for name, text in COMMANDS.items())}

m1clip COMMAND --help lists the flags of a command. --debug shows the traceback of an error.
m1clip --print-completion bash|zsh|fish prints the completion script of a shell.
Exit codes: 0 success, 1 failure, 2 usage error, 130 stopped by Ctrl-C."""


def main() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as in `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # arrows on ASCII terminals
    os.environ["PYTHONSAFEPATH"] = "1"  # no process that is started imports modules of the current folder
    try:
        signals.answer_signals()
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:  # before or after the command itself
        code = 130
    signals.end_at_next_signal(code)
    try:
        sys.stdout.flush()
    except OSError:  # it has been reported; Python would report it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run_command(argv: list[str]) -> int:
    # Operations MPS lacks must fail: a silent CPU fallback would be timed and trusted as MPS.
    # Set here because torch reads it when it is loaded.
    os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "0"
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    try:
        code = call_command(*split_command(argv))
        sys.stdout.flush()  # a full disk is an error of the command
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as in `m1clip info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BaseException as error:  # a library in Rust raises PanicException, which is no Exception
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        if debug:
            traceback.print_exc()
        return report_error(error)


def call_command(name: str | None, flags: list[str]) -> int:
    if name is None:
        return 0
    if {"-h", "--help"}.isdisjoint(flags):
        check_address_space(name)
    module = import_command(name)
    from m1clip.commands import parse_flags  # imports tyro

    return int(module.main(parse_flags(module.Args, f"m1clip {name}", flags)) or 0)


def address_space_gb(command: str) -> float:
    """What the libraries of a command reserve, measured with `ulimit -v` (Linux, November 2026)."""
    if command in ("runs", "stop", "monitor", "models"):
        return 0.2
    if command == "report" or command.startswith("data "):
        return 0.6
    if command == "serve":
        return 1.0
    torch = find_spec("torch")
    has_gpu_libraries = torch and torch.origin and any((Path(torch.origin).parent / "lib").glob("*_cuda.so"))
    return 4.5 if has_gpu_libraries else 2.0


def check_address_space(command: str) -> None:
    """Below this limit, libraries abort the process while they are loaded, before Python can say why."""
    limit, needed = resource.getrlimit(resource.RLIMIT_AS)[0], address_space_gb(command)
    if limit != resource.RLIM_INFINITY and limit < needed * 1e9:
        allowed = f"`ulimit -v` allows {limit / 1e9:.1f} GB"
        raise MemoryError(f"m1clip {command} needs {needed} GB of address space, and {allowed}")


def import_command(name: str) -> ModuleType:
    return import_module(f"m1clip.commands.{name.replace(' ', '_')}")


def split_command(argv: list[str]) -> tuple[str | None, list[str]]:
    """The command (one or two words) and its flags; None once help or version have been printed."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return None, []
    if argv[0] in ("-V", "--version"):
        print(f"m1clip {__version__}")
        return None, []
    if argv[0] == "--print-completion":
        from m1clip.commands.completion import print_completion  # imports tyro

        print_completion(" ".join(argv[1:]), {name: import_command(name).Args for name in COMMANDS})
        return None, []
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, argv[length:]
    members = [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    if members and (len(argv) == 1 or argv[1] in ("-h", "--help")):
        print("\n".join(f"m1clip {name:15}{COMMANDS[name]}" for name in members))
        return None, []
    unknown = " ".join(argv[: 2 if members else 1])
    raise ValueError(f"no command {unknown!r}; {did_you_mean(unknown, COMMANDS)} (m1clip --help lists them)")


def memory_problem(error: BaseException) -> str | None:
    """The sentence for an error that means too little memory, with what was needed; None for any other."""
    if isinstance(error, ValueError | FileNotFoundError | FileExistsError):  # which may quote such words
        return None
    text, stack = str(error), resource.getrlimit(resource.RLIMIT_STACK)[0]
    if "new thread" in text or "worker thread" in text:
        size = "its stack" if stack == resource.RLIM_INFINITY else f"{stack / 1e6:.1f} MB for its stack"
        return f"a thread cannot be started: it needs {size} (`ulimit -v`) and a free process number (`ulimit -u`)"
    if isinstance(error, MemoryError) and text:
        return text
    out_of_memory = re.search("allocate memory|out of memory|bad_alloc|map segment|not enough memory", text, re.I)
    if not isinstance(error, MemoryError) and not out_of_memory:
        return None
    needed = re.search(r"tried to allocate ([\d.]+ ?\w+)", text)
    reason = f"an allocation of {needed[1]} failed" if needed else text.partition("\n")[0] or "an allocation failed"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    allowed = "" if limit == resource.RLIM_INFINITY else f"; `ulimit -v` allows {limit / 1e9:.1f} GB"
    return f"not enough memory: {reason}{allowed}"


def report_error(error: BaseException) -> int:
    """Print one sentence on stderr; exit code 2 for usage errors, 1 for failures."""
    if sentence := memory_problem(error):
        pass
    elif isinstance(error, OSError) and error.strerror:
        file = error.filename2 or error.filename  # what a temporary file was to replace
        sentence = f"{file}: {error.strerror}" if file else error.strerror
    elif isinstance(error, ValueError | OSError | ArithmeticError | MemoryError) or type(error) is RuntimeError:
        sentence = str(error)
        for native in ("\nException raised from", "\nC++ CapturedTraceback"):  # torch appends its own stack
            sentence = sentence.partition(native)[0]
    else:
        sentence = f"unexpected {type(error).__name__}: {error} (--debug shows the traceback)"
    with suppress(OSError):  # stderr is a file on a full disk
        print(f"m1clip: {printable(sentence[:MAX_MESSAGE])}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ValueError | FileNotFoundError | FileExistsError) else 1
