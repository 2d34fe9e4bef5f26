"""fastembed: its two CLIP classes with `specific_model_path`."""

from pathlib import Path

from fastembed import ImageEmbedding, TextEmbedding
from job import rank_images, read_job, write_answer

job = read_job()
vision = ImageEmbedding("Qdrant/clip-ViT-B-32-vision", specific_model_path=str(Path(job.folder) / "vision"))
text = TextEmbedding("Qdrant/clip-ViT-B-32-text", specific_model_path=str(Path(job.folder) / "text"))
images, texts = list(vision.embed(job.images)), list(text.embed(job.captions))
write_answer(job, "fastembed", images, texts, top=rank_images(texts, images))
