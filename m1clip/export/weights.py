"""Folders with weights for transformers, open_clip and what is built on them, loaded again and compared."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.export.verify import TOWERS, Array, Encode, FileCheck, Reference, check_encoder
from m1clip.model.clip import CLIP
from m1clip.model.interop import with_end_last, write_clip
from m1clip.model.pretrained_clip import import_clip
from m1clip.targets import TRANSFORMERS_FOLDERS

WEIGHTS = {"m1clip": "model.safetensors", "open_clip": "open_clip_model.safetensors"}
PACKAGE = "sentence_transformers.base.modules"
SENTENCE_TRANSFORMERS: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{PACKAGE}.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{PACKAGE}.normalize.Normalize"},
    ],
    # Without it the model would take texts only.
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": {"method": "get_text_features", "method_output_name": "pooler_output"},
            "image": {"method": "get_image_features", "method_output_name": "pooler_output"},
        },
        "module_output_name": "sentence_embedding",
    },
    "1_Normalize/config.json": {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"},
    "config_sentence_transformers.json": {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"},
}


def write_weights(target: str, reference: Reference, folder: Path) -> list[FileCheck]:
    """Write a folder, load it with its library if that is installed, and compare its embeddings with the model's."""
    library = "transformers" if target in TRANSFORMERS_FOLDERS else target
    if target == "m1clip":
        reference.model.write(folder)
    else:
        write_clip(reference.model, library, folder)
    if target == "sentence-transformers":
        for name, content in SENTENCE_TRANSFORMERS.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    checked_by = library if find_spec(library) else "m1clip"
    image, text = LOADERS[checked_by](folder, reference.model)
    checks = []
    for tower, encode in zip(TOWERS, (image, text), strict=True):
        name, load_again = WEIGHTS.get(target, "model.safetensors"), partial(lambda path, encode: encode, encode=encode)
        label = f"{name} ({tower})"
        check, _, _ = check_encoder(folder / name, label, tower, "fp32", load_again, reference)
        checks.append(replace(check, checked_by=checked_by, cold_start_ms=None))
    return checks


def load_transformers(folder: Path, model: CLIP) -> tuple[Encode, Encode]:
    import transformers

    transformers.logging.disable_progress_bar()
    theirs = transformers.CLIPModel.from_pretrained(folder, local_files_only=True).eval()
    image = encoder(lambda pixels: theirs.get_image_features(pixel_values=pixels).pooler_output)
    return image, encoder(lambda ids: theirs.get_text_features(input_ids=their_ids(model, ids)).pooler_output)


def load_open_clip(folder: Path, model: CLIP) -> tuple[Encode, Encode]:
    import open_clip

    theirs = open_clip.create_model(f"local-dir:{folder}").eval()
    length = model.config.text.context_length

    def encode_text(ids_BL: Tensor) -> Tensor:
        return theirs.encode_text(F.pad(their_ids(model, ids_BL), (0, length - ids_BL.shape[1])))

    return encoder(theirs.encode_image), encoder(encode_text)


def load_m1clip(folder: Path, model: CLIP) -> tuple[Encode, Encode]:
    again, _ = import_clip(str(folder))
    # Our own reader keeps the library's ids.
    has_their_ids = not (folder / "config.json").is_file() or again.config != model.config
    to_ids = partial(their_ids, model) if has_their_ids else lambda ids: ids
    return encoder(again.embed_images), encoder(lambda ids: again.embed_tokens(to_ids(ids)))


LOADERS: dict[str, Callable[[Path, CLIP], tuple[Encode, Encode]]] = {
    "transformers": load_transformers,
    "open_clip": load_open_clip,
    "m1clip": load_m1clip,
}


def encoder(embed: Callable[[Tensor], Tensor]) -> Encode:
    """A function of arrays that returns unit vectors."""

    @torch.inference_mode()
    def encode(batch: Array) -> Array:
        return F.normalize(embed(torch.from_numpy(batch)), dim=-1).numpy()

    return encode


def their_ids(model: CLIP, ids_BL: Tensor) -> Tensor:
    """Our token ids in the vocabulary of the written folder, where the end token has the highest id."""
    assert model.tokenizer is not None
    end_id, last_id = model.tokenizer.end_id, with_end_last(model.tokenizer).end_id
    swapped_BL = torch.where(ids_BL == end_id, last_id, ids_BL)
    return torch.where(ids_BL == last_id, end_id, swapped_BL) if end_id != last_id else ids_BL
