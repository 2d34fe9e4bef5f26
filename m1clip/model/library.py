"""Towers of open_clip's and transformers' CLIPs that ours cannot compute: the library's own modules; their tokenizers.

Such a tower includes the model's projection; our projection head behind it starts as the identity.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import tokenizers
import torch
from torch import Tensor

from m1clip import devices, hub
from m1clip.config import LibraryTextConfig, LibraryVisionConfig, TokenizerSettings, require
from m1clip.errors import short_error, untrusted_input
from m1clip.files import JSON_BYTES, read_file, read_json
from m1clip.model.pretrained import (
    BUILD_ERRORS,
    PretrainedTower,
    avoid_fused_attention,
    build_bounded,
    clean_hf_config,
    create_hf,
    parse_hf_config,
    require_extra,
)
from m1clip.model.safe_load import check_settings, download_from_hub
from m1clip.model.tokenizer import (
    TOKENIZER_BYTES,
    VOCABULARY_BYTES,
    HFTokenizer,
    Tokenizer,
    build_core,
    find_clip_tokenizer,
)
from m1clip.model.tokenizer_check import check_tokenizer_state

Settings = Mapping[str, Any]
# open_clip builds both towers at once; the one that is not used is this small.
TINY_VISION = {"layers": 1, "width": 8, "head_width": 8, "patch_size": 8, "image_size": 8}
TINY_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}
# Parts of a dual encoder of transformers that a tower does not need.
OTHER_PARTS = {"vision": ("text_", "logit_", "temperature"), "text": ("vision_", "visual_", "logit_", "temperature")}
LARGE_JSON = ("tokenizer.json", "vocab.json")
TOKENIZER_JSON = (*LARGE_JSON, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
VOCABULARIES = ("vocab.txt", "merges.txt", "dict.txt", "bpe.codes", "*.model", "*.spm", "*.tiktoken")
MAX_ENTRIES = 2_000_000  # of a vocabulary; LaBSE has 500,000, and sentencepiece's two bytes each
WITHOUT_MASK = ("siglip", "siglip2")  # trained with captions padded to their full length, and no attention mask


class LibraryVision(PretrainedTower):
    def __init__(self, config: LibraryVisionConfig):
        super().__init__()
        self.config, self.net = config, build_net(config, "vision")
        self.train()

    def forward(self, pixels_BCHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        if self.config.library == "open_clip":
            return first_output(self.net(devices.to_channels_last(pixels_BCHW)))
        inputs = {"pixel_values": pixels_BCHW}
        if self.config.settings["model_type"] == "siglip2":
            inputs = naflex_patches(pixels_BCHW, self.net.config.vision_config.patch_size)
        output = self.net.get_image_features(**inputs)
        return output.pooler_output


class LibraryText(PretrainedTower):
    def __init__(self, config: LibraryTextConfig):
        super().__init__()
        self.config, self.net = config, build_net(config, "text")
        self.train()

    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        if self.config.library == "open_clip":
            return first_output(self.net(tokens_BL))
        mask = {}
        if self.config.settings["model_type"] not in WITHOUT_MASK:
            mask["attention_mask"] = (tokens_BL != self.config.tokenizer.pad_id).long()
        return self.net.get_text_features(input_ids=tokens_BL, **mask).pooler_output


def first_output(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The embedding; towers of CoCa also return their tokens."""
    return output[0] if isinstance(output, tuple) else output


