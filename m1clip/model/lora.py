"""LoRA (Hu et al. 2021) with peft: add adapters, merge them, save them in peft's own format."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from m1clip.model.pretrained import require_extra
from m1clip.model.safe_load import save_tensors

ADAPTER = "default"  # peft's name for the first adapter
HEAD_MODULES = ("vision_projection", "text_projection")


def add_lora(model: nn.Module, towers: Sequence[str], rank: int) -> None:
    """Freeze these towers and add adapters to their linear layers and 1 × 1 convolutions."""
    require_extra("peft", "lora", "--recipe lora")
    from peft import LoraConfig, inject_adapter_in_model

    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    layers = [name for name, layer in model.named_modules() if name.split(".")[0] in towers and is_linear(layer)]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers)
    inject_adapter_in_model(config, model)  # freezes all other parameters
    for name, weight in trainable.items():
        weight.requires_grad_(name.split(".")[0] not in towers)


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is called as a product with a matrix; the output of nn.MultiheadAttention is not called."""
    pointwise = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
    return pointwise or (isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear))


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without adapters that computes the same."""
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            state[f"{name}.weight"] = state[f"{name}.weight"] + layer.get_delta_weight(ADAPTER)
    return state


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write adapters and projection heads for `PeftModel.from_pretrained(initial_model, folder)`."""
    from peft import get_peft_model_state_dict

    config: Any = copy.copy(model.peft_config[ADAPTER])  # type: ignore[index]
    config.modules_to_save, config.inference_mode = [*HEAD_MODULES], True
    config.target_modules = sorted(config.target_modules)  # the order of a set differs between processes
    config.save_pretrained(folder)
    heads = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEAD_MODULES)}
    tensors = {**get_peft_model_state_dict(model), **heads}
    # base_model.model is the path through peft's wrappers.
    tensors = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
