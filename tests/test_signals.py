"""Ctrl-C while the main thread is inside a library, in its own handler, or cleaning up."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# The library releases the GIL but returns only after minutes: the time is quadratic in the length of the word.
PROGRAM = """
import random, sys, threading, time, tokenizers
from m1clip import signals

signals.answer_signals()
report = lambda text: print(text, flush=True)
word = "".join(random.choices("abcdefghij", k=int(sys.argv[2])))
train = tokenizers.Tokenizer(tokenizers.models.BPE()).train_from_iterator
trainer = tokenizers.trainers.BpeTrainer(show_progress=False)
if sys.argv[1] != "gil":
    threading.Timer(0.5, report, ("ready",)).start()  # once the main thread is inside the call
try:
    if sys.argv[1] == "training":
        with signals.StopSignal(report) as stop:
            train([word], trainer)
            report(f"stop requested: {stop.received}")
    elif sys.argv[1] == "library":
        train([word], trainer)
    elif sys.argv[1] == "gil":
        with signals.ended_by_signals():
            report("ready")
            sum(range(10**13))
    elif sys.argv[1] == "swallow":
        try:
            time.sleep(600)
        except BaseException:
            report("swallowed")
        time.sleep(600)
    else:
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
finally:
    report("cleaned up")
"""


def start(*argv: str) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, *argv], **pipes)
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_whose_main_thread_is_inside_a_library(number):
    child = start("library", "2000000")
    child.send_signal(number)
    assert child.communicate(timeout=120)[0] == "stopped\n"
    assert child.returncode == 130


def test_a_signal_is_answered_by_the_main_thread_where_it_can():
    child = start("sleep", "1")
    child.send_signal(signal.SIGINT)
    assert "cleaned up" in child.communicate(timeout=120)[0]


def test_training_inside_a_library_answers_the_first_signal_and_ends_at_the_second():
    child = start("training", "2000000")
    child.send_signal(signal.SIGINT)
    assert "finishing this step" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=120)[0] == "stopped\n"
    assert child.returncode == 130


def test_a_signal_answered_for_the_main_thread_counts_once():
    child = start("training", "100000")
    child.send_signal(signal.SIGINT)
    lines = child.communicate(timeout=120)[0].splitlines()
    assert sum("finishing this step" in line for line in lines) == 1
    assert lines[-2:] == ["stop requested: True", "cleaned up"]


def test_a_call_that_holds_the_gil_is_ended_by_the_system():
    child = start("gil", "1")
    child.send_signal(signal.SIGINT)
    child.wait(timeout=120)
    assert child.returncode == -signal.SIGINT


def test_an_interrupt_that_a_library_swallows_is_repeated():
    child = start("swallow", "1")
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=120)[0].splitlines() == ["swallowed", "cleaned up"]
    assert child.returncode == 130
