"""A tiny CLIP exported to ONNX in a second, for tests of what uses an export."""

import hashlib
import json
from pathlib import Path

import torch

from conftest import tiny_config
from m1clip.config import to_json
from m1clip.export.graph import ImageEncoder, TextEncoder, make_encoders
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer

GRAPHS = {"vision": "vision_model.onnx", "text": "text_model.onnx"}


def tiny_clip() -> CLIP:
    torch.manual_seed(0)
    return CLIP(tiny_config(), Tokenizer.characters()).eval()


def write_export(model: CLIP, folder: Path, **changes: object) -> None:
    """export.json of the graphs that are in the folder, with some keys changed."""
    scale, bias = model.scale_and_bias
    files = {}
    for path in [*folder.glob("*.onnx*"), folder / "config.json", folder / "tokenizer.json"]:
        data = path.read_bytes()
        files[path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    record = {"format": "onnx", **GRAPHS, "logit_scale": scale, "logit_bias": bias, "files": files, "opset": 20}
    (folder / "export.json").write_text(json.dumps({**record, **changes}))


def export_graph(encoder: ImageEncoder | TextEncoder, path: Path, dimensions: dict[int, torch.export.Dim]) -> None:
    names = {"input_names": [encoder.input_name], "output_names": [encoder.output_name]}
    program = torch.onnx.export(
        encoder.eval(), (encoder.example(2),), dynamo=True, dynamic_shapes=(dimensions,), verbose=False, **names
    )
    program.save(str(path), external_data=False)


def export_tiny(model: CLIP, folder: Path) -> Path:
    """Both encoders with a symbolic batch, and what load_onnx needs beside them."""
    encoders = make_encoders(model)
    batch = torch.export.Dim("batch", min=1, max=4096)
    length = torch.export.Dim("length", min=2, max=model.config.text.context_length)
    export_graph(encoders.image, folder / GRAPHS["vision"], {0: batch})
    export_graph(encoders.text, folder / GRAPHS["text"], {0: batch, 1: length})
    (folder / "config.json").write_text(to_json(model.config))
    model.tokenizer.save(folder / "tokenizer.json")
    write_export(model, folder)
    return folder
