"""The same weights in open_clip's and transformers' CLIP give the same embeddings, loss and gradients."""

import pytest
import torch
import torch.nn.functional as F

from m1clip import losses
from m1clip.config import ModelConfig, TextConfig, VisionConfig
from m1clip.model.clip import CLIP
from m1clip.model.interop import OPEN_CLIP, TRANSFORMERS

TOLERANCE = 1e-5

SHAPES = {
    "small": ModelConfig(VisionConfig(32, 8, 48, 3, 4), TextConfig(99, 20, 32, 2, 2), 24),
    "quick": ModelConfig(VisionConfig(48, 16, 64, 2, 1), TextConfig(300, 16, 64, 3, 4), 40, activation="quick_gelu"),
}


def to_open_clip(ours: CLIP) -> torch.nn.Module:
    import open_clip

    vision, text = ours.config.vision, ours.config.text
    theirs = open_clip.CLIP(
        ours.config.embed_dim,
        open_clip.CLIPVisionCfg(
            vision.layers, vision.width, vision.width // vision.heads, 4.0, vision.patch_size, vision.image_size
        ),
        open_clip.CLIPTextCfg(
            text.context_length, text.vocab_size, width=text.width, heads=text.heads, layers=text.layers
        ),
        quick_gelu=ours.config.activation == "quick_gelu",
    )
    theirs.load_state_dict(OPEN_CLIP.from_ours(ours.state_dict()))
    return theirs


def to_transformers(ours: CLIP) -> torch.nn.Module:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    vision, text, act = ours.config.vision, ours.config.text, ours.config.activation
    shared = {"hidden_act": act, "projection_dim": ours.config.embed_dim}
    theirs = CLIPModel(
        CLIPConfig(
            text_config=CLIPTextConfig(
                vocab_size=text.vocab_size,
                hidden_size=text.width,
                intermediate_size=4 * text.width,
                num_hidden_layers=text.layers,
                num_attention_heads=text.heads,
                max_position_embeddings=text.context_length,
                bos_token_id=1,
                eos_token_id=ours.text.end_id,
                **shared,
            ).to_dict(),
            vision_config=CLIPVisionConfig(
                hidden_size=vision.width,
                intermediate_size=4 * vision.width,
                num_hidden_layers=vision.layers,
                num_attention_heads=vision.heads,
                image_size=vision.image_size,
                patch_size=vision.patch_size,
                **shared,
            ).to_dict(),
            projection_dim=ours.config.embed_dim,
        )
    )
    missing, unexpected = theirs.load_state_dict(TRANSFORMERS.from_ours(ours.state_dict()), strict=False)
    assert not unexpected
    assert all("position_ids" in key for key in missing)
    return theirs


def encode_with_open_clip(theirs, pixels, tokens):
    return theirs.encode_image(pixels, normalize=True), theirs.encode_text(tokens, normalize=True)


def encode_with_transformers(theirs, pixels, tokens):
    out = theirs(input_ids=tokens, pixel_values=pixels)
    return out.image_embeds, out.text_embeds


PEERS = {
    "open_clip": (to_open_clip, encode_with_open_clip),
    "transformers": (to_transformers, encode_with_transformers),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("library", PEERS)
def test_embeddings_loss_and_gradients_equal_the_peers(library, shape):
    torch.manual_seed(0)
    ours = CLIP(SHAPES[shape])
    ours.text.end_id = ours.config.text.vocab_size - 1  # open_clip looks for the highest id
    for weight in ours.parameters():  # biases and norms away from 0 and 1, so that none are interchangeable
        weight.data += 0.02 * torch.randn_like(weight)
    convert, encode = PEERS[library]
    theirs = convert(ours)
    text = ours.config.text
    tokens = torch.randint(1, ours.text.end_id, (6, text.context_length))
    for row, end in zip(tokens, (text.context_length - 1, 3, 7, 9, 2, 5), strict=True):
        row[end], row[end + 1 :] = ours.text.end_id, 0
    pixels = torch.randn(6, 3, ours.config.vision.image_size, ours.config.vision.image_size)

    our_image, our_text = ours.embed_images(pixels), ours.embed_tokens(tokens)
    their_image, their_text = encode(theirs, pixels, tokens)
    assert (our_image - their_image).abs().max() <= TOLERANCE
    assert (our_text - their_text).abs().max() <= TOLERANCE

    our_loss = losses.softmax_loss(ours.logits(our_image, our_text))
    logits = theirs.logit_scale.exp() * their_image @ their_text.T
    target = torch.arange(6)
    their_loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    assert abs(our_loss - their_loss) <= TOLERANCE
    our_loss.backward()
    their_loss.backward()

    # Our gradients under the peer's names, by the mapping that converted the weights.
    grads = CLIP(ours.config)
    grads.load_state_dict({name: weight.grad for name, weight in ours.named_parameters()})
    expected = {name: value for name, value in convert(grads).state_dict().items() if "position_ids" not in name}
    for name, weight in theirs.named_parameters():
        assert (weight.grad - expected[name]).abs().max() <= TOLERANCE, name
