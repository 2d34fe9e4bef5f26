"""Import and export of CLIPs of open_clip, OpenAI and transformers: equal numbers, unsafe files refused."""

import copy
import json
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import m1clip
from m1clip.config import PRESETS, ModelConfig, TextConfig, VisionConfig
from m1clip.model.clip import CLIP
from m1clip.model.interop import OPEN_CLIP, export_clip, exportable_towers
from m1clip.model.pretrained_clip import import_clip, infer_config
from m1clip.model.safe_load import WeightMismatch, load_tensors
from m1clip.model.tokenizer import VOCABULARY, Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
TOLERANCE = 1e-5
CAPTIONS = ["a photo of a cat", "Ünïcode &amp; <b>marks</b>!", "two dogs   run\tin 1999", "it's late", "x" * 400]
# Patch sizes, widths, head widths other than 64, MLPs other than 4 x width, both activations, all positions.
SHAPES = {
    "quick": ModelConfig(VisionConfig(32, 8, 48, 2, 4), TextConfig(49408, 77, 32, 2, 2), 24, "quick_gelu"),
    "exact": ModelConfig(VisionConfig(42, 14, 64, 3, 1), TextConfig(49408, 20, 128, 1, 2), 40),
    "odd mlp": ModelConfig(
        VisionConfig(32, 16, 66, 2, 3, mlp_width=287), TextConfig(49408, 16, 30, 2, 5, mlp_width=71), 16
    ),
    "biased": ModelConfig(VisionConfig(16, 16, 32, 1, 2), TextConfig(49408, 32, 64, 2, 4), 32, loss="sigmoid"),
}
SMALL_VOCAB = replace(SHAPES["quick"], text=TextConfig(320, 24, 32, 2, 2))
OPEN_CLIP_MODELS = (
    *("ViT-B-32", "ViT-B-32-quickgelu", "ViT-B-32-256", "ViT-B-16", "ViT-B-16-quickgelu", "ViT-B-16-plus-240"),
    *("ViT-L-14", "ViT-L-14-336", "ViT-L-14-quickgelu", "ViT-L-16", "ViT-H-14", "ViT-H-16", "ViT-g-14"),
    *("ViT-bigG-14", "ViT-S-32", "ViT-S-16", "ViT-M-16", "ViT-M-32"),
)


@pytest.fixture(scope="session")
def vocabulary() -> Path:
    import open_clip

    return Path(open_clip.__file__).parent / VOCABULARY


@pytest.fixture
def theirs() -> torch.nn.Module:
    """open_clip's own model with random weights."""
    import open_clip

    torch.manual_seed(1)
    vision = open_clip.CLIPVisionCfg(2, 128, 64, 4.0, 16, 32)
    text = open_clip.CLIPTextCfg(77, 49408, width=64, heads=1, layers=2)
    return open_clip.CLIP(48, vision, text, quick_gelu=False).eval()


def random_clip(config: ModelConfig, tokenizer: Tokenizer) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(config, tokenizer)
    for weight in model.parameters():  # biases and norms away from 0 and 1, so that none are interchangeable
        weight.data += 0.02 * torch.randn_like(weight)
    return model.eval()


def images(size: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(3)]


