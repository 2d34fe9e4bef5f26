"""Known CLIPs in and out: the numbers open_clip and transformers give, and nothing from a broken file."""

import copy
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import m1clip
from m1clip.config import ModelConfig, TextConfig, VisionConfig
from m1clip.model.clip import CLIP
from m1clip.model.export_clip import export_clip
from m1clip.model.safe_load import WeightMismatch
from m1clip.model.import_clip import OPEN_CLIP, VOCABULARY, Hints, shape_of
from m1clip.model.import_clip import import_clip as open_and_tell
from m1clip.model.safe_load import load_tensors
from m1clip.model.tokenizer import Tokenizer

TOLERANCE = 1e-5
SAID = ["a photo of a cat", "Ünïcode &amp; <b>marks</b>!", "two dogs   run\tin 1999", "it's late", "x" * 400]
# Patches, widths, heads that are not 64 wide, MLPs that are not 4 wide, both activations, all positions.
SHAPES = {
    "quick": ModelConfig(VisionConfig(32, 8, 48, 2, 4), TextConfig(49408, 77, 32, 2, 2), 24, "quick_gelu"),
    "exact": ModelConfig(VisionConfig(42, 14, 64, 3, 1), TextConfig(49408, 20, 128, 1, 2), 40),
    "odd mlp": ModelConfig(VisionConfig(32, 16, 66, 2, 3, mlp=287), TextConfig(49408, 16, 30, 2, 5, mlp=71), 16),
    "biased": ModelConfig(VisionConfig(16, 16, 32, 1, 2), TextConfig(49408, 32, 64, 2, 4), 32, loss="sigmoid"),
}
USUAL = [
    "ViT-B-32",
    "ViT-B-32-quickgelu",
    "ViT-B-32-256",
    "ViT-B-16",
    "ViT-B-16-quickgelu",
    "ViT-B-16-plus-240",
]
USUAL += [
    "ViT-L-14",
    "ViT-L-14-336",
    "ViT-L-14-quickgelu",
    "ViT-L-16",
    "ViT-H-14",
    "ViT-H-16",
    "ViT-g-14",
    "ViT-bigG-14",
]
USUAL += ["ViT-S-32", "ViT-S-16", "ViT-M-16", "ViT-M-32"]


def import_clip(*words, **more):
    return open_and_tell(*words, **more)[0]


@pytest.fixture(scope="session")
def vocabulary() -> Path:
    import open_clip

    return Path(open_clip.__file__).parent / VOCABULARY


def some(config: ModelConfig, words: Tokenizer) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(config, words)
    for weight in model.parameters():  # biases and norms away from 0 and 1, so that none can be confused
        weight.data += 0.02 * torch.randn_like(weight)
    return model.eval()


def images(size: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(3)]


