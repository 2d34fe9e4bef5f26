"""LoRA (Hu et al. 2021) with peft: add adapters, merge them, save and load them in peft's own format."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.model.pretrained import require_extra
from m1clip.model.safe_load import check_weights, load_tensors, read_json, save_tensors

ADAPTER = "default"  # peft's name for the first adapter
HEAD_MODULES = ("vision_projection", "text_projection")
PREFIX = "base_model.model."  # of the names in an adapter file: the path through peft's wrappers
# Settings that change what adapters compute. Others are not read: one can name a module to be imported.
SETTINGS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora")


def add_lora(model: nn.Module, towers: Iterable[str], rank: int) -> None:
    """Freeze these towers and add adapters to their linear layers and 1 × 1 convolutions."""
    require_extra("peft", "lora", "--recipe lora")
    towers = tuple(towers)
    layers = [f"{tower}.{name}" for tower in towers for name in linear_layers(model.get_submodule(tower))]
    _inject(model, towers, {"r": rank, "lora_alpha": 2 * rank, "target_modules": layers})


def linear_layers(tower: nn.Module) -> list[str]:
    return [
        name
        for name, layer in tower.named_modules()
        if isinstance(layer, nn.Linear)
        or (isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1)
    ]


def _inject(model: nn.Module, towers: tuple[str, ...], settings: dict[str, Any]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    inject_adapter_in_model(LoraConfig(**settings), model)  # freezes all other parameters
    for name, weight in trainable.items():
        weight.requires_grad_(name.split(".")[0] not in towers)


def has_lora(model: nn.Module) -> bool:
    return any(hasattr(layer, "lora_A") for layer in model.modules())


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without adapters that computes the same."""
    state = model.state_dict()
    if not has_lora(model):
        return state
    base = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in base.items()}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            delta: Any = layer.get_delta_weight(ADAPTER)
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + delta
    return merged


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapters and the projection heads as `PeftModel.save_pretrained` does.

    `PeftModel.from_pretrained(initial_model, folder)` then gives the embeddings of this model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = copy.copy(model.peft_config[ADAPTER])  # type: ignore[index]
    config.modules_to_save, config.inference_mode = [*HEAD_MODULES], True
    config.save_pretrained(folder)
    tensors = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in adapter_state_dict(model).items()}
    save_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    heads = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEAD_MODULES)}
    return {**get_peft_model_state_dict(model), **heads}


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Add saved adapters to the model they were trained from, and replace its projection heads."""
    require_extra("peft", "lora", f"the adapter {folder}")
    from peft import set_peft_model_state_dict

    path, config = folder / "adapter_model.safetensors", read_json(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} is a {config.get('peft_type')} adapter; only LORA can be loaded")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_tensors(path).items()}
    _inject(model, ("vision", "text"), {key: config[key] for key in SETTINGS if key in config})
    check_weights(path, tensors, adapter_state_dict(model))
    heads = {name: tensors.pop(name) for name in [*tensors] if name.startswith(HEAD_MODULES)}
    model.load_state_dict(heads, strict=False)
    set_peft_model_state_dict(model, tensors)
