"""LoRA: which parameters train, merging, and peft's own adapter format."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import m1clip
from m1clip.config import ModelConfig
from m1clip.files import atomic_folder
from m1clip.model.clip import CLIP
from m1clip.model.lora import add_lora, merged_state_dict, save_adapter
from m1clip.model.pretrained import load_timm
from m1clip.model.tokenizer import Tokenizer

peft = pytest.importorskip("peft", reason="needs m1clip[lora]")
PIXELS, TOKENS = torch.randn(3, 3, 32, 32), torch.tensor([[1, 5, 2], [1, 6, 2], [1, 7, 2]])


def initial(config: ModelConfig) -> CLIP:
    torch.manual_seed(3)
    return CLIP(config).eval()


def fine_tuned(config: ModelConfig, towers: tuple[str, ...] = ("vision", "text")) -> CLIP:
    model = initial(config)
    for tower in (model.vision, model.text):
        tower.requires_grad_(False)
    add_lora(model, towers, 4)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    return model


def embeddings(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.embed_images(PIXELS), model.embed_tokens(TOKENS)])


@pytest.fixture(params=["linear", "mlp"])
def config(tiny, request) -> ModelConfig:
    return replace(tiny, head=request.param)


def test_only_adapters_and_heads_are_trained(config):
    model = initial(config)
    assert merged_state_dict(model).keys() == model.state_dict().keys()
    add_lora(model, ("vision", "text"), 4)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    heads = {name for name in trainable if not name.startswith(("vision.", "text."))}
    assert all(".lora_" in name for name in trainable - heads)
    assert {name.split(".")[0] for name in heads} == {"vision_projection", "text_projection", "logit_scale"}
    assert len(trainable - heads) == 2 * 2 * 4 * 2  # A and B, 2 layers, 4 matrices, 2 towers


@pytest.mark.parametrize("text_is_trained", [False, True])
def test_adapters_of_one_tower_leave_the_other_as_it_is(tiny, text_is_trained):
    model = initial(tiny)
    model.text.requires_grad_(text_is_trained)
    add_lora(model, ("vision",), 4)
    adapted = {name.split(".")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {"vision"}
    assert {weight.requires_grad for weight in model.text.parameters()} == {text_is_trained}


def test_the_merged_state_dict_computes_the_same_without_adapters(config):
    model, plain = fine_tuned(config), CLIP(config).eval()
    assert not torch.allclose(embeddings(model), embeddings(initial(config)), atol=1e-2)
    plain.load_state_dict(merged_state_dict(model))
    torch.testing.assert_close(embeddings(plain), embeddings(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("towers", [("vision", "text"), ("vision",)])
def test_peft_loads_a_saved_adapter(config, towers, tmp_path):
    model = fine_tuned(config, towers)
    save_adapter(model, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    theirs = peft.PeftModel.from_pretrained(initial(config), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(embeddings(theirs), embeddings(model))


def test_a_saved_adapter_is_what_peft_itself_would_save(tiny, tmp_path):
    model = fine_tuned(tiny)
    save_adapter(model, tmp_path / "ours")
    peft.PeftModel.from_pretrained(initial(tiny), str(tmp_path / "ours")).save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_model_folder_may_contain_its_adapter(tiny, tmp_path):
    model = fine_tuned(tiny)
    model.tokenizer = Tokenizer.characters()
    with atomic_folder(tmp_path / "model") as partial:
        model.write(partial)
        save_adapter(model, partial / "adapter")
    loaded = peft.PeftModel.from_pretrained(initial(tiny), str(tmp_path / "model" / "adapter")).eval()
    for same in (loaded, m1clip.load(tmp_path / "model")):
        torch.testing.assert_close(embeddings(same), embeddings(model), rtol=1e-4, atol=1e-5)


def test_pointwise_convolutions_have_adapters_too(tiny):
    pytest.importorskip("timm", reason="needs m1clip[timm]")
    vision = load_timm("timm:test_efficientnet?weights=none").config
    model = initial(replace(tiny, vision=vision))
    add_lora(model, ("vision",), 4)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    convolutions = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Conv2d)}
    assert adapted
    assert all(name.startswith("vision.") for name in adapted)
    assert not adapted & {name for name, m in convolutions.items() if m.kernel_size != (1, 1)}
    plain = CLIP(model.config).eval()
    plain.load_state_dict(merged_state_dict(model))
    size = vision.image_size
    with torch.no_grad():
        pixels = torch.randn(1, 3, size, size)
        torch.testing.assert_close(plain.embed_images(pixels), model.embed_images(pixels))
