"""Pretrained encoders of timm and transformers as towers: a batch in, one feature vector per item out.

They always run in eval mode, without dropout and updates of batch statistics, so that a training step is a
function of its batch, however it is split or resumed.
"""

import copy
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from m1clip import devices
from m1clip.config import HFConfig, TimmConfig, check_config, require
from m1clip.errors import short_error, untrusted_input
from m1clip.files import read_json
from m1clip.model.safe_load import (
    bounded_modules,
    check_module_size,
    check_settings,
    check_weights,
    download_from_hub,
    load_folder_tensors,
    load_tensors,
)
from m1clip.model.tokenizer import HFTokenizer

MAX_STAGES = 5  # last stages of a timm model whose mean outputs are features
MAX_CONTEXT = 128  # tokens of a caption; the encoder's own limit may be lower
# Position embeddings that these models do not use for tokens.
POSITION_OFFSET = {"roberta": 2, "xlm-roberta": 2, "camembert": 2, "mpnet": 2}
# Keys of a config.json that say nothing about the architecture; some would download or run code.
UNUSED_HF_KEYS = (
    *("auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "quantization_config"),
    *("attn_implementation", "_attn_implementation", "num_labels", "id2label", "label2id"),
)
# What libraries raise for a configuration with which they cannot build a module.
BUILD_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ImportError, ArithmeticError)
TASK_HEADS = r"(^|\.)(pooler|cls|lm_head|classifier|vocab_\w+|predictions?|qa_outputs|dense)\.|position_ids$"


def require_extra(library: str, extra: str, reason: str) -> None:
    if find_spec(library) is None:
        raise ValueError(f"{reason} needs an extra: pip install 'm1clip[{extra}]'")


class PretrainedTower(nn.Module):
    net: Any
    blocks: tuple[nn.Module, ...] = ()  # torch.compile is only tried on our own blocks
    patch_dropout, grad_checkpointing = 0.0, False  # not supported here

    def train(self, mode: bool = True) -> "PretrainedTower":
        super().train(False)
        return self

    @cached_property
    def layer_numbers(self) -> dict[str, int]:
        """The layer of each parameter of `net`, from the input: each numbered block or stage is a layer."""
        numbers, last = dict[str, int](), ""
        for name in sorted((name for name, _ in self.net.named_parameters()), key=is_output_projection):
            block = re.match(r".*?\.\d+\.", name)
            starts_layer = block is not None and block[0] != last
            last = block[0] if block else last
            numbers[name] = max(numbers.values(), default=0) + starts_layer
        return numbers

    def layers_from_top(self, parameter: str) -> int:
        """Layers from a parameter to the output, its own included."""
        return 1 + max(self.layer_numbers.values()) - self.layer_numbers[parameter.removeprefix("net.")]


def is_output_projection(parameter: str) -> bool:
    """Whether a parameter belongs to the output, although open_clip registers it before the blocks."""
    return parameter.partition(".")[0] in ("proj", "text_projection")


