"""rclip: the command line indexes a folder and searches it; the embeddings are those of its own model class."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from job import read_job, write_answer
from rclip.model import Model
from rclip.utils.helpers import read_image

job = read_job()
data, photos = Path(job.out) / "data", Path(job.out) / "photos"
shutil.copytree(job.folder, data)  # the index is written beside the model
photos.mkdir()
names = [f"{row:05d}{Path(image).suffix.lower()}" for row, image in enumerate(job.images)]
for name, image in zip(names, job.images, strict=True):
    shutil.copy(image, photos / name)
os.environ |= {"RCLIP_DATADIR": str(data), "RCLIP_USE_ONNX_ON_MACOS": "1"}


def search(caption: str) -> list[int]:
    command = [sys.executable, "-m", "rclip", "--filepath-only", "--top", "3", caption]
    done = subprocess.run(command, cwd=photos, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [names.index(Path(line).name) for line in done.stdout.splitlines() if line]


top = [search(caption) for caption in job.captions]

model = Model()
images = [model.compute_image_features([read_image(str(photos / name))])[0] for name in names]
write_answer(job, "rclip", images, model.compute_text_features(job.captions), top=top)
