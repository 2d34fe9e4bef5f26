"""How many pairs are in memory at once: chosen by measurement, halved when memory runs out."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from m1clip import devices, sensors
from m1clip.data.batches import Batch
from m1clip.errors import is_out_of_memory
from m1clip.model.fast import saved_for_backward
from m1clip.training.step import Mark, StepOutput, TrainState, embed_images, embed_texts, train_step

USABLE = 0.7  # fraction of the free memory that a batch may take
# Peak memory of a step relative to the activations saved for backward: gradients in flight, kernel workspace.
# Measured 1.1 for nano and 1.0 for small, and 2.9 for nano with grad_checkpointing, which holds one whole
# block at a time (2 AVX2 cores, November 2026).
PEAK, PEAK_CHECKPOINTED = 1.3, 3.2
AMPLE_GB = 4.0


def retain_freed_memory() -> None:
    """Keep freed memory for the next step, unless memory is short."""
    if sensors.available_gb() > AMPLE_GB:
        devices.retain_freed_memory()


def activation_bytes(state: TrainState, batch: Batch) -> int:
    """Bytes autograd saves for one pair between forward and backward, counted on two pairs."""
    pairs = state.to_device(batch.split(2)[0])
    with saved_for_backward(state.weights.values()) as sizes:
        for embed in (embed_images, embed_texts):
            embed(state.model, pairs, state.plan.precision)
    return sum(sizes.values()) // len(pairs)


def choose_chunk(state: TrainState, batch: Batch, pair_bytes: int) -> tuple[int, str]:
    """Pairs in memory at once, and the reason."""
    requested, size = state.config.chunk, len(batch)
    if requested != "auto":
        return min(requested, size), f"--chunk {requested}"
    free, gradients_gb = free_gb(state.device), total_gb(state.weights.values())
    usable = USABLE * free - gradients_gb
    pair_gb = (PEAK_CHECKPOINTED if state.config.grad_checkpointing else PEAK) * pair_bytes / 1e9
    measured = f"{pair_bytes / 1e6:.1f} MB of activations per pair, {free:.1f} GB free"
    if pair_gb * size <= usable:
        return size, f"no chunks needed: {measured}"
    if usable <= 0:
        raise MemoryError(f"gradients need {gradients_gb:.1f} GB, {free:.1f} GB are free")
    chunk = power_of_two(usable / pair_gb)
    while (trial_gb := try_chunk(state, batch, chunk)) is None:
        if chunk == 1:
            raise MemoryError(f"not even one pair fits: {measured}")
        chunk //= 2
    # Reused allocator memory is not seen, so a pair counts for at least half of its activations.
    pair_gb = max(trial_gb / chunk, pair_bytes / 2e9)
    chunk = min(2 * chunk, power_of_two(usable / pair_gb))
    return chunk, f"{measured}; a trial took {1e3 * pair_gb:.1f} MB per pair"


def power_of_two(number: float) -> int:
    """The largest power of two that is not above `number`, and at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def try_chunk(state: TrainState, batch: Batch, chunk: int) -> float | None:
    """GB that forward and backward of a chunk really take; None where memory runs out."""
    pairs, fits = state.to_device(batch.split(chunk)[0]), True
    devices.reset_peak(state.device)
    before = devices.memory_gb(state.device)
    with sensors.PeakMemory() as peak:
        try:
            for embed in (embed_images, embed_texts):
                embed(state.model, pairs, state.plan.precision).sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, MemoryError) as error:
            fits = False
            if not is_out_of_memory(error):
                raise
    after = devices.peak_gb(state.device)
    state.zero_grad()
    release_memory(state)
    taken = peak.gb if before is None or after is None else after - before
    return taken if fits else None


def step_with_retry(state: TrainState, batch: Batch, mark: Mark, on_retry: Callable[[int], None]) -> StepOutput:
    """The training step; where memory runs out, the same step again in smaller chunks."""
    phases: set[str] = set()

    def mark_phase(phase: str) -> None:
        phases.add(phase)
        mark(phase)

    while True:
        try:
            return train_step(state, batch, mark_phase)
        except (RuntimeError, MemoryError) as error:
            final = state.chunk == 1 or "backward" in phases  # cannot split further, or weights have changed
            if not is_out_of_memory(error) or final:
                raise
        # Outside of `except` the error is gone, and with it the tensors of its frames.
        state.discard_gradients()
        release_memory(state)
        state.chunk = -(-min(state.chunk, len(batch)) // 2)
        on_retry(state.chunk)


def memory_by_part(state: TrainState, batch: Batch, pair_bytes: int, imported: sensors.MemoryUse) -> dict[str, float]:
    """GB of each part of the process; activations are those of one chunk, `allocator` is the rest.

    `imported` was measured once the libraries were loaded; `data` is what has been memory-mapped since.
    """
    parts = {
        **state_memory_gb(state),
        "gradients": total_gb(weight.grad for weight in state.weights.values() if weight.grad is not None),
        "activations": pair_bytes * min(state.chunk, len(batch)) / 1e9,
        "batch": total_gb((batch.image[0], batch.text[0], batch.key_B)),
        "libraries": imported.rss_gb,
    }
    now = sensors.memory_use()
    if now.mapped_gb is not None and imported.mapped_gb is not None:
        parts["data"] = max(0.0, now.mapped_gb - imported.mapped_gb)
    if state.device.type == "cpu":
        parts["allocator"] = max(0.0, now.rss_gb - sum(parts.values()))
    return parts


def state_memory_gb(state: TrainState) -> dict[str, float]:
    """What stays in memory from step to step."""
    moments = (value for opt in state.optimizers for entry in opt.state.values() for value in entry.values())
    parts = {"parameters": state.model.parameters(), "optimizer": moments, "ema": (state.ema or {}).values()}
    return {name: total_gb(tensors) for name, tensors in parts.items()}


def release_memory(state: TrainState) -> None:
    for device in set(state.model.devices):
        devices.release(device)


def total_gb(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e9


def free_gb(device: torch.device) -> float:
    """Free memory of the device, and of the machine where both are the same."""
    on_device, machine = devices.free_gb(device), sensors.available_gb()
    if on_device is None:
        return machine
    return min(on_device, machine) if devices.shares_memory(device) else on_device
