"""LoRA by peft: small matrices beside frozen ones (Hu et al. 2021); and the ordinary weights they come to."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.model.pretrained import require_extra
from m1clip.model.safe_load import load_tensors, read_json, save_tensors

NAME = "default"
FILES = ("adapter.safetensors", "adapter.json")


def adapt(model: nn.Module, sides: Iterable[str], rank: int, what: str) -> None:
    """Put adapters beside the matrices of these towers; those alone and the heads learn from here on."""
    require_extra("peft", "lora", "--recipe lora")
    from peft import LoraConfig, inject_adapter_in_model

    for side in sides:
        tower = model.get_submodule(side)
        tower.requires_grad_(False)
        targets = list(targets_of(tower, what))
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=targets, lora_dropout=0.0, bias="none"
        )
        inject_adapter_in_model(config, tower)


def targets_of(tower: nn.Module, what: str) -> Iterator[str]:
    """Matrices of attention, with `all` of MLPs too; without attention 1 × 1 convolutions, or any matrix."""
    matrices = [name for name, part in tower.named_modules() if isinstance(part, nn.Linear)]
    attention = [name for name in matrices if "attn" in name or "attention" in name]
    if attention:
        yield from attention if what == "attention" else matrices
        return
    parts = [(name, part) for name, part in tower.named_modules() if isinstance(part, nn.Conv2d)]
    narrow = [name for name, part in parts if part.kernel_size == (1, 1) and part.groups == 1]
    yield from narrow or matrices


def has_lora(model: nn.Module) -> bool:
    return any(hasattr(part, "lora_A") for part in model.modules())


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model without adapters that gives the same results."""
    state = model.state_dict()
    if not has_lora(model):
        return state
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" not in name:
            made[name.replace(".base_layer.", ".")] = tensor
    for name, part in model.named_modules():
        if hasattr(part, "lora_A"):
            delta: Any = part.get_delta_weight(NAME)
            made[f"{name}.weight"] = made[f"{name}.weight"] + delta
    return made


def write_apart(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Put the adapters into a file of their own; the weights beside which they stand, by ordinary names."""
    held, scale = {}, 1.0
    for name, part in model.named_modules():
        if hasattr(part, "lora_A"):
            held[f"{name}.A"] = part.lora_A[NAME].weight.detach().cpu().contiguous()
            held[f"{name}.B"] = part.lora_B[NAME].weight.detach().cpu().contiguous()
            scale = float(part.scaling[NAME])
    if held:
        save_tensors(folder / FILES[0], held)
        (folder / FILES[1]).write_text(json.dumps({"kind": "lora", "scale": scale}) + "\n")
    state = model.state_dict()
    return {name.replace(".base_layer.", "."): state[name] for name in state if ".lora_" not in name}


def merge(folder: Path, weights: dict[str, Tensor]) -> None:
    """Add the adapters of a folder to the weights beside them."""
    held, how = load_tensors(folder / FILES[0]), read_json(folder / FILES[1])
    scale = how.get("scale")
    names = {name.rpartition(".")[0] for name in held}
    wrong = [
        name for name in names if f"{name}.weight" not in weights or {f"{name}.A", f"{name}.B"} - held.keys()
    ]
    if wrong or not isinstance(scale, float):
        raise ValueError(
            f"{folder / FILES[0]} does not belong to the weights beside it: {', '.join(sorted(wrong)[:3])}"
        )
    for name in names:
        weight = weights[f"{name}.weight"]
        delta = held[f"{name}.B"].flatten(1) @ held[f"{name}.A"].flatten(1)
        weights[f"{name}.weight"] = weight + scale * delta.view_as(weight)
