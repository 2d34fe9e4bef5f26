"""Towers from the field, behind the same face as ours: a batch in, one feature vector per item out.

Their own noise is off and their statistics stand still, whatever they are trained by: a step is then a
function of its batch, however that is divided or resumed.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from m1clip import devices
from m1clip.config import HFConfig, TimmConfig
from m1clip.model.fit import check_weights
from m1clip.model.safe_load import download_from_hub, gathered, load_tensors, read_json
from m1clip.model.tokenizer import HFTokenizer

STAGES = 5  # of an image tower whose means are features
LONGEST = 128
"""Tokens of a caption that are read at most; the encoder itself may read fewer."""


def require_extra(library: str, extra: str, why: str) -> None:
    if find_spec(library) is None:
        raise ValueError(f"{why} needs an extra: pip install 'm1clip[{extra}]'")


class PretrainedTower(nn.Module):
    """A tower whose inside is another library's."""

    net: Any
    blocks: tuple[nn.Module, ...] = ()  # what may be compiled: none
    dropout, patch_dropout, grad_checkpointing = 0.0, 0.0, False  # what only our own towers can do

    def train(self, mode: bool = True) -> "PretrainedTower":
        super().train(False)
        return self

    def layers_from_top(self, name: str) -> int:
        """How many layers stand between a weight and the output, its own included."""
        return self._below[name]

    @cached_property
    def _below(self) -> dict[str, int]:
        layer = {name: self.layer_of(name.removeprefix("net.")) for name, _ in self.named_parameters()}
        top = max(layer.values(), default=0)
        return {name: 1 + top - number for name, number in layer.items()}

    def layer_of(self, name: str) -> int:
        raise NotImplementedError


