"""How much of a batch is in memory at once: chosen by measuring, halved where memory runs out even so."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from m1clip import devices, sensors
from m1clip.data.batches import Batch
from m1clip.training.state import TrainState
from m1clip.training.step import embed_captions, embed_images, train_step

SHARE = 0.7
# What a step holds at its peak against what autograd has kept by then: gradients in flight, scratch of the
# kernels. Measured 1.1 for nano and 1.0 for small, and 2.9 for nano with --grad_checkpointing, which holds one whole
# block at a time (2 AVX2 cores, November 2026).
PEAK, PEAK_RECOMPUTED = 1.3, 3.2
PLENTY_GB = 4.0


def retain_freed_memory() -> None:
    """Where there is plenty; where it is short, what is kept for one size lacks for another."""
    if sensors.available_gb() > PLENTY_GB:
        devices.retain_freed_memory()


def kept_bytes(state: TrainState, batch: Batch) -> int:
    """What autograd keeps of one pair between forward and backward, counted on the first two of a batch."""
    weights = {weight.untyped_storage().data_ptr() for weight in state.weights.values()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # or an address might be used, and counted, twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    two = state.take(batch.split(2)[0])
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = embed_images(state, two), embed_captions(state, two)
    del outputs
    return sum(kept.values()) // len(two)


def choose_chunk(state: TrainState, batch: Batch, pair_bytes: int) -> tuple[int, str]:
    """PairDataset to hold at once, and why."""
    requested, size = state.config.chunk, len(batch)
    if requested != "auto":
        return min(requested, size), f"asked for with --chunk {requested}"
    free = free_gb(state.device)
    room = SHARE * free - gradients_gb(state)
    pair = (PEAK_RECOMPUTED if state.config.grad_checkpointing else PEAK) * pair_bytes / 1e9
    measured = f"{pair_bytes / 1e6:.1f} MB kept a pair, {free:.1f} GB free"
    if pair * size <= room:
        return size, f"the whole batch: {measured}"
    if room <= 0:
        raise MemoryError(f"gradients need {gradients_gb(state):.1f} GB, {free:.1f} GB are free")
    chunk = power_of_two(room / pair)
    while (took := trial(state, batch, chunk)) is None:
        if chunk == 1:
            raise MemoryError(f"not even one pair fits: {measured}")
        chunk //= 2
    # What the allocator had at hand is not seen, so a pair is taken for no less than half of what it keeps.
    one = max(took / chunk, pair_bytes / 2e9)
    return min(2 * chunk, power_of_two(room / one)), f"{measured}; tried, a pair took {1e3 * one:.1f} MB"


def power_of_two(number: float) -> int:
    """The largest that is not above, and at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def trial(state: TrainState, batch: Batch, chunk: int) -> float | None:
    """GB that forward and backward of a chunk really take; None where memory runs out."""
    some = state.take(batch.split(chunk)[0])
    devices.reset_peak(state.device)
    before = devices.memory_gb(state.device)
    ran_out = False
    with sensors.PeakMemory() as peak:
        try:
            for embed in (embed_images, embed_captions):
                embed(state, some).sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, MemoryError) as error:
            if not devices.is_out_of_memory(error):
                raise
            ran_out = True
    after = devices.peak_gb(state.device)
    state.zero_grad()
    release(state)
    if ran_out:
        return None
    return peak.gb if before is None or after is None else after - before


def careful_step(
    state: TrainState, batch: Batch, mark: Callable[[str], None], divided: Callable[[int], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """The training step; where memory runs out, the same step again with the batch divided further."""
    done: set[str] = set()

    def note(phase: str) -> None:
        done.add(phase)
        mark(phase)

    while True:
        try:
            return train_step(state, batch, note)
        except (RuntimeError, MemoryError) as error:
            hopeless = state.chunk == 1 or "backward" in done  # nothing to divide, or weights have moved
            if not devices.is_out_of_memory(error) or hopeless:
                raise
        # Here, outside of `except`, the error is gone and with it what its frames held.
        state.zero_grad()
        release(state)
        state.chunk = -(-min(state.chunk, len(batch)) // 2)
        divided(state.chunk)


def by_part(state: TrainState, batch: Batch, pair_bytes: int) -> dict[str, float]:
    """GB of each part of a step; activations are those of the pairs held at once."""
    weights = list(state.weights.values())
    optimizer = [v for o in state.optimizers for state in o.state.values() for v in state.values()]
    return {
        "parameters": gb(weights),
        "gradients": gb([weight.grad for weight in weights if weight.grad is not None]),
        "optimizer": gb(optimizer),
        "average": gb(list(state.mean.values())) if state.mean is not None else 0.0,
        "activations": pair_bytes * min(state.chunk, len(batch)) / 1e9,
        "data": gb([*batch.image, *batch.text, batch.key_B]),
    }


def kept_gb(state: TrainState) -> float:
    """What stays from step to step: weights, their average, the optimizers' memory."""
    moments = [value for o in state.optimizers for state in o.state.values() for value in state.values()]
    return gb(list(state.weights.values())) + gb(moments) + gb(list((state.mean or {}).values()))


def release(state: TrainState) -> None:
    for place in set(state.model.places):
        devices.release(place)


def gb(tensors: list[Tensor] | list[torch.nn.Parameter]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e9


def gradients_gb(state: TrainState) -> float:
    """What will be held beside the activations, and is not yet; the moments are there."""
    return gb(list(state.weights.values()))


def free_gb(device: torch.device) -> float:
    """What can be had on the device, and of the machine's own memory where that is the same."""
    on_device, machine = devices.free_gb(device), sensors.available_gb()
    if on_device is None:
        return machine
    return min(on_device, machine) if devices.shares_memory(device) else on_device
