"""Errors of libraries as one sentence, above all while they read what others wrote. No torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOT_CONVERTED = (OSError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)
OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "bad_alloc", "not enough memory", "ALLOC_FAILED"),
    "Failed to allocate memory",  # onnxruntime
    *("could not create a primitive", "could not create a memory"),  # oneDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError":  # of torch
        return True
    is_runtime = isinstance(error, RuntimeError) or kind == "RuntimeException"  # of onnxruntime
    return is_runtime and any(message in str(error) for message in OUT_OF_MEMORY)


def short_error(error: BaseException) -> str:
    """The first line of the message, and the second if it belongs to it."""
    if is_out_of_memory(error):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return " ".join(map(str.strip, lines[: 2 if lines[0].endswith(":") else 1])) if lines else type(error).__name__


@contextmanager
def untrusted_input(what: str, path: Path | None = None) -> Iterator[None]:
    """While something reads what others wrote: any error becomes a ValueError of one sentence.

    A ValueError that names the `path` is one already. Libraries in Rust raise PanicException, which is no Exception.
    """
    try:
        yield
    except BaseException as error:
        is_sentence = path is not None and isinstance(error, ValueError) and str(path) in str(error)
        if is_sentence or isinstance(error, NOT_CONVERTED):
            raise
        if is_out_of_memory(error):
            raise MemoryError(f"{what}: not enough memory") from None
        raise ValueError(f"{what}: {short_error(error)[:300]}") from None
