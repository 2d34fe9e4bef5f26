"""Ctrl-C while the main thread is inside a library, in its own handler, or cleaning up."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.slow

# PBKDF2 stands for any long call into a library: it releases the GIL and does not look for signals.
PROGRAM = """
import hashlib, sys, threading, time
from m1clip import signals

def report(text):
    who = "main" if threading.current_thread() is threading.main_thread() else "watching"
    print(f"{who}: {text}", flush=True)

def call_library(seconds):
    started = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    per_second = 100_000 / (time.perf_counter() - started)
    threading.Timer(1, print, ("ready",), {"flush": True}).start()  # once the main thread is inside the call
    hashlib.pbkdf2_hmac("sha256", b"", b"", min(int(seconds * per_second), 2**31 - 1))

signals.answer_signals()
case = sys.argv[1]
try:
    if case == "library":
        call_library(500)
    elif case == "training":
        with signals.StopSignal(report) as stop:
            call_library(float(sys.argv[2]))
            report(f"stop requested: {stop.received}")
    elif case == "gil":
        with signals.ended_by_signals():
            print("ready", flush=True)
            sum(range(10**13))
    else:
        try:
            print("ready", flush=True)
            time.sleep(600)
        except BaseException:
            if case != "swallow":
                raise
            report("swallowed")
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
finally:
    report("cleaned up")
"""


@contextmanager
def start(*argv: str) -> "Iterator[subprocess.Popen[str]]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *argv], **pipes) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_whose_main_thread_is_inside_a_library(number):
    with start("library") as child:
        child.send_signal(number)
        assert child.communicate(timeout=120)[0] == "stopped\n"
    assert child.returncode == 130


def test_a_signal_is_answered_by_the_main_thread_where_it_can():
    with start("sleep") as child:
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=120)[0] == "main: cleaned up\n"
    assert child.returncode == 130


def test_training_inside_a_library_answers_the_first_signal_and_ends_at_the_second():
    with start("training", "500") as child:
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline().startswith("watching: SIGINT: finishing this step")
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=120)[0] == "stopped\n"
    assert child.returncode == 130


def test_a_signal_answered_for_the_main_thread_counts_once():
    with start("training", "5") as child:
        child.send_signal(signal.SIGINT)
        first, *others = child.communicate(timeout=120)[0].splitlines()
    assert first.startswith("watching: SIGINT: finishing this step")
    assert others == ["main: stop requested: True", "main: cleaned up"]


def test_a_call_that_holds_the_gil_is_ended_by_the_system():
    with start("gil") as child:
        child.send_signal(signal.SIGINT)
        child.wait(timeout=120)
    assert child.returncode == -signal.SIGINT


def test_an_interrupt_that_a_library_swallows_is_repeated():
    with start("swallow") as child:
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=120)[0].splitlines() == ["main: swallowed", "main: cleaned up"]
    assert child.returncode == 130
