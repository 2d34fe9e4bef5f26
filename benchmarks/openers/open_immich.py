"""immich-ml, which no registry has: its files, image sizes, padding and session options, written anew.

As in immich_ml 3.1: models/clip/{textual,visual}.py, models/transforms.py and sessions/ort.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from job import rank_images, read_job, write_answer
from PIL import Image
from tokenizers import Tokenizer

job = read_job()
(folder,) = (Path(job.folder) / "clip").iterdir()  # the name of a model that immich knows


def open_session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.inter_op_num_threads, options.intra_op_num_threads = 1, 2
    cpu = [("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]
    return ort.InferenceSession(str(path), options, cpu)


def read_json(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


visual, cfg = open_session(folder / "visual/model.onnx"), read_json(folder / "visual/preprocess_cfg.json")
size = cfg["size"][0] if isinstance(cfg["size"], list) else cfg["size"]
mean, std = np.array(cfg["mean"], np.float32), np.array(cfg["std"], np.float32)


def embed_image(path: str) -> np.ndarray:
    image = Image.open(path).convert("RGB")
    short = min(image.size)
    # The aspect ratio is computed first and both divisions truncate; torchvision multiplies first and rounds the crop.
    width, height = (size if edge == short else int(edge / short * size) for edge in image.size)
    image = image.resize((width, height), Image.Resampling[cfg["interpolation"].upper()])
    left, top = int(width / 2 - size / 2), int(height / 2 - size / 2)
    pixels_HWC = np.asarray(image.crop((left, top, left + size, top + size)), np.float32) / 255
    pixels_HWC = pixels_HWC * (1 / std) - mean / std
    return visual.run(None, {"image": pixels_HWC.transpose(2, 0, 1)[None]})[0][0]


textual, length = (
    open_session(folder / "textual/model.onnx"),
    read_json(folder / "config.json")["text_cfg"]["context_length"],
)
tokenizer = Tokenizer.from_file(str(folder / "textual/tokenizer.json"))
pad = read_json(folder / "textual/tokenizer_config.json")["pad_token"]
tokenizer.enable_padding(length=length, pad_token=pad, pad_id=tokenizer.token_to_id(pad))
tokenizer.enable_truncation(max_length=length)


def embed_text(caption: str) -> np.ndarray:
    ids = tokenizer.encode(" ".join(caption.split())).ids
    return textual.run(None, {"text": np.array([ids], np.int32)})[0][0]


images, texts = [embed_image(path) for path in job.images], [embed_text(caption) for caption in job.captions]
write_answer(job, "", images, texts, top=rank_images(texts, images))
