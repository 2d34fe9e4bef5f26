import pytest
import torch

from m1clip.config import PRESETS, ModelConfig, TextConfig, VisionConfig
from m1clip.model.clip import CLIP
from m1clip.model.cost import cost


def test_flops_equal_the_arithmetic_of_a_transformer():
    """The last block of captions works for the token of the end alone; its heads look at all tokens whole."""
    vision, text = VisionConfig(64, 16, 128, 3, 4, pool="mean"), TextConfig(100, 20, 64, 2, 2)

    def block(width, tokens):
        return 24 * width**2 * tokens + 4 * tokens**2 * width

    seen = 2 * (3 * 16 * 16) * 128 * 16 + 3 * block(128, 16) + 2 * 128 * 32  # patches, blocks, projection
    told = block(64, 20) + 24 * 64**2 + 4 * 20 * 64 * text.heads + 2 * 64 * 32
    for captions in (1, 5, 12):
        made = cost(ModelConfig(vision, text, 32), captions=captions)
        assert made.forward_gflop * 1e9 == pytest.approx(seen + captions * told, rel=0.01)
        assert made.step_gflop == pytest.approx(3 * made.forward_gflop, rel=0.05)


def test_kept_activations_are_those_of_real_tensors(tiny):
    """The same hooks on real tensors, with the bytes of every distinct storage that is no weight."""
    model = CLIP(tiny)
    weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
    kept, alive = {}, []

    def keep(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(2, tiny.text.context_length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(2, 3, 32, 32), tokens).sum().backward()
    assert cost(tiny).activation_mb == pytest.approx(sum(kept.values()) / 2 / 1e6, rel=0.1)


def test_memory_of_the_seed_preset_is_weights_four_times_and_activations():
    memory = cost(PRESETS["seed"].model).memory_gb(12)
    assert memory["parameters"] == memory["gradients"] == pytest.approx(0.4217, abs=1e-3)
    assert memory["optimizer"] == pytest.approx(0.8434, abs=1e-3)
    # 10 numbers per token, block and feature: two inputs of norms, q k v, attention, and the wide layer
    expected = 12 * 10 * 4 * (197 * 768 * 11 + 77 * 512 * 5) / 1e9
    assert memory["activations"] == pytest.approx(expected, rel=0.1)