class TimmVision(PretrainedTower):
    """An image encoder of timm; its classifier is left out."""

    def __init__(self, config: TimmConfig):
        super().__init__()
        require_extra("timm", "timm", f"timm:{config.timm}")
        self.config, self.net = config, timm_net(config.timm)
        self.train()

    def forward(self, pixels_BCHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        return image_features(self.net, self.config.stages, pixels_BCHW)

    @cached_property
    def _groups(self) -> dict[str, int]:
        from timm.models import group_parameters

        if not hasattr(self.net, "group_matcher"):  # it does not tell its layers apart
            return {name: 0 for name, _ in self.net.named_parameters()}
        found: dict[str, int] = group_parameters(self.net, self.net.group_matcher(coarse=False), reverse=True)
        return found

    def layer_of(self, name: str) -> int:
        return self._groups[name]


class HFText(PretrainedTower):
    """A text encoder of transformers: every token sees every other, and padding is seen by none."""

    def __init__(self, config: HFConfig):
        super().__init__()
        require_extra("transformers", "hf", f"a {config.hf['model_type']} text tower")
        self.config, self.net = config, hf_net(config.hf)
        self.pad_id = int(config.hf.get("pad_token_id") or 0)
        self.train()

    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        seen_BL = tokens_BL != self.pad_id
        every = self.config.pool == "all"
        made = self.net(input_ids=tokens_BL, attention_mask=seen_BL.long(), output_hidden_states=every)
        x_BLD: Tensor = made.last_hidden_state
        if self.config.pool == "first":
            return x_BLD[:, 0]
        seen_BL1 = seen_BL[:, :, None]
        count_B1 = seen_BL1.sum(1).to(x_BLD.dtype)
        layers = made.hidden_states if every else (x_BLD,)
        means = [(layer_BLD * seen_BL1).sum(1) / count_B1 for layer_BLD in layers]
        if not every:
            return means[0]
        largest_BD = x_BLD.masked_fill(~seen_BL1, -torch.inf).amax(1)
        return torch.cat([*means, x_BLD[:, 0], largest_BD], dim=1)

    @cached_property
    def _list(self) -> str:
        """Where its layers are: the longest list of modules in it."""
        lists = {name: len(one) for name, one in self.net.named_modules() if isinstance(one, nn.ModuleList)}
        return str(max(lists, key=lambda name: lists[name]))

    def layer_of(self, name: str) -> int:
        before, inside, rest = name.partition(f"{self._list}.")
        if inside and not before:
            return 1 + int(rest.split(".")[0])
        return 0  # tables of tokens and positions


def image_features(net: Any, stages: Sequence[str], pixels_BCHW: Tensor) -> Tensor:
    """What the net gives at its end and, beside it, the mean output of some of its stages."""
    seen: list[Tensor] = []

    def see(part: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(mean_of(output, getattr(net, "output_fmt", "NCHW")))

    hooks = [net.get_submodule(name).register_forward_hook(see) for name in stages]
    try:
        last_BD: Tensor = net(devices.to_channels_last(pixels_BCHW))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([last_BD, *seen], dim=1) if seen else last_BD


def mean_of(x: Tensor, form: str) -> Tensor:
    """Over places: of maps with channels first or last, or of tokens."""
    if x.ndim == 3:
        return x.mean(1)
    return x.mean((1, 2) if form == "NHWC" else (2, 3))


def stages_of(net: Any) -> tuple[str, ...]:
    """Names of the last stages or blocks, in order; none where the net is not built of such."""
    for name in ("blocks", "stages", "layers"):
        parts = getattr(net, name, None)
        if isinstance(parts, nn.Sequential | nn.ModuleList) and len(parts) > 1:
            return tuple(f"{name}.{child}" for child, _ in parts.named_children())[-STAGES:]
    return tuple(name for name in ("layer1", "layer2", "layer3", "layer4") if hasattr(net, name))


def timm_net(name: str, **options: Any) -> Any:
    import timm

    try:
        net = timm.create_model(name, num_classes=0, **{"pretrained": False, **options})
        if devices.attention_kind() == "eager":  # what it hands to the fused attention is strided
            for part in net.modules():
                if hasattr(part, "fused_attn"):
                    part.fused_attn = False
        return net
    except (RuntimeError, ValueError, TypeError) as error:
        close = timm.list_models(f"*{name.split('.')[0]}*")[:3] or timm.list_models(f"*{name[:8]}*")[:3]
        more = f"; did you mean {' or '.join(close)}?" if close and name not in close else ""
        raise ValueError(f"timm has no model {name!r} that fits ({error}){more}") from None


def hf_net(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModel

    values, trouble = dict(config), ""
    try:
        made = AutoConfig.for_model(values.pop("model_type"), **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"transformers knows no {config.get('model_type')} encoder: {error}") from None
    for attention in (devices.attention_kind(), "eager"):  # some have no other
        for more in ({"add_pooling_layer": False}, {}):  # some have no pooler
            try:
                return AutoModel.from_config(
                    made, attn_implementation=attention, trust_remote_code=False, **more
                )
            except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
                trouble = str(error)
    raise ValueError(f"transformers cannot make a {config.get('model_type')} encoder: {trouble}")


def load_timm(spec: str, every: bool = True) -> TimmVision:
    """What `--vision timm:NAME` means, with its pretrained weights: from a file, or from the hub.

    With `every`, its stages are features too.
    """
    kind, _, rest = spec.partition(":")
    name, _, weights = rest.partition("?weights=")
    if kind != "timm" or not name:
        raise ValueError(f"--vision takes timm:NAME, such as timm:vit_small_patch16_224, not {spec!r}")
    if ":" in name:
        raise ValueError(f"--vision {spec}: name the architecture itself, so that the model can stand alone")
    require_extra("timm", "timm", f"--vision {spec}")
    net = timm_net(name)
    from timm.data import resolve_model_data_config

    how = resolve_model_data_config(net)
    size = int(how["input_size"][-1])
    stages, blank = stages_of(net) if every else (), torch.zeros(1, 3, size, size)
    with torch.no_grad():
        try:
            width = image_features(net.eval(), stages, blank).shape[-1]
        except (AttributeError, RuntimeError, TypeError, IndexError):  # they give more than one map
            stages, width = (), net(blank).shape[-1]
    tower = TimmVision(TimmConfig(name, size, width, tuple(how["mean"]), tuple(how["std"]), stages))
    if weights == "none":
        return tower
    if not weights:
        tower.net.load_state_dict(fetched(name).state_dict())
        return tower
    path = Path(weights).expanduser()
    found = renamed(load_tensors(path), tower.net)
    without = str(getattr(net, "default_cfg", {}).get("classifier") or "classifier")
    want = tower.net.state_dict()
    found = {key: value for key, value in found.items() if key in want or not key.startswith(f"{without}.")}
    check_weights(path, found, want)
    tower.net.load_state_dict(found)
    return tower


def fetched(name: str) -> Any:
    try:
        return timm_net(name, pretrained=True)
    except Exception as error:  # the network's many ways to fail, through three libraries
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"the weights of timm:{name} cannot be fetched ({first}); --vision-weights FILE takes them from "
            "a file, and --vision-weights none begins without any"
        ) from None


def renamed(found: Mapping[str, Tensor], net: Any) -> dict[str, Tensor]:
    """EfficientNets were first ported to torch under other names, and files of those are still about."""
    if "_conv_stem.weight" not in found:
        return dict(found)
    flat = [f"blocks.{i}.{k}" for i, stage in enumerate(net.blocks) for k in range(len(stage))]
    outside = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
    outside["_fc"] = "classifier"
    narrow = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    wide = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    wide |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    squeeze = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
    made = {}
    for name, tensor in found.items():
        if match := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
            number, part, kind = int(match[1]), match[2], match[3]
            names = (wide if f"_blocks.{number}._expand_conv.weight" in found else narrow) | squeeze
            if number < len(flat) and part in names:
                name = f"{flat[number]}.{names[part]}.{kind}"
        else:
            part, _, kind = name.partition(".")
            name = f"{outside.get(part, part)}.{kind}"
        made[name] = tensor
    return made


def load_hf_text(spec: str, every: bool) -> tuple[HFText, HFTokenizer]:
    """What `--text hf:NAME-or-folder` means: the encoder with its weights, and its tokenizer.

    With `every`, all its layers are features.
    """
    kind, _, name = spec.partition(":")
    if kind != "hf" or not name:
        raise ValueError(
            "--text takes hf:FOLDER or hf:NAME, such as hf:sentence-transformers/all-MiniLM-L6-v2, "
            f"not {spec!r}"
        )
    require_extra("transformers", "hf", f"--text {spec}")
    folder = Path(name).expanduser()
    folder = folder if folder.is_dir() else download_from_hub(name, bare=True)
    own = read_json(folder / "config.json")
    if "model_type" not in own:
        raise ValueError(
            f"{folder / 'config.json'} does not say its model_type; a transformers encoder was expected"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which captions are read by")
    config = text_config(folder, own)
    config = with_layers(config) if every else config
    tower = HFText(config)
    want = tower.net.state_dict()
    found = gathered(folder, ["model.safetensors", "pytorch_model.bin"])
    found = {modern(name): value for name, value in found.items()}
    prefix = f"{tower.net.base_model_prefix}."
    if any(name.startswith(prefix) for name in found):  # beside it are heads for other tasks
        found = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    spare = r"(^|\.)(pooler|cls|lm_head|classifier|vocab_\w+|predictions?|qa_outputs|dense)\.|position_ids$"
    found = {name: value for name, value in found.items() if name in want or not re.search(spare, name)}
    check_weights(folder, found, want)
    tower.net.load_state_dict(found)
    return tower, HFTokenizer.load_for(folder / "tokenizer.json", tower.pad_id)


def modern(name: str) -> str:
    """Early BERTs had other names for the parts of a norm."""
    return re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", re.sub(r"\.beta$", ".bias", name))


def text_config(folder: Path, own: dict[str, Any]) -> HFConfig:
    """Its shape and how its tokens become one vector, from the encoder's files."""
    kept = {
        key: value
        for key, value in own.items()
        if key
        not in ("architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map")
    }
    width = own.get("hidden_size") or own.get("dim")
    if not isinstance(width, int):
        raise ValueError(
            f"{folder / 'config.json'} does not say its hidden_size; a BERT-like encoder was expected"
        )
    places = int(own.get("max_position_embeddings") or LONGEST)
    places -= 2 if own.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    sentence = folder / "sentence_bert_config.json"
    longest = read_json(sentence).get("max_seq_length") if sentence.is_file() else None
    pool: Literal["mean", "first"] = "mean"
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.is_file():
        how = read_json(pooling)
        chosen = [key for key, value in how.items() if key.startswith("pooling_mode") and value]
        known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
        if len(chosen) != 1 or chosen[0] not in known:
            raise ValueError(f"{pooling} asks for {', '.join(chosen)}; the mean or the first token is taken")
        pool = known[chosen[0]]  # type: ignore[assignment]
    return HFConfig(kept, int(own["vocab_size"]), min(LONGEST, places, longest or LONGEST), width, pool)


def with_layers(config: HFConfig) -> HFConfig:
    layers = config.hf.get("num_hidden_layers") or config.hf.get("n_layers")
    if not isinstance(layers, int):
        raise ValueError("the encoder does not say how many layers it has; --features last goes without")
    return replace(config, pool="all", width=(layers + 3) * config.width)


def fold_batch_norm(net: Any) -> Any:
    """A copy for encoding alone: each batch norm is part of the convolution before it, and costs nothing.

    On 2 AVX2 cores EfficientNet-lite0 is 1.6 times as fast so (November 2026).
    """
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    net = copy.deepcopy(net).eval()
    for part in net.modules():
        names = list(part._modules)
        for name, following in pairwise(names):
            conv, norm = part._modules[name], part._modules[following]
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats:
                part._modules[name] = fuse_conv_bn_eval(conv, norm)
                part._modules[following] = getattr(norm, "act", nn.Identity())
    return net
