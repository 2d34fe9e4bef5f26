"""The table of verbs. A verb's file is imported when it is called; errors end here, as one sentence."""

import os
import signal
import sys
import traceback
from importlib import import_module
from io import TextIOWrapper

from m1clip import __version__
from m1clip.format import did_you_mean, printable

VERBS = {
    "train": "train a model; with no flags, the built-in data and the nano preset",
    "runs": "every run: state, progress, best score, device",
    "stop": "end a run that trains in the background, with a checkpoint",
    "monitor": "logger a run live: curves, speed, gradients, events; --web for the browser",
    "report": "a run, or several side by side, as a document with figures",
    "eval": "validation retrieval of a run or a saved model, and which words it reads",
    "convert": "a model for transformers or open_clip, or one of theirs as ours",
    "info": "the presets: parameters by part, FLOPs per pair, memory of a batch",
    "bench": "compare this machine's devices on real training steps; tables, images, a page",
    "bench scaling": "time and memory of every size up to a billion parameters, measured or planned",
    "compare": "train the same on each device: speed, memory, energy and loss curves side by side",
    "advise": "how to train a model here: device, precision, threads, time, each with its reason",
    "doctor": "is this machine fit to train: versions, memory, power, heat, and do its devices agree",
    "data check": "what is in your data and what is wrong with it, by file and line",
    "data convert": "your data as WebDataset shards or Parquet, with checksums",
    "data preview": "a contact sheet of the data with its captions",
}
HELP = f"""m1clip {__version__}: train, understand and ship a CLIP model on the computer you own

usage: m1clip VERB [flags]

{chr(10).join(f"  {verb:14}{text}" for verb, text in VERBS.items())}

m1clip VERB --help lists a verb's flags. With --debug an error shows its traceback.
Exit codes: 0 done, 1 failed, 2 the command was not understood, 130 stopped by Ctrl-C."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # an arrow is no reason to fail where only ASCII is spoken
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks us to ignore it
            # As Ctrl-C: what is half-made is removed on the way out.
            signal.signal(number, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    # What MPS cannot do must fail, or the CPU would do it, be timed and be trusted in its name. Set here,
    # because torch reads it when it is loaded.
    os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "0"
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        verb, flags = split_verb(words)
        if verb is None:
            return 0
        module = import_module(f"m1clip.commands.{verb.replace(' ', '_')}")
        code: int = module.main(module.parse(f"m1clip {verb}", flags))
        return code
    except BrokenPipeError:  # the reader has had enough, as in `m1clip info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        return explain(error)


def split_verb(words: list[str]) -> tuple[str | None, list[str]]:
    """The verb (one word or two) and its flags; None once the help or the version has been printed."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return None, []
    if words[0] in ("-V", "--version"):
        print(f"m1clip {__version__}")
        return None, []
    for length in (2, 1):
        verb = " ".join(words[:length])
        if verb in VERBS:
            return verb, words[length:]
    two = any(verb.startswith(f"{words[0]} ") for verb in VERBS)
    if (two and len(words) == 1) or (two and words[1] in ("-h", "--help")):
        print(
            "\n".join(f"m1clip {verb:14}{text}" for verb, text in VERBS.items() if verb.startswith(words[0]))
        )
        return None, []
    asked = " ".join(words[: 2 if two else 1])
    raise ValueError(f"no verb {asked!r}; {did_you_mean(asked, VERBS)} (m1clip --help lists them)")


def explain(error: Exception) -> int:
    """One sentence on stderr. Exit 2 for what the user can write differently, 1 for what went wrong."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        sentence = f"{where}{error.strerror}"
    elif (
        isinstance(error, ValueError | OSError | ArithmeticError | MemoryError) or type(error) is RuntimeError
    ):
        sentence = str(error) or "not enough memory"  # the only one that comes without words
    else:
        sentence = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    print(f"m1clip: {printable(sentence)}", file=sys.stderr)
    return 2 if isinstance(error, ValueError | FileNotFoundError | FileExistsError) else 1
