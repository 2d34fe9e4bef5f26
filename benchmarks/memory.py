"""A large batch in little memory: peak RSS of one step, whole and divided, each in a process of its own.

    python benchmarks/memory.py --preset small

What the process holds before the step (torch, the model, the batch) is a column of its own. The step is the
one that training runs; images and captions are random, captions as long as the model reads.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace

CASES = [
    # batch, chunk, grad_checkpointing
    (64, 64, False),
    (64, 64, True),
    (256, 16, False),
    (1024, 16, False),
    (1024, 32, False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--one", nargs=3, metavar=("BATCH", "CHUNK", "RECOMPUTE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.preset, *map(int, args.one))))
        return
    print(f"`{args.preset}`, one step:\n")
    print("| batch | chunk | grad_checkpointing | before, GB | peak, GB | s | pairs/s |\n|---|---|---|---|---|---|---|")
    for batch, chunk, grad_checkpointing in CASES:
        command = [sys.executable, __file__, "--preset", args.preset, "--one"]
        words = [*command, str(batch), str(chunk), str(int(grad_checkpointing))]
        row = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
        cells = (
            batch,
            chunk,
            "yes" if grad_checkpointing else "no",
            row["before_gb"],
            row["peak_gb"],
            row["seconds"],
        )
        print(f"| {' | '.join(map(str, cells))} | {batch / row['seconds']:.1f} |", flush=True)


def one(name: str, batch: int, chunk: int, grad_checkpointing: int) -> dict[str, float]:
    import numpy as np
    import torch

    from m1clip import sensors
    from m1clip.config import get_preset
    from m1clip.data.batches import Batch, Images, Tokens
    from m1clip.model.clip import CLIP
    from m1clip.training.state import TrainState
    from m1clip.training.step import train_step

    config = replace(get_preset(name), batch=batch, grad_checkpointing=bool(grad_checkpointing))
    vision, text = config.model.vision, config.model.text
    state = TrainState(CLIP(config.model), config)
    state.chunk = chunk
    images = torch.randint(0, 256, (batch, vision.image_size, vision.image_size, 3), dtype=torch.uint8)
    tokens = torch.randint(3, text.vocab_size, (batch, text.context_length))
    tokens[:, -1] = state.model.text.end_id
    data = Batch(Images(images), Tokens(tokens[:, None]), torch.arange(batch), None, np.arange(batch))
    before_gb, began = sensors.memory_gb(), time.perf_counter()
    train_step(state, data)
    return {
        "before_gb": before_gb,
        "peak_gb": sensors.peak_gb(),
        "seconds": round(time.perf_counter() - began, 1),
    }


if __name__ == "__main__":
    main()
