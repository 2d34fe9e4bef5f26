"""What our weights are called elsewhere: one table a library, read both ways.

In a name, # is a block's number and * is weight or bias. Several names on their side are parts of one tensor
of ours, along its first axis; a turned one is the transpose of ours.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    ours: str
    theirs: tuple[str, ...]
    turned: bool = False


@dataclass(frozen=True)
class Layout:
    """How one library names a CLIP's weights."""

    library: str
    rules: tuple[Rule, ...]
    ignored: str = "$^"
    """A pattern of names that hold nothing learned."""
    mark: str = ""
    """A name that only this library's files have."""

    @cached_property
    def _theirs(self) -> list[tuple[re.Pattern[str], Rule, int]]:
        return [(_pattern(name), rule, part) for rule in self.rules for part, name in enumerate(rule.theirs)]

    def to_ours(self, found: Mapping[str, Tensor]) -> "Translated":
        """Their tensors under our names; what is no part of a CLIP is told apart."""
        made = Translated()
        parts: dict[str, dict[int, Tensor]] = {}
        rules: dict[str, Rule] = {}
        for name, tensor in found.items():
            match = next(((m, rule, k) for p, rule, k in self._theirs if (m := p.fullmatch(name))), None)
            if match is None:
                if not re.search(self.ignored, name):
                    made.unexpected.append(name)
                continue
            ours = _filled(match[1].ours, match[0])
            parts.setdefault(ours, {})[match[2]] = tensor
            rules[ours] = match[1]
        for ours, some in parts.items():
            rule = rules[ours]
            names = self.theirs_of(ours)
            lost = [names[k] for k in range(len(rule.theirs)) if k not in some]
            if lost:
                made.missing += lost
                continue
            pieces = [some[k] for k in range(len(rule.theirs))]
            try:
                whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                made.tensors[ours] = whole.T if rule.turned else whole
            except RuntimeError:  # parts of different shapes
                made.misshapen += [
                    (name, tuple(piece.shape), ()) for name, piece in zip(names, pieces, strict=True)
                ]
        return made

    def theirs_of(self, ours: str) -> list[str]:
        """Their names for a weight of ours; ours itself where they have none."""
        for rule in self.rules:
            if match := _pattern(rule.ours).fullmatch(ours):
                return [_filled(name, match) for name in rule.theirs]
        return [ours]

    def from_ours(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in ours.items():
            rule = next(rule for rule in self.rules if _pattern(rule.ours).fullmatch(name))
            names = self.theirs_of(name)
            whole = tensor.T if rule.turned else tensor
            parts = whole.chunk(len(names)) if len(names) > 1 else [whole]
            for theirs, part in zip(names, parts, strict=True):
                yield theirs, part.clone().contiguous()


@dataclass
class Translated:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.escape(name).replace(r"\#", r"(?P<number>\d+)").replace(r"\*", "(?P<kind>weight|bias)")
    return re.compile(pattern)


def _filled(name: str, match: re.Match[str]) -> str:
    groups = match.groupdict()
    return name.replace("#", groups.get("number") or "#").replace("*", groups.get("kind") or "*")


def _open_clip() -> Iterator[Rule]:
    for ours, theirs in {
        "logit_scale": "logit_scale",
        "logit_bias": "logit_bias",
        "vision.class_token": "visual.class_embedding",
        "vision.position": "visual.positional_embedding",
        "vision.patch.weight": "visual.conv1.weight",
        "vision.ln_pre.*": "visual.ln_pre.*",
        "vision.ln_post.*": "visual.ln_post.*",
        "text.token.weight": "token_embedding.weight",
        "text.position": "positional_embedding",
        "text.ln_post.*": "ln_final.*",
    }.items():
        yield Rule(ours, (theirs,))
    yield Rule("vision_projection.weight", ("visual.proj",), turned=True)
    yield Rule("text_projection.weight", ("text_projection",), turned=True)
    for tower, prefix in (("vision", "visual."), ("text", "")):
        for kind in ("weight", "bias"):
            qkv = f"{prefix}transformer.resblocks.#.attn.in_proj_{kind}"
            yield Rule(f"{tower}.blocks.#.attn.qkv.{kind}", (qkv,))
        for ours, theirs in {
            "ln_1": "ln_1",
            "ln_2": "ln_2",
            "attn.out": "attn.out_proj",
            "mlp.wide": "mlp.c_fc",
            "mlp.narrow": "mlp.c_proj",
        }.items():
            yield Rule(f"{tower}.blocks.#.{ours}.*", (f"{prefix}transformer.resblocks.#.{theirs}.*",))


def _transformers() -> Iterator[Rule]:
    for ours, theirs in {
        "logit_scale": "logit_scale",
        "vision_projection.weight": "visual_projection.weight",
        "text_projection.weight": "text_projection.weight",
        "vision.class_token": "vision_model.embeddings.class_embedding",
        "vision.patch.weight": "vision_model.embeddings.patch_embedding.weight",
        "vision.position": "vision_model.embeddings.position_embedding.weight",
        "vision.ln_pre.*": "vision_model.pre_layrnorm.*",  # their spelling
        "vision.ln_post.*": "vision_model.post_layernorm.*",
        "text.token.weight": "text_model.embeddings.token_embedding.weight",
        "text.position": "text_model.embeddings.position_embedding.weight",
        "text.ln_post.*": "text_model.final_layer_norm.*",
    }.items():
        yield Rule(ours, (theirs,))
    for tower in ("vision", "text"):
        layer = f"{tower}_model.encoder.layers.#"
        parts = tuple(f"{layer}.self_attn.{one}_proj.*" for one in "qkv")
        yield Rule(f"{tower}.blocks.#.attn.qkv.*", parts)
        for ours, theirs in {
            "ln_1": "layer_norm1",
            "ln_2": "layer_norm2",
            "attn.out": "self_attn.out_proj",
            "mlp.wide": "mlp.fc1",
            "mlp.narrow": "mlp.fc2",
        }.items():
            yield Rule(f"{tower}.blocks.#.{ours}.*", (f"{layer}.{theirs}.*",))


OPEN_CLIP = Layout(
    "open_clip",
    tuple(_open_clip()),
    r"^(input_resolution|context_length|vocab_size)$|attn_mask$",
    "visual.conv1.weight",
)
TRANSFORMERS = Layout(
    "transformers",
    tuple(_transformers()),
    r"position_ids$",
    "vision_model.embeddings.patch_embedding.weight",
)
