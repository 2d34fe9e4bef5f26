// transformers.js in Node: the zero-shot pipeline, and the two encoders.
import { readFileSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const job = JSON.parse(readFileSync(process.argv[2], "utf8"));
const require = createRequire(join(process.cwd(), "package.json")); // the packages are in the current folder
const library = await import(pathToFileURL(require.resolve("@huggingface/transformers")).href);
const { AutoProcessor, AutoTokenizer, CLIPTextModelWithProjection, CLIPVisionModelWithProjection } = library;
const { env, load_image, pipeline } = library;

env.allowRemoteModels = false;
env.localModelPath = dirname(job.folder);
const [name, options] = [basename(job.folder), { dtype: "fp32", device: "cpu" }];

const tokenizer = await AutoTokenizer.from_pretrained(name);
const text_model = await CLIPTextModelWithProjection.from_pretrained(name, options);
const { text_embeds } = await text_model(tokenizer(job.captions, { padding: true, truncation: true }));
const processor = await AutoProcessor.from_pretrained(name);
const vision_model = await CLIPVisionModelWithProjection.from_pretrained(name, options);
const classify = await pipeline("zero-shot-image-classification", name, options);
const images = [], labels = [];
for (const path of job.images) {
  const { image_embeds } = await vision_model(await processor(await load_image(path)));
  images.push(...image_embeds.tolist());
  const [best] = await classify(path, job.captions, { hypothesis_template: "{}" });
  labels.push(job.captions.indexOf(best.label));
}
const answer = { version: env.version, images, texts: text_embeds.tolist(), labels };
writeFileSync(join(job.out, "answer.json"), JSON.stringify(answer));
