"""transformers: the zero-shot pipeline, and the features of its CLIPModel."""

from functools import partial

import torch
from job import read_job, write_answer
from PIL import Image
from transformers import CLIPModel, CLIPProcessor, pipeline

job = read_job()
model, processor = CLIPModel.from_pretrained(job.folder), CLIPProcessor.from_pretrained(job.folder)
photos = [Image.open(path).convert("RGB") for path in job.images]
with torch.no_grad():
    tokens = processor(text=job.captions, padding=True, truncation=True, return_tensors="pt")
    output = model(**tokens, **processor(images=photos, return_tensors="pt"))
classify = pipeline("zero-shot-image-classification", job.folder)
classify.tokenizer = partial(classify.tokenizer, truncation=True)  # it ignores tokenizer_kwargs (5.23)
answers = [classify(photo, candidate_labels=job.captions, hypothesis_template="{}") for photo in photos]
labels = [job.captions.index(answer[0]["label"]) for answer in answers]
write_answer(job, "transformers", output.image_embeds, output.text_embeds, labels=labels)
