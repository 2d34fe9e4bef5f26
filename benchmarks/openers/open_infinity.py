"""infinity: its engine, as its server runs it."""

import asyncio
from pathlib import Path

from infinity_emb import AsyncEmbeddingEngine, EngineArgs
from job import rank_images, read_job, write_answer

job = read_job()


async def main() -> None:
    args = EngineArgs(model_name_or_path=job.folder, engine="torch", device="cpu", model_warmup=False)
    engine = AsyncEmbeddingEngine.from_args(args)
    async with engine:
        images, _ = await engine.image_embed(images=[Path(path).read_bytes() for path in job.images])
        texts, _ = await engine.embed(job.captions)
    write_answer(job, "infinity-emb", images, texts, top=rank_images(texts, images))


asyncio.run(main())
