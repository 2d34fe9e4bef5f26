"""CLIP_benchmark: zero-shot classification of the images, labelled with the captions that m1clip assigns."""

import io
import json
import sys
import tarfile
from pathlib import Path

from clip_benchmark.cli import main
from job import read_job, write_answer

job = read_job()
data, result = Path(job.out) / "wds", Path(job.out) / "result.json"
(data / "test").mkdir(parents=True)
with tarfile.open(data / "test" / "0.tar", "w") as tar:
    for row, (image, label) in enumerate(zip(job.images, job.labels, strict=True)):
        for suffix, content in (("jpg", Path(image).read_bytes()), ("cls", str(label).encode())):
            info = tarfile.TarInfo(f"{row:06d}.{suffix}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
(data / "test" / "nshards.txt").write_text("1")
(data / "classnames.txt").write_text("\n".join(job.captions), encoding="utf-8")
(data / "zeroshot_classification_templates.txt").write_text("{c}")
model = ["--model", f"local-dir:{job.folder}", "--pretrained", ""]
dataset = ["--dataset", f"wds/{data.name}", "--dataset_root", str(data), "--task", "zeroshot_classification"]
sys.argv = ["clip_benchmark", "eval", *model, *dataset, "--output", str(result), "--no_amp", "--num_workers", "0"]
main()
write_answer(job, "clip-benchmark", accuracy=json.loads(result.read_text())["metrics"]["acc1"])