class TimmVision(PretrainedTower):
    """An image encoder of timm without its classifier."""

    def __init__(self, config: TimmConfig):
        super().__init__()
        self.config, self.net = config, create_timm(config.timm)
        for stage in config.stages:
            require(hasattr(self.net, stage.partition(".")[0]), f"timm's {config.timm} has no stage {stage!r}")
        self.train()

    def forward(self, pixels_BCHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        return image_features(self.net, self.config.stages, pixels_BCHW)

    @cached_property
    def layer_numbers(self) -> dict[str, int]:
        from timm.models import group_parameters

        if not hasattr(self.net, "group_matcher"):
            return {name: 0 for name, _ in self.net.named_parameters()}
        return dict(group_parameters(self.net, self.net.group_matcher(coarse=False), reverse=True))


class HFText(PretrainedTower):
    """A text encoder of transformers: means over the tokens of every layer, first token and maximum of the last."""

    def __init__(self, config: HFConfig):
        super().__init__()
        # Some encoders have a pooling layer, which is not used.
        self.config, self.net = config, create_hf(parse_hf_config(config.hf), {"add_pooling_layer": False}, {})
        self.train()

    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        mask_BL = tokens_BL != self.config.tokenizer.pad_id
        output = self.net(input_ids=tokens_BL, attention_mask=mask_BL.long(), output_hidden_states=True)
        last_BLD = output.last_hidden_state
        mask_BL1 = mask_BL[:, :, None]
        count_B1 = mask_BL1.sum(1).to(last_BLD.dtype)
        means = [(layer_BLD * mask_BL1).sum(1) / count_B1 for layer_BLD in output.hidden_states]
        max_BD = last_BLD.masked_fill(~mask_BL1, -1e4).amax(1)  # finite, because Core ML computes with fp16
        return torch.cat([*means, last_BLD[:, 0], max_BD], dim=1)


def image_features(net: Any, stages: Sequence[str], pixels_BCHW: Tensor) -> Tensor:
    """The output of a timm model and the mean outputs of its stages, concatenated."""
    means: list[Tensor] = []
    channels_last = getattr(net, "output_fmt", "NCHW") == "NHWC"

    def add_mean(module: nn.Module, inputs: Any, output: Tensor) -> None:
        spatial = (1,) if output.ndim == 3 else (1, 2) if channels_last else (2, 3)
        means.append(output.mean(spatial))

    with ExitStack() as hooks:
        for name in stages:
            hooks.enter_context(net.get_submodule(name).register_forward_hook(add_mean))
        last_BD = net(devices.to_channels_last(pixels_BCHW))
    return torch.cat([last_BD, *means], dim=1) if means else last_BD


def stage_names(net: Any) -> tuple[str, ...]:
    """The last stages or blocks of a timm model; none if it is built differently."""
    for name in ("blocks", "stages", "layers"):
        stages = getattr(net, name, None)
        if isinstance(stages, nn.Sequential | nn.ModuleList) and len(stages) > 1:
            return tuple(f"{name}.{child}" for child, _ in stages.named_children())[-MAX_STAGES:]
    return tuple(name for name in ("layer1", "layer2", "layer3", "layer4") if hasattr(net, name))


def avoid_fused_attention() -> None:
    """Where fused attention is wrong for the strided tensors that timm passes to it."""
    if devices.attention_kind() == "eager" and find_spec("timm"):
        import timm

        timm.layers.set_fused_attn(False)


def create_timm(name: str, pretrained: bool = False) -> Any:
    require_extra("timm", "timm", f"timm:{name}")
    import timm

    avoid_fused_attention()
    if not re.fullmatch(r"[\w.]+", name):  # "hf-hub:" and "local-dir:" would read a model from elsewhere
        raise ValueError(f"timm:NAME takes the name of an architecture, not {name!r}")
    try:
        return timm.create_model(name, num_classes=0, pretrained=pretrained)
    except (RuntimeError, ValueError, TypeError) as error:
        close = difflib.get_close_matches(name, timm.list_models(), cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close and name not in close else ""
        raise ValueError(f"timm cannot create {name!r} ({error}){hint}") from None


def create_hf(hf_config: Any, *variants: Mapping[str, Any]) -> Any:
    """A model of transformers with random weights, with the first of these options that it knows."""
    from transformers import AutoModel

    reason = ""
    for attention, options in product((devices.attention_kind(), "eager"), variants):  # some have only eager attention
        options = {"attn_implementation": attention, "trust_remote_code": False, **options}
        try:
            build = partial(AutoModel.from_config, hf_config, **options)
            return build_bounded(f"the {hf_config.model_type} model", build)
        except BUILD_ERRORS as error:
            reason = short_error(error)
    raise ValueError(f"transformers cannot create a {hf_config.model_type} model: {reason}")


def build_bounded(what: str, build: Callable[[], Any]) -> Any:
    check_module_size(what, build)
    with bounded_modules(what):
        return build()


def clean_hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without keys that say nothing about the architecture, also in its parts."""
    kept = {key: value for key, value in config.items() if key not in UNUSED_HF_KEYS}
    return {key: clean_hf_config(value) if isinstance(value, dict) else value for key, value in kept.items()}


def parse_hf_config(config: Mapping[str, Any]) -> Any:
    """The transformers config object, which knows each architecture's names for width and layers."""
    require_extra("transformers", "hf", f"a {config['model_type']} model")
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()  # it warns of token ids that only generation would use
    check_settings(config)
    with untrusted_input(f"transformers cannot read a configuration of type {config['model_type']}"):
        return AutoConfig.for_model(**clean_hf_config(config))


def load_timm(spec: str) -> TimmVision:
    """The tower that `--vision timm:NAME` names, with weights from the hub or from `?weights=FILE`."""
    library, _, rest = spec.partition(":")
    name, _, weights = rest.partition("?weights=")
    if library != "timm" or not name or ":" in name:
        example = "timm:vit_small_patch16_224"
        raise ValueError(f"--vision takes timm:NAME of an architecture, such as {example}, not {spec!r}")
    tower = TimmVision(timm_config(name))
    if weights != "none":
        tensors = read_timm_file(Path(weights).expanduser(), tower.net) if weights else download_timm(name).state_dict()
        tower.net.load_state_dict(tensors)
    return tower


def timm_config(name: str) -> TimmConfig:
    net = create_timm(name).eval()
    from timm.data import resolve_model_data_config

    data = resolve_model_data_config(net)
    size = int(data["input_size"][-1])
    stages, blank_BCHW = stage_names(net), torch.zeros(1, 3, size, size)
    with torch.no_grad():
        try:
            width = image_features(net, stages, blank_BCHW).shape[-1]
        except (AttributeError, RuntimeError, TypeError, IndexError):  # stages with several outputs
            stages, width = (), net(blank_BCHW).shape[-1]
    return TimmConfig(name, size, width, tuple(data["mean"]), tuple(data["std"]), stages)


def download_timm(name: str) -> Any:
    others = f"timm:{name}?weights=FILE reads them from a file, ?weights=none starts with random ones"
    from m1clip import hub

    with hub.downloading(f"the weights of timm:{name} ({others})"):
        return create_timm(name, pretrained=True)


def read_timm_file(path: Path, net: Any) -> dict[str, Tensor]:
    """Weights without the classifier; those of the efficientnet_pytorch package get timm's names."""
    expected, weights = net.state_dict(), load_tensors(path)
    if "_conv_stem.weight" in weights:  # efficientnet_pytorch, which has the same layers in the same order
        backbone = [name for name in weights if not name.startswith("_fc.")]
        kinds = [[name.rpartition(".")[2] for name in names] for names in (expected, backbone)]
        if kinds[0] == kinds[1]:
            weights = {name: weights[theirs] for name, theirs in zip(expected, backbone, strict=True)}
    classifier = f"{getattr(net, 'default_cfg', {}).get('classifier') or 'classifier'}."
    weights = {name: t for name, t in weights.items() if name in expected or not name.startswith(classifier)}
    check_weights(path, weights, expected)
    return weights


def load_hf_text(spec: str) -> tuple[HFText, HFTokenizer]:
    """The tower that `--text hf:NAME` or `hf:FOLDER` names, and its tokenizer."""
    library, _, name = spec.partition(":")
    if library != "hf" or not name:
        example = "hf:sentence-transformers/all-MiniLM-L6-v2"
        raise ValueError(f"--text takes hf:FOLDER or hf:NAME, such as {example}, not {spec!r}")
    require_extra("transformers", "hf", f"--text {spec}")
    folder = Path(name).expanduser()
    folder = folder if folder.is_dir() else download_from_hub(name, owner_optional=True)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json")
    with untrusted_input(f"{folder} cannot be imported", folder):
        return read_hf_text(folder)


def read_hf_text(folder: Path) -> tuple[HFText, HFTokenizer]:
    tower = HFText(hf_text_config(folder))
    expected = tower.net.state_dict()
    weights = load_folder_tensors(folder, ["model.safetensors", "pytorch_model.bin"])
    # Old BERT checkpoints call the weight and bias of a norm gamma and beta.
    weights = {re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)): t for name, t in weights.items()}
    prefix = f"{tower.net.base_model_prefix}."
    if any(name.startswith(prefix) for name in weights):  # a model with a task head beside the encoder
        weights = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
    weights = {name: t for name, t in weights.items() if name in expected or not re.search(TASK_HEADS, name)}
    check_weights(folder, weights, expected)
    tower.net.load_state_dict(weights)
    return tower, HFTokenizer.load(folder / "tokenizer.json", tower.config.tokenizer)


