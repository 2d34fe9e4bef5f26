"""sentence-transformers: one model for images and texts, and its semantic search."""

from job import read_job, write_answer
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import semantic_search

job = read_job()
model = SentenceTransformer(job.folder, device="cpu", local_files_only=True)
images, texts = model.encode([Image.open(path) for path in job.images]), model.encode(job.captions)
hits = semantic_search(texts, images, top_k=3)
write_answer(job, "sentence-transformers", images, texts, top=[[hit["corpus_id"] for hit in row] for row in hits])
