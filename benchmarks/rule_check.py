"""Check two rules that choose between CPU and GPU by fixed sizes against the measurements of this machine.

python benchmarks/rule_check.py         after m1clip bench

should_use_mps: at least 100 M parameters, batch size 32 and 2^20 elements in the largest product.
predicted_speedup: GPU over CPU, by the number of parameters alone.
"""

import argparse

from m1clip import devices
from m1clip.config import VisionConfig, get_preset
from m1clip.devices import Plan
from m1clip.training.device_plan import StepRow, open_store


def should_use_mps(parameters: int, batch_size: int, elements: int) -> bool:
    return parameters >= 100_000_000 and batch_size >= 32 and elements >= 1024 * 1024


def predicted_speedup(parameters: int) -> float:
    for limit, speedup in ((50e6, 0.1), (100e6, 0.3), (200e6, 0.8), (500e6, 1.5)):
        if parameters < limit:
            return speedup
    return 3.0


def largest_product(row: StepRow) -> int:
    """Elements of the widest MLP activation of a batch."""
    model = get_preset(row.preset).model
    assert isinstance(model.vision, VisionConfig)
    towers = ((model.vision.tokens, model.vision.width), (row.tokens, model.text.width))
    return max(tokens * 4 * width for tokens, width in towers) * row.batch_size


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gpus = [name for name in devices.available() if name != "cpu"]
    if not gpus:
        print("PyTorch finds no GPU here: there is nothing to check the rules against")
        return
    comparisons: dict[str, dict[Plan, StepRow]] = {}
    for row in open_store().steps():
        comparisons.setdefault(row.comparison, {})[row.plan] = row
    print("| model | batch size | GPU/CPU measured | predicted_speedup | should_use_mps | correct |")
    print("| --- | ---: | ---: | ---: | --- | --- |")
    for plans in comparisons.values():
        if Plan("cpu") not in plans or Plan(gpus[-1]) not in plans:
            continue
        row = plans[Plan("cpu")]
        speedup = row.step_ms / plans[Plan(gpus[-1])].step_ms
        rule = should_use_mps(row.parameters, row.batch_size, largest_product(row))
        predicted, answer = predicted_speedup(row.parameters), "yes" if rule == (speedup > 1) else "NO"
        print(f"| {row.preset} | {row.batch_size} | {speedup:.2f} | {predicted:g} | {rule} | {answer} |")


if __name__ == "__main__":
    main()
