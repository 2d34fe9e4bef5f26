"""Step time beside other programs: python benchmarks/busy.py [--loops 4] [--rounds 5]

Each round times nano steps in two processes, one after the other: with spinning threads (OpenMP's default) and with
the policy that training uses. `fair` is the idle step time times the share of the cores that is left: with T threads
beside N busy loops on C cores, (T + N) / C.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from operator import truediv
from statistics import median


def spin() -> None:
    while True:
        pass


def time_steps(policy: str, seconds: float) -> None:
    """Print step times in ms as JSON."""
    import torch

    from m1clip.config import get_preset
    from m1clip.model.clip import CLIP
    from m1clip.training.contention import ContentionPolicy
    from m1clip.training.memory import retain_freed_memory
    from m1clip.training.step import TrainState, train_step
    from m1clip.training.timing import random_batch

    config = get_preset("nano")
    torch.manual_seed(0)
    state, batch = TrainState(CLIP(config.model), config), random_batch(config, config.batch_size, 16)
    retain_freed_memory()
    contention = ContentionPolicy(state, lambda text: print(text, file=sys.stderr))
    samples, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 8:
        started = time.perf_counter()
        train_step(state, batch)
        samples.append(1e3 * (time.perf_counter() - started))
        if policy == "adaptive":
            contention.update()
    contention.close()
    warm = len(samples) // 3  # the policy needs a few seconds to see the load
    print(json.dumps(samples[warm:]))


def run(policy: str, seconds: float, threads: int) -> float:
    command = [sys.executable, __file__, "--policy", policy, "--seconds", str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    return float(median(json.loads(done.stdout)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 4, 10], help="numbers of busy loops")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--policies", nargs="+", default=["spin", "adaptive"], help="of: spin, adaptive")
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.policy:
        return time_steps(args.policy, args.seconds)
    cores = os.cpu_count() or 1
    idle = 0.0
    for loops in args.loops:
        processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(loops)]
        for process in processes:
            process.start()
        results: dict[str, list[float]] = {policy: [] for policy in args.policies}
        for _ in range(args.rounds):
            for policy in args.policies:
                results[policy].append(run(policy, args.seconds, cores))
        for process in processes:
            process.kill()
        idle = idle or min(median(samples) for samples in results.values())
        fair = idle * (cores + loops) / cores
        for policy, samples in results.items():
            ratio = median(map(truediv, samples, results[args.policies[0]]))
            listed = ", ".join(f"{sample:.0f}" for sample in samples)
            print(
                f"{loops:3} loops  {policy:9} {median(samples):6.0f} ms  {median(samples) / fair:.2f} x fair "
                f"({fair:.0f} ms)  {ratio:.2f} x {args.policies[0]}  [{listed}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
