"""open_clip: its transforms, tokenizer and encoders."""

import open_clip
import torch
from job import read_job, write_answer
from PIL import Image

job = read_job()
name = f"local-dir:{job.folder}"
model, _, transform = open_clip.create_model_and_transforms(name)
with torch.no_grad():
    images = torch.cat(
        [model.eval().encode_image(transform(Image.open(path))[None], normalize=True) for path in job.images]
    )
    texts = model.encode_text(open_clip.get_tokenizer(name)(job.captions), normalize=True)
write_answer(job, "open_clip_torch", images, texts, labels=(images @ texts.T).argmax(1).tolist())