def by_open_clip(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    import open_clip

    theirs, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    words = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.no_grad():
        pixels = torch.stack([prepare(one) for one in images(size)])
        return theirs.eval().encode_image(pixels, normalize=True), theirs.encode_text(words(SAID), normalize=True)


def by_transformers(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    theirs, told = CLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = AutoTokenizer.from_pretrained(folder)(
        [ordinary(one) for one in SAID], padding=True, truncation=True, return_tensors="pt"
    )
    pixels = CLIPImageProcessor.from_pretrained(folder)(images(size), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        out = theirs.eval()(**{k: v for k, v in tokens.items() if k != "token_type_ids"}, pixel_values=pixels)
    return out.image_embeds, out.text_embeds


def ordinary(text: str) -> str:
    """transformers mends no HTML."""
    return text.replace("&amp;", "&")


BY = {"open_clip": by_open_clip, "transformers": by_transformers}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("library", BY)
def test_what_goes_out_gives_the_same_there_and_comes_back_the_same(library, shape, vocabulary, tmp_path):
    ours = some(SHAPES[shape], Tokenizer.from_clip_vocabulary(vocabulary))
    if library == "transformers" and shape == "biased":
        with pytest.raises(ValueError, match="has no bias"):
            convert(ours, library, tmp_path / "out")
        return
    convert(ours, library, tmp_path / "out")
    size = ours.config.vision.image_size
    image, text = BY[library](tmp_path / "out", size)
    assert (ours.encode_image(images(size)) - image).abs().max() <= TOLERANCE
    assert (ours.encode_text([ordinary(one) for one in SAID]) - text).abs().max() <= TOLERANCE
    back = import_clip(str(tmp_path / "out"))
    assert back.config == ours.config
    assert torch.equal(back.tokenize(SAID), ours.tokenize(SAID))
    assert all(torch.equal(back.state_dict()[name], value) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("library", BY)
@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_a_vocabulary_of_our_own_goes_with_the_model(library, kind, tmp_path):
    words = Tokenizer.characters() if kind == "char" else Tokenizer.train_bpe(["a red dog", "a cat on a mat"] * 40, 300)
    ours = some(replace(SHAPES["quick"], text=TextConfig(320, 24, 32, 2, 2)), words)
    convert(ours, library, tmp_path / "out")
    image, text = BY[library](tmp_path / "out", 32)
    assert (ours.encode_text([ordinary(one) for one in SAID]) - text).abs().max() <= TOLERANCE
    assert (ours.encode_image(images(32)) - image).abs().max() <= TOLERANCE
    back = import_clip(str(tmp_path / "out"))
    assert (back.encode_text(SAID) - ours.encode_text(SAID)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", USUAL)
def test_every_usual_vit_of_open_clip_has_a_place(name):
    """Names and shapes alone: a billion weights take no memory here."""
    import open_clip

    config = open_clip.get_model_config(name)
    assert config is not None
    with torch.device("meta"):
        theirs = open_clip.CLIP(**config)
    found = OPEN_CLIP.to_ours(theirs.state_dict())
    assert [*found.missing, *found.unexpected, *found.misshapen] == []
    shape = shape_of(Path(name), OPEN_CLIP, found, Hints())
    with torch.device("meta"):
        want = CLIP(shape).state_dict()
    assert {key: value.shape for key, value in found.tensors.items()} == {k: v.shape for k, v in want.items()}
    vision, text = config["vision_cfg"], config["text_cfg"]
    assert shape.vision.heads == vision["width"] // vision.get("head_width", 64)
    assert (shape.vision.image_size, shape.text.heads) == (vision["image_size"], text["heads"])


@pytest.fixture
def theirs(vocabulary):
    """open_clip's own model, with random weights."""
    import open_clip

    torch.manual_seed(1)
    vision = open_clip.CLIPVisionCfg(2, 128, 64, 4.0, 16, 32)
    text = open_clip.CLIPTextCfg(77, 49408, width=64, heads=1, layers=2)
    return open_clip.CLIP(48, vision, text, quick_gelu=False).eval()


def as_file(theirs, form: str, folder: Path) -> Path:
    state = theirs.state_dict()
    path = folder / f"weights.{'safetensors' if form == 'safetensors' else 'pt'}"
    if form == "safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    elif form == "script":

        class Both(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.visual, self.transformer = theirs.visual, theirs.transformer
                self.token_embedding, self.ln_final = theirs.token_embedding, theirs.ln_final
                for name in ("positional_embedding", "text_projection", "logit_scale"):
                    setattr(self, name, getattr(theirs, name))

            def forward(self, pixels):
                return self.visual(pixels)

        torch.jit.trace(Both(), torch.zeros(1, 3, 32, 32), check_trace=False).save(str(path))
    elif form == "training":
        held = {f"module.{name}": value for name, value in state.items()}
        torch.save({"epoch": 3, "name": "x", "state_dict": held, "optimizer": {"step": torch.zeros(3)}}, path)
    else:
        torch.save({name: value.half() for name, value in state.items()}, path)
    return path


@pytest.mark.parametrize("form", ["safetensors", "script", "training", "half"])
def test_checkpoint_files_of_open_clip_and_openai(form, theirs, tmp_path):
    import open_clip

    ours = import_clip(str(as_file(theirs, form, tmp_path)))
    if form == "half":
        theirs = copy.deepcopy(theirs).half().float()
    pixels = ours.normalize(torch.from_numpy(np.stack([np.asarray(one) for one in images(32)])))
    with torch.no_grad():
        assert (ours.embed_images(pixels) - theirs.encode_image(pixels, normalize=True)).abs().max() <= TOLERANCE
        text = theirs.encode_text(open_clip.tokenize(SAID), normalize=True)
        assert (ours.encode_text(SAID) - text).abs().max() <= TOLERANCE
    assert torch.equal(ours.tokenizer(SAID, 77), open_clip.tokenize(SAID))
    ours.save(tmp_path / "kept")
    assert torch.equal(m1clip.load(tmp_path / "kept").encode_text(SAID), ours.encode_text(SAID))


def test_a_text_tower_of_its_own_class_has_one_prefix_more(theirs, tmp_path):
    held = {
        name if name.startswith(("visual.", "logit_")) else f"text.{name}": value.contiguous()
        for name, value in theirs.state_dict().items()
    }
    save_file(held, tmp_path / "w.safetensors")
    assert import_clip(str(tmp_path / "w.safetensors")).config.text.width == 64


def test_the_activation_is_known_or_asked_for(theirs, tmp_path):
    path = as_file(theirs, "safetensors", tmp_path)
    assert import_clip(str(path)).config.activation == "gelu"
    assert import_clip(str(path), quick=True).config.activation == "quick_gelu"
    shutil.copy(path, tmp_path / "vit-openai.safetensors")
    assert import_clip(str(tmp_path / "vit-openai.safetensors")).config.activation == "quick_gelu"
    told = {
        "model_cfg": {
            "quick_gelu": True,
            "vision_cfg": {"width": 128, "head_width": 32},
            "text_cfg": {"heads": 2},
        }
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(told))
    config = import_clip(str(path)).config
    assert (config.activation, config.vision.heads, config.text.heads) == ("quick_gelu", 4, 2)


def test_weights_that_do_not_fit_are_listed_and_give_no_model(theirs, tmp_path):
    path = as_file(theirs, "safetensors", tmp_path)
    held = load_file(path)
    held.pop("visual.transformer.resblocks.1.mlp.c_fc.bias")
    held["visual.proj"] = held["visual.proj"][:, :40].contiguous()
    held["visual.attn_pool.query"] = torch.zeros(3)
    save_file(held, path)
    with pytest.raises(WeightMismatch) as told:
        import_clip(str(path))
    assert told.value.missing == ["visual.transformer.resblocks.1.mlp.c_fc.bias"]
    assert told.value.unexpected == ["visual.attn_pool.query"]
    assert [name for name, *_ in told.value.misshapen] == ["text_projection"]
    lines = str(told.value).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["missing", "unexpected", "misshapen"]
    half = {name: value for name, value in held.items() if name.startswith("visual.")}
    save_file(half, path)
    with pytest.raises(WeightMismatch, match=r"missing +token_embedding.weight"):
        import_clip(str(path))


def test_what_is_damaged_or_no_clip_gets_a_sentence(theirs, tmp_path):
    for form in ("safetensors", "script", "training"):
        path = as_file(theirs, form, tmp_path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match=r"damaged|cannot be read"):
            import_clip(str(path))
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(WeightMismatch, match=r"unexpected +fc.weight"):
        import_clip(str(tmp_path / "other.safetensors"))
    save_file({"visual.layer1.0.conv1.weight": torch.zeros(2, 2)}, tmp_path / "rn50.safetensors")
    with pytest.raises(ValueError, match="ResNet"):
        import_clip(str(tmp_path / "rn50.safetensors"))
    with pytest.raises(FileNotFoundError, match="hub name"):
        import_clip(str(tmp_path / "nowhere.pt"))


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("ran-code"),))


def test_nothing_in_a_checkpoint_can_run(theirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": theirs.state_dict(), "more": Evil()}, "evil.pt")
    with pytest.raises(ValueError, match="holds more than weights"):
        import_clip("evil.pt")
    import pickle
    import zipfile

    with zipfile.ZipFile("script.pt", "w") as file:
        file.writestr("script/constants.pkl", b"")
        file.writestr("script/data.pkl", pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="no weight"):
        load_tensors(Path("script.pt"))
    assert not Path("ran-code").exists()


def test_a_model_without_a_counterpart_is_refused(tmp_path):
    light = replace(SHAPES["quick"], vision=replace(SHAPES["quick"].vision, stem="conv", pool="mean"))
    with pytest.raises(ValueError, match="conv stem"):
        convert(some(light, Tokenizer.characters()), "transformers", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_convert_on_the_command_line(tmp_path):
    words = Tokenizer.characters()
    some(replace(SHAPES["quick"], text=TextConfig(40, 24, 32, 2, 2)), words).save(tmp_path / "mine")
    command = [sys.executable, "-m", "m1clip", "convert", str(tmp_path / "mine"), "--to", "open_clip"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine-open_clip" / "open_clip_config.json").is_file()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    back = [sys.executable, "-m", "m1clip", "convert", str(tmp_path / "mine-open_clip"), "--to", "m1clip"]
    assert subprocess.run([*back, "--out", str(tmp_path / "back")], capture_output=True).returncode == 0
    assert m1clip.load(tmp_path / "back").config == m1clip.load(tmp_path / "mine").config


@pytest.mark.parametrize(
    "change",
    [
        {"text_cfg": {"no_causal_mask": True}},
        {"text_cfg": {"pool_type": "last"}},
        {"vision_cfg": {"pool_type": "avg"}},
        {"vision_cfg": {"norm_kwargs": {"eps": 1e-3}}},
        {"preprocess_cfg": {"resize_mode": "squash"}},
    ],
)
def test_a_configuration_of_another_function_is_refused(change, theirs, tmp_path):
    path = as_file(theirs, "safetensors", tmp_path)
    towers = {
        "vision_cfg": {"width": 128, "pool_type": "tok"},
        "text_cfg": {"heads": 1, "no_causal_mask": False},
    }
    held = {"model_cfg": towers, "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "resize_mode": "shortest"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(held))
    assert import_clip(str(path)).config.vision.mean == (0.5, 0.5, 0.5)
    for part, values in change.items():
        (held if part == "preprocess_cfg" else towers)[part] |= values
    (tmp_path / "open_clip_config.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match=rf"{next(iter(next(iter(change.values()))))} = "):
        import_clip(str(path))


def test_a_tokenizer_of_another_table_is_refused(theirs, tmp_path):
    path = as_file(theirs, "safetensors", tmp_path)
    Tokenizer.characters().save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"49,408 tokens, the tokenizer found for it 33"):
        import_clip(str(path))


def test_what_is_guessed_is_told(theirs, tmp_path):
    path = as_file(theirs, "safetensors", tmp_path)
    assert "names their activation" in open_and_tell(str(path))[1]
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": {"text_cfg": {"heads": 1}, "vision_cfg": {"width": 128}}})
    )
    assert open_and_tell(str(path))[1] == ""


def test_a_damaged_archive_never_hangs_or_crashes(theirs, tmp_path):
    whole = as_file(theirs, "script", tmp_path).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(25):
        broken = bytearray(whole)
        for place in rng.integers(0, len(whole), 40):
            broken[place] ^= 0xFF
        (tmp_path / "broken.pt").write_bytes(broken)
        with suppress(ValueError):  # some bytes are but weights, and nobody can see that they changed
            load_tensors(tmp_path / "broken.pt")


def test_new_heads_have_no_counterpart(tmp_path):
    model = some(replace(SHAPES["quick"], text=TextConfig(40, 24, 32, 2, 2), head="mlp"), Tokenizer.characters())
    with pytest.raises(ValueError, match="mlp heads"):
        convert(model, "open_clip", tmp_path / "out")