def hf_text_config(folder: Path) -> HFConfig:
    config = clean_hf_config(read_json(folder / "config.json"))
    if "model_type" not in config:
        raise ValueError(f"{folder / 'config.json'} has no model_type; expected a transformers encoder")
    parsed = parse_hf_config(config)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers")
    if not all(isinstance(getattr(parsed, size, None), int) for size in sizes):
        raise ValueError(f"{folder} has no {', '.join(sizes[:2])} or {sizes[2]}; expected a BERT-like encoder")
    positions = getattr(parsed, "max_position_embeddings", None) or MAX_CONTEXT
    sentence = folder / "sentence_bert_config.json"
    limit = read_json(sentence).get("max_seq_length") if sentence.is_file() else None
    context = min(MAX_CONTEXT, positions - POSITION_OFFSET.get(config["model_type"], 0), limit or MAX_CONTEXT)
    width = (parsed.num_hidden_layers + 3) * parsed.hidden_size
    return check_config(HFConfig(config, parsed.vocab_size, context, width))


def fold_batch_norm(net: Any) -> Any:
    """A copy for inference whose batch norms are folded into the convolutions before them."""
    # On 2 AVX2 cores this makes EfficientNet-lite0 1.6 times as fast (November 2026).
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    net = copy.deepcopy(net).eval()
    for module in net.modules():
        for name, next_name in pairwise([*module._modules]):
            conv, norm = module._modules[name], module._modules[next_name]
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats:
                module._modules[name] = fuse_conv_bn_eval(conv, norm)
                module._modules[next_name] = getattr(norm, "act", nn.Identity())
    return net
