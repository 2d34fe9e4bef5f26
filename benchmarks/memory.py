"""Peak RSS of one training step, with the whole batch and with chunks (GradCache), each in its own process.

    python benchmarks/memory.py --preset small

Memory held before the step (torch, model, batch) is a separate column. The step is the one of training;
images and captions are random, captions as long as the context.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace

CASES = [
    # batch size, chunk, grad_checkpointing
    (64, 64, False),
    (64, 64, True),
    (256, 16, False),
    (1024, 16, False),
    (1024, 32, False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument(
        "--case", nargs=3, type=int, metavar=("BATCH_SIZE", "CHUNK", "CHECKPOINTING"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.preset, *args.case)))
        return
    print(f"`{args.preset}`, one step:\n")
    print("| batch size | chunk | grad checkpointing | before, GB | peak RSS, GB | s | pairs/s |")
    print("|---|---|---|---|---|---|---|")
    for batch_size, chunk, checkpointing in CASES:
        case = [str(batch_size), str(chunk), str(int(checkpointing))]
        command = [sys.executable, __file__, "--preset", args.preset, "--case", *case]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        measured = (result["before_gb"], result["peak_gb"], result["seconds"])
        cells = (batch_size, chunk, "yes" if checkpointing else "no", *measured)
        speed = batch_size / result["seconds"]
        print(f"| {' | '.join(map(str, cells))} | {speed:.1f} |", flush=True)


def measure(preset: str, batch_size: int, chunk: int, checkpointing: int) -> dict[str, float]:
    from m1clip import sensors
    from m1clip.config import get_preset
    from m1clip.model.clip import CLIP
    from m1clip.training.step import TrainState, train_step
    from m1clip.training.timing import random_batch

    config = replace(get_preset(preset), batch_size=batch_size, grad_checkpointing=bool(checkpointing))
    state = TrainState(CLIP(config.model), config)
    state.chunk = chunk
    batch = random_batch(config, batch_size, config.model.text.context_length)
    before_gb, start = sensors.memory_use().rss_gb, time.perf_counter()
    train_step(state, batch)
    seconds = round(time.perf_counter() - start, 1)
    return {"before_gb": before_gb, "peak_gb": sensors.peak_gb(), "seconds": seconds}


if __name__ == "__main__":
    main()