def naflex_patches(pixels_BCHW: Tensor, patch: int) -> dict[str, Tensor]:
    """SigLIP 2's input for images of any shape, here of square ones: patches, their mask, and their grid."""
    B, C, H, W = pixels_BCHW.shape
    patches = pixels_BCHW.unfold(2, patch, patch).unfold(3, patch, patch)  # B, C, rows, columns, height, width
    patches_BLX = patches.permute(0, 2, 3, 4, 5, 1).reshape(B, -1, patch * patch * C)
    grid = torch.tensor([[H // patch, W // patch]], device=pixels_BCHW.device).expand(B, 2)
    mask = torch.ones(patches_BLX.shape[:2], dtype=torch.int32, device=pixels_BCHW.device)
    return {"pixel_values": patches_BLX, "pixel_attention_mask": mask, "spatial_shapes": grid}


def build_net(config: LibraryVisionConfig | LibraryTextConfig, tower: str) -> Any:
    """The library's module with random weights, from the stored settings alone: nothing is downloaded."""
    avoid_fused_attention()
    return (build_open_clip_net if config.library == "open_clip" else build_transformers_net)(config.settings, tower)


def build_open_clip_net(settings: Settings, tower: str) -> Any:
    require_extra("open_clip", "openclip", f"this {tower} tower of open_clip")
    import open_clip

    check_settings(settings)
    vision_cfg = {**(settings["vision_cfg"] if tower == "vision" else TINY_VISION), "timm_model_pretrained": False}
    text_cfg = {**(settings["text_cfg"] if tower == "text" else TINY_TEXT), "hf_model_pretrained": False}
    name = str(vision_cfg.get("timm_model_name") or "")
    if not re.fullmatch(r"[\w.]*", name):
        raise ValueError(f"timm_model_name must be a name of timm, not {name!r}")
    with TemporaryDirectory() as folder:
        if text_cfg.get("hf_model_name"):  # open_clip would look for its config.json on the hub
            (Path(folder) / "config.json").write_text(json.dumps(clean_hf_config(settings.get("hf_config") or {})))
            text_cfg["hf_model_name"] = folder
        quick_gelu = bool(settings.get("quick_gelu"))
        try:
            model = build_bounded(
                f"this {tower} tower of open_clip",
                lambda: open_clip.CustomTextCLIP(settings["embed_dim"], vision_cfg, text_cfg, quick_gelu),
            )
        except (*BUILD_ERRORS, AssertionError, OSError) as error:
            raise ValueError(f"open_clip cannot build this {tower} tower: {short_error(error)}") from None
    return model.visual if tower == "vision" else model.text


def build_transformers_net(settings: Settings, tower: str) -> Any:
    hf_config = parse_hf_config(settings)
    other: Any = hf_config.text_config if tower == "vision" else hf_config.vision_config
    other.num_hidden_layers = 1  # of the tower that is removed
    net = create_hf(hf_config, {})
    for name, _ in [*net.named_children(), *net.named_parameters(recurse=False)]:
        if name.startswith(OTHER_PARTS[tower]):
            delattr(net, name)
    return net


def open_clip_tokenizer(path: Path, tokenizer: str, text_cfg: Settings) -> Tokenizer:
    """The tokenizer of a text tower of open_clip that is not ours."""
    options, name = text_cfg.get("tokenizer_kwargs") or {}, text_cfg.get("hf_tokenizer_name")
    fixed_length = not text_cfg.get("hf_model_name")
    if not name:
        settings = TokenizerSettings(clip_tokens=True, fixed_length=fixed_length)
        return Tokenizer(find_clip_tokenizer(path, tokenizer).core, settings)
    folder = given_folder(tokenizer) or (path if path.is_dir() else path.parent)
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        with hub.downloading(f"{path} has no tokenizer beside it, --tokenizer names none, and {name}"):
            folder = download_from_hub(name, owner_optional=True, weights=False)
    theirs, core = load_hf_tokenizer(folder)
    settings = TokenizerSettings(
        clean=options.get("clean", "whitespace"),
        pad_id=theirs.pad_token_id or 0,
        pad_left=theirs.padding_side == "left",
        fixed_length=fixed_length,
        zeroed_id=theirs.sep_token_id if options.get("strip_sep_token") else None,
    )
    return require_same_ids(HFTokenizer(core, settings), theirs)


def given_folder(tokenizer: str) -> Path | None:
    """The folder that --tokenizer names, or the one of the tokenizer.json that it names."""
    if tokenizer in ("", "bpe", "char", "openai"):
        return None
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent


def transformers_tokenizer(folder: Path, given: str, config: Settings) -> tuple[Tokenizer, int]:
    """The tokenizer of a dual encoder of transformers, and the longest caption it is meant for."""
    (theirs, core), kind = load_hf_tokenizer(given_folder(given) or folder), config["model_type"]
    settings = TokenizerSettings(
        clean="strip_punctuation" if type(theirs).__name__ == "SiglipTokenizer" else "none",
        pad_id=theirs.pad_token_id or 0,
        pad_left=theirs.padding_side == "left",
        fixed_length=kind in WITHOUT_MASK,
    )
    tokenizer = require_same_ids(HFTokenizer(core, settings), theirs)
    return tokenizer, int(min(theirs.model_max_length, 10_000))


def load_hf_tokenizer(folder: Path) -> tuple[Any, tokenizers.Tokenizer]:
    """The tokenizer of transformers in a folder, and the fast tokenizer within it."""
    require_extra("transformers", "hf", f"the tokenizer in {folder}")
    from transformers import AutoTokenizer

    with TemporaryDirectory() as checked:
        copy_tokenizer_files(folder, Path(checked))
        try:
            theirs = AutoTokenizer.from_pretrained(checked, trust_remote_code=False, local_files_only=True)
            return theirs, copy_core(theirs)
        except (*BUILD_ERRORS, OSError) as error:
            reason = short_error(error).replace(checked, str(folder))
            raise ValueError(f"the tokenizer in {folder} cannot be loaded: {reason}") from None


def copy_tokenizer_files(folder: Path, target: Path) -> None:
    """What a tokenizer of transformers is read from, bounded and without names of other files and of code."""
    for name in TOKENIZER_JSON:
        if not (folder / name).exists():
            continue
        state = clean_hf_config(read_json(folder / name, TOKENIZER_BYTES if name in LARGE_JSON else JSON_BYTES))
        if name == "config.json":
            check_settings(state)
        if name == "tokenizer.json":
            with untrusted_input(f"{folder / name} is not a tokenizer"):
                check_tokenizer_state(state)
        elif name not in LARGE_JSON:
            state = {key: value for key, value in state.items() if not key.endswith("_file")}
        (target / name).write_bytes(orjson.dumps(state))
    for path in (path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        data = read_file(path, VOCABULARY_BYTES)
        lines = data.count(b"\n")  # also the byte that begins an entry of sentencepiece
        require(lines <= MAX_ENTRIES, f"{path} has {lines:,} entries; at most {MAX_ENTRIES:,} are read")
        (target / path.name).write_bytes(data)


def copy_core(theirs: Any) -> tokenizers.Tokenizer:
    """The fast tokenizer within one of transformers; one of sentencepiece is converted, as T5's is."""
    core = getattr(theirs, "backend_tokenizer", None)
    if core is None:
        from transformers import T5Tokenizer

        core = T5Tokenizer.from_pretrained(Path(theirs.vocab_file).parent, extra_ids=0).backend_tokenizer
    with untrusted_input("the tokenizer cannot be used"):
        return build_core(orjson.loads(core.to_str()))


def require_same_ids(tokenizer: HFTokenizer, theirs: Any) -> HFTokenizer:
    """The tokenizer, after a few captions have been compared with the library's."""
    for text in ("a photo of a cat", "two dogs run in the snow"):  # which no cleaning changes
        if tokenizer.core.encode(text).ids != theirs(text, truncation=False, padding=False)["input_ids"]:
            raise ValueError(f"the tokenizer ({type(theirs).__name__}) cannot be converted")
    return tokenizer


def find_hf_config(path: Path, name: str) -> Settings:
    """The config.json of a text tower of transformers in an open_clip model: beside the weights, or from the hub."""
    beside = (path if path.is_dir() else path.parent) / "config.json"
    config = read_json(beside) if beside.is_file() else {}
    if "hidden_size" not in config and "d_model" not in config:  # that of another model, such as transformers' CLIP
        with hub.downloading(f"{path} has no config.json of its text tower beside it, and {name}"):
            config = read_json(download_from_hub(name, owner_optional=True, weights=False) / "config.json")
    return clean_hf_config(config)
