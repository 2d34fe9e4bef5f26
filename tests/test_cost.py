"""Parameters, FLOPs and memory against arithmetic and real tensors."""

import json

import pytest
import torch

from m1clip.commands import info, parse_flags
from m1clip.config import PRESETS, ModelConfig, TextConfig, VisionConfig
from m1clip.model.clip import CLIP
from m1clip.model.cost import model_cost


def test_flops_equal_the_arithmetic_of_a_transformer():
    """The last text block has one query per caption, whose heads attend to whole tokens."""
    vision, text = VisionConfig(64, 16, 128, 3, 4, pool="mean"), TextConfig(100, 20, 64, 2, 2)

    def block(width, tokens):
        return 24 * width**2 * tokens + 4 * tokens**2 * width

    image_flop = 2 * (3 * 16 * 16) * 128 * 16 + 3 * block(128, 16) + 2 * 128 * 32  # stem, blocks, head
    caption_flop = block(64, 20) + 24 * 64**2 + 4 * 20 * 64 * text.heads + 2 * 64 * 32
    for captions in (1, 5, 12):
        cost = model_cost(ModelConfig(vision, text, 32), captions=captions)
        assert cost.forward_gflop * 1e9 == pytest.approx(image_flop + captions * caption_flop, rel=0.01)
        assert cost.step_gflop == pytest.approx(3 * cost.forward_gflop, rel=0.05)


def test_stored_activations_are_those_of_real_tensors(tiny):
    model = CLIP(tiny)
    weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
    saved, references = {}, []

    def record(tensor):
        references.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(2, tiny.text.context_length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(torch.zeros(2, 3, 32, 32), tokens).sum().backward()
    assert model_cost(tiny).activation_mb == pytest.approx(sum(saved.values()) / 2 / 1e6, rel=0.1)


def test_memory_of_vit_b16_char_is_four_times_the_weights_and_the_activations():
    memory = model_cost(PRESETS["vit-b16-char"].model).memory_gb(12)
    assert memory["parameters"] == memory["gradients"] == pytest.approx(0.4217, abs=1e-3)
    assert memory["optimizer"] == pytest.approx(0.8434, abs=1e-3)
    # 10 values per token, block and feature: inputs of two norms, q, k, v, attention, and 4 of the wide layer
    expected = 12 * 10 * 4 * (197 * 768 * 11 + 77 * 512 * 5) / 1e9
    assert memory["activations"] == pytest.approx(expected, rel=0.1)


def call_info(*argv: str) -> None:
    info.main(parse_flags(info.Args, "m1clip info", argv))


def test_info_prints_the_cost_of_a_preset(capsys):
    call_info("--preset", "vit-b16-char", "--batch-size", "3", "--json")
    preset, cost = json.loads(capsys.readouterr().out), model_cost(PRESETS["vit-b16-char"].model)
    assert (preset["total"], preset["batch_size"]) == (105_426_433, 3)
    assert (preset["step_gflop"], preset["memory_gb"]) == (cost.step_gflop, cost.memory_gb(3))
    call_info("--preset", "vit-b16-char")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["total", "105,426,433"] in lines
    assert ["embedding", "512", "dimensions"] in lines


def test_info_lists_the_presets_and_refuses_unknown_ones(capsys, monkeypatch):
    monkeypatch.setattr(info, "PRESETS", {name: PRESETS[name] for name in ("nano", "tiny")})  # the fast ones
    call_info()
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert [name for name in names if name in PRESETS] == ["nano", "tiny"]
    with pytest.raises(ValueError, match="did you mean nano"):
        call_info("--preset", "nanno")
    with pytest.raises(ValueError, match="--batch-size must be at least 1 and at most 10,000,000, not 0"):
        call_info("--batch-size", "0")