def encode_with_open_clip(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(CAPTIONS)
    pixels = torch.stack([preprocess(image) for image in images(size)])
    with torch.no_grad():
        return model.eval().encode_image(pixels, normalize=True), model.encode_text(tokens, normalize=True)


def encode_with_transformers(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    model, info = CLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = AutoTokenizer.from_pretrained(folder)(
        [unescape(text) for text in CAPTIONS], padding=True, truncation=True, return_tensors="pt"
    )
    pixels = CLIPImageProcessor.from_pretrained(folder)(images(size), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        out = model.eval()(**{k: v for k, v in tokens.items() if k != "token_type_ids"}, pixel_values=pixels)
    return out.image_embeds, out.text_embeds


def unescape(text: str) -> str:
    """transformers does not decode HTML entities."""
    return text.replace("&amp;", "&")


ENCODE = {"open_clip": encode_with_open_clip, "transformers": encode_with_transformers}


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("library", ENCODE)
def test_an_exported_model_gives_the_same_embeddings_and_is_imported_unchanged(library, shape, vocabulary, tmp_path):
    ours = random_clip(SHAPES[shape], Tokenizer.from_clip_vocabulary(vocabulary))
    if library == "transformers" and shape == "biased":
        with pytest.raises(ValueError, match="logit bias"):
            export_clip(ours, library, tmp_path / "out")
        return
    export_clip(ours, library, tmp_path / "out")
    size = ours.config.vision.image_size
    image, text = ENCODE[library](tmp_path / "out", size)
    assert_same(ours.encode_image(images(size)), image)
    assert_same(ours.encode_text([unescape(caption) for caption in CAPTIONS]), text)
    imported, note = import_clip(str(tmp_path / "out"))
    offset = "floor" if library == "transformers" else "round"  # of a crop by half a pixel
    assert note == ""
    assert imported.config == replace(ours.config, vision=replace(ours.config.vision, crop_offset=offset))
    assert torch.equal(imported.tokenize(CAPTIONS), ours.tokenize(CAPTIONS))
    assert all(torch.equal(imported.state_dict()[name], value) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("library", ENCODE)
@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_an_exported_model_keeps_its_own_vocabulary(library, kind, tmp_path):
    bpe = Tokenizer.train_bpe(["a red dog", "a cat on a mat"] * 40, 300)
    ours = random_clip(SMALL_VOCAB, Tokenizer.characters() if kind == "char" else bpe)
    export_clip(ours, library, tmp_path / "out")
    image, text = ENCODE[library](tmp_path / "out", 32)
    assert_same(ours.encode_text([unescape(caption) for caption in CAPTIONS]), text)
    assert_same(ours.encode_image(images(32)), image)
    imported, _ = import_clip(str(tmp_path / "out"))
    assert_same(imported.encode_text(CAPTIONS), ours.encode_text(CAPTIONS))


@pytest.mark.parametrize("name", OPEN_CLIP_MODELS)
def test_the_configuration_of_every_open_clip_vit_is_inferred(name):
    """From names and shapes, on the meta device."""
    import open_clip

    config = open_clip.get_model_config(name)
    with torch.device("meta"):
        theirs = open_clip.CLIP(**config)
    weights = {key: value for key, value in theirs.state_dict().items() if key != "attn_mask"}
    inferred = infer_config(Path(name), OPEN_CLIP, weights)
    with torch.device("meta"):
        expected = OPEN_CLIP.from_ours(CLIP(inferred).state_dict())
    assert {key: value.shape for key, value in weights.items()} == {k: v.shape for k, v in expected.items()}
    vision, text = config["vision_cfg"], config["text_cfg"]
    assert inferred.vision.heads == vision["width"] // vision.get("head_width", 64)
    assert (inferred.vision.image_size, inferred.text.heads) == (vision["image_size"], text["heads"])


def save_checkpoint(theirs, form: str, folder: Path) -> Path:
    state = theirs.state_dict()
    path = folder / f"weights.{'safetensors' if form == 'safetensors' else 'pt'}"
    if form == "safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    elif form == "torchscript":

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
        model = {f"module.{name}": value for name, value in state.items()}
        torch.save({"epoch": 3, "name": "x", "state_dict": model, "optimizer": {"step": torch.zeros(3)}}, path)
    else:
        torch.save({name: value.half() for name, value in state.items()}, path)
    return path


@pytest.mark.parametrize("form", ["safetensors", "torchscript", "training", "half"])
def test_checkpoint_files_give_the_embeddings_of_open_clip(form, theirs, tmp_path):
    import open_clip

    ours, _ = import_clip(str(save_checkpoint(theirs, form, tmp_path)))
    if form == "half":
        theirs = copy.deepcopy(theirs).half().float()
    pixels = ours.normalize(torch.from_numpy(np.stack([np.asarray(image) for image in images(32)])))
    with torch.no_grad():
        assert_same(ours.embed_images(pixels), theirs.encode_image(pixels, normalize=True))
        text = theirs.encode_text(open_clip.tokenize(CAPTIONS), normalize=True)
        assert_same(ours.encode_text(CAPTIONS), text)
    assert torch.equal(ours.tokenize(CAPTIONS), open_clip.tokenize(CAPTIONS))
    ours.save(tmp_path / "saved")
    assert torch.equal(m1clip.load(tmp_path / "saved").encode_text(CAPTIONS), ours.encode_text(CAPTIONS))


def test_the_prefix_of_open_clips_custom_text_models_is_removed(theirs, tmp_path):
    weights = {
        name if name.startswith(("visual.", "logit_")) else f"text.{name}": value.contiguous()
        for name, value in theirs.state_dict().items()
    }
    save_file(weights, tmp_path / "w.safetensors")
    ours, _ = import_clip(str(tmp_path / "w.safetensors"))
    assert torch.equal(ours.state_dict()["text.token.weight"], theirs.token_embedding.weight)


def test_the_activation_comes_from_the_configuration_the_file_name_or_the_caller(theirs, tmp_path):
    path = save_checkpoint(theirs, "safetensors", tmp_path)
    ours, note = import_clip(str(path))
    assert ours.config.activation == "gelu"
    assert f"m1clip export {path} --to m1clip --quick-gelu" in note
    ours, note = import_clip(str(path), quick_gelu=True)
    assert (ours.config.activation, note) == ("quick_gelu", "")
    shutil.copy(path, tmp_path / "vit-openai.safetensors")
    ours, note = import_clip(str(tmp_path / "vit-openai.safetensors"))
    assert (ours.config.activation, note) == ("quick_gelu", "")
    towers = {"vision_cfg": {"width": 128, "head_width": 32}, "text_cfg": {"heads": 2}}
    config = {"model_cfg": {"quick_gelu": True, **towers}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    ours, note = import_clip(str(path))
    settings = (ours.config.activation, ours.config.vision.heads, ours.config.text.heads)
    assert (settings, note) == (("quick_gelu", 4, 2), "")


def test_weights_that_do_not_fit_are_counted_with_an_example(theirs, tmp_path):
    path = save_checkpoint(theirs, "safetensors", tmp_path)
    weights = load_file(path)
    weights.pop("visual.transformer.resblocks.1.mlp.c_fc.bias")
    weights["visual.proj"] = weights["visual.proj"][:, :40].contiguous()
    weights["visual.attn_pool.query"] = torch.zeros(3)
    save_file(weights, path)
    with pytest.raises(WeightMismatch) as error:
        import_clip(str(path))
    assert str(error.value).partition("do not fit the model: ")[2] == (
        "1 missing (such as visual.transformer.resblocks.1.mlp.c_fc.bias), "
        "1 unexpected (such as visual.attn_pool.query), "
        "1 misshapen (such as text_projection  64 × 48 in the file, 64 × 40 in the model)"
    )
    save_file({name: value for name, value in weights.items() if name.startswith("visual.")}, path)
    with pytest.raises(WeightMismatch, match=r"missing \(such as ln_final|missing \(such as positional"):
        import_clip(str(path))


def test_damaged_files_and_other_models_are_refused(theirs, tmp_path):
    for form in ("safetensors", "torchscript", "training"):
        path = save_checkpoint(theirs, form, tmp_path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match=r"damaged|cannot be read"):
            import_clip(str(path))
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a CLIP of OpenAI, open_clip or transformers"):
        import_clip(str(tmp_path / "other.safetensors"))
    resnet = {name: torch.zeros(2, 2) for name in ("visual.conv1.weight", "visual.layer1.0.conv1.weight")}
    save_file(resnet, tmp_path / "rn50.safetensors")
    with pytest.raises(ValueError, match="is a CLIP with a ResNet; --model-name"):
        import_clip(str(tmp_path / "rn50.safetensors"))
    with pytest.raises(FileNotFoundError, match="hub name"):
        import_clip(str(tmp_path / "nowhere.pt"))


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("ran-code"),))


def test_no_code_in_a_checkpoint_runs(theirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": theirs.state_dict(), "more": Evil()}, "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt is refused: it asks for getattr, .* nothing in it was run"):
        import_clip("evil.pt")
    with zipfile.ZipFile("script.pt", "w") as archive:
        archive.writestr("script/constants.pkl", b"")
        archive.writestr("script/data.pkl", pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"is refused: it asks for .* nothing in it was run"):
        load_tensors(Path("script.pt"))
    assert not Path("ran-code").exists()


def test_a_damaged_archive_never_hangs_or_crashes(theirs, tmp_path):
    archive = save_checkpoint(theirs, "torchscript", tmp_path).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(25):
        damaged = bytearray(archive)
        for offset in rng.integers(0, len(archive), 40):
            damaged[offset] ^= 0xFF
        (tmp_path / "damaged.pt").write_bytes(damaged)
        with suppress(ValueError):  # changed weights alone cannot be detected
            load_tensors(tmp_path / "damaged.pt")


def test_a_configuration_of_transformers_with_another_end_token_than_its_tokenizer_is_refused(tmp_path):
    export_clip(random_clip(SMALL_VOCAB, Tokenizer.characters()), "transformers", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="end token 7"):
        import_clip(str(tmp_path))


def test_a_tokenizer_of_another_vocabulary_is_refused(theirs, tmp_path):
    path = save_checkpoint(theirs, "safetensors", tmp_path)
    Tokenizer.characters().save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"49,408 tokens, but the tokenizer has 33"):
        import_clip(str(path))


CONV_STEM = replace(SMALL_VOCAB, vision=replace(SMALL_VOCAB.vision, stem="conv", pool="mean"))
NOT_EXPORTABLE = {
    "conv stem and mean pooling": CONV_STEM,
    "mlp head": replace(SMALL_VOCAB, head="mlp"),
    "bag_of_words text encoder": replace(SMALL_VOCAB, text=TextConfig(320, 24, 32, 2, 2, 0, "bag_of_words")),
    "logit bias": replace(SMALL_VOCAB, loss="sigmoid"),
}


@pytest.fixture(scope="module")
def train_help() -> str:
    command = [sys.executable, "-m", "m1clip", "train", "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("reason", NOT_EXPORTABLE)
def test_a_model_that_cannot_be_exported_is_refused_with_flags_that_exist(reason, tmp_path, train_help):
    with pytest.raises(ValueError, match=reason) as error:
        export_clip(random_clip(NOT_EXPORTABLE[reason], Tokenizer.characters()), "transformers", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    message = str(error.value)
    flags = re.findall(r"--[\w.-]+", message.replace("--to open_clip", ""))
    assert flags
    assert all(flag in train_help for flag in flags), message
    for preset in re.findall(r"--preset (\w+)", message):
        assert exportable_towers(PRESETS[preset].model, "transformers")


def test_export_to_libraries_on_the_command_line(tmp_path):
    random_clip(SMALL_VOCAB, Tokenizer.characters()).save(tmp_path / "mine")

    def export(*argv: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "m1clip", "export", *map(str, argv)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = export(tmp_path / "mine", "--to", "open_clip")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine-open_clip" / "open_clip_config.json").is_file()
    again = export(tmp_path / "mine", "--to", "open_clip")
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    back = export(tmp_path / "mine-open_clip", "--to", "m1clip", "--out", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    assert m1clip.load(tmp_path / "back").config == m1clip.load(tmp_path / "mine").config


def test_the_advice_about_the_activation_works_on_the_command_line(theirs, tmp_path):
    folder = tmp_path / "my models"
    folder.mkdir()
    path = save_checkpoint(theirs, "safetensors", folder)
    _, note = import_clip(str(path))
    command = shlex.split(note[note.index("m1clip export") :])
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert m1clip.load(folder / "weights-m1clip").config.activation == "quick_gelu"
