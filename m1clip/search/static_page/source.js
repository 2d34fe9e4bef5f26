// Where a static page gets its images from: files beside it. The same functions as of the server's source.js.
// Arrays are named as in catalog.py: files have images, and an image has several files if there are copies.
import {QueryEncoder} from "./encoder.js";
import {addTerms, parseQuery} from "./query.js";

const FORMAT = 1, DAY = 86400;
const TOP_SHARE = 0.01;  // of the reference, as in calibration.py
export const canUpload = false;

/** Files are checked for changes, or a page that was exported again would mix old files with new ones. */
export async function fetchFile(path) {
  let response;
  try { response = await fetch(path, {cache: "no-cache"}); } catch { throw new Error(`${path} cannot be fetched. Is there a connection?`); }
  if (!response.ok) throw new Error(`${path} cannot be fetched: ${response.status} ${response.statusText}`);
  return response;
}

const fetchJSON = async (path) => (await fetchFile(path)).json();

async function load() {
  const [settings, items, buffer] = await Promise.all([fetchJSON("settings.json"), fetchJSON("items.json"),
    fetchFile("vectors.bin").then((response) => response.arrayBuffer())]);
  const images = items.versions.length, width = settings.embed_dim;
  if (settings.static_format !== FORMAT || buffer.byteLength !== images * (4 + width)) {
    throw new Error("The files of this page do not belong together: reload it, or export it again.");
  }
  const reference = settings.calibration ? readVectors(await (await fetchFile("reference.bin")).arrayBuffer(), width) : null;
  return {settings, items, reference, ...readVectors(buffer, width), encoder: new QueryEncoder(settings.text, fetchFile)};
}

/** Scales in float32, then int8 vectors. */
function readVectors(buffer, width) {
  const images = buffer.byteLength / (4 + width);
  return {images, width, scales: new Float32Array(buffer, 0, images), vectors: new Int8Array(buffer, 4 * images)};
}

const library = load();

export async function facts() {
  const {settings, items, encoder} = await library;
  versions = items.versions;
  encoder.load().catch(() => {});  // an error is shown by the first search
  return settings.library;
}

export const original = () => null;
let versions = [];  // of the images, once they are known
export const thumbnail = ({row, version}) => {
  const name = version ?? versions[row] ?? "";
  return `thumbnails/${name.slice(0, 2)}/${name}.jpg`;
};

// ---- searching, as in shared.py ----

export async function search(query, upload, {offset, count, report}) {
  const data = await library, {items, images} = data;
  const isFile = selectFiles(items, query), isImage = new Uint8Array(images);
  for (let file = 0; file < isFile.length; file++) if (isFile[file]) isImage[items.images[file]] = 1;
  const matching = isImage.reduce((sum, one) => sum + one, 0);
  const vector = await encodeQuery(data, query, report);
  if (query.like != null) isImage[query.like] = 0;
  const candidates = [...isImage.keys()].filter((image) => isImage[image]);
  if (!vector) {
    const dates = firstDates(items, images);
    candidates.sort((a, b) => dates[b] - dates[a] || a - b);
    return {images: matching, is_nothing: false, results: candidates.slice(offset, offset + count).map((image) => describe(data, image, isFile))};
  }
  const scores = scoreAll(data, vector);
  candidates.sort((a, b) => scores[b] - scores[a] || a - b);
  const results = candidates.slice(offset, offset + count).map((image) => ({...describe(data, image, isFile), score: scores[image]}));
  const isNothing = query.like == null && candidates.length > 0 && hasNothing(data, vector, scores[candidates[0]], meanOf(scores));
  return {images: matching, is_nothing: isNothing, results};
}

const meanOf = (scores) => scores.reduce((sum, score) => sum + score, 0) / scores.length;

/** Whether the library has nothing like a text, as in calibration.py. */
function hasNothing({settings, reference}, vector, best, mean) {
  if (!reference) return false;
  const {ratio, min_peak: minPeak} = settings.calibration;
  const scores = scoreAll(reference, vector).sort(), count = Math.max(1, Math.round(TOP_SHARE * scores.length));
  const center = meanOf(scores), height = meanOf(scores.slice(-count)) - center;
  const std = Math.sqrt(meanOf(scores.map((score) => (score - center) ** 2)));
  return height >= minPeak * std && best - Math.min(mean, center) < ratio * height;
}

function selectFiles(items, {folder, from, to}) {
  const seconds = (day) => Date.parse(`${day}T00:00:00Z`) / 1000;
  const first = from ? seconds(from) : -Infinity, last = to ? seconds(to) + DAY : Infinity, prefix = folder ? `${folder}/` : "";
  return items.names.map((name, file) => name.startsWith(prefix) && items.dates[file] >= first && items.dates[file] < last);
}

/** The date of the first file of each image. */
function firstDates({images, dates}, count) {
  const first = new Float64Array(count);
  for (let file = images.length - 1; file >= 0; file--) first[images[file]] = dates[file];
  return first;
}

async function encodeQuery(data, query, report) {
  const terms = query.q.trim() ? parseQuery(query.q) : [];
  if (terms.length && !data.encoder.isLoaded) {
    report(`loading the text encoder, ${(data.settings.text.download_bytes / 1e6).toFixed(1)} MB …`);
    await data.encoder.load();
  }
  const vectors = [];
  for (const {text} of terms) vectors.push(await data.encoder.encode(text));
  const weights = terms.map(({weight}) => weight);
  if (query.like != null) {
    if (query.like >= data.images) throw new Error(`The library has no image with row ${query.like}.`);
    vectors.push(imageVector(data, query.like));
    weights.push(1);
  }
  return vectors.length ? addTerms(weights, vectors) : null;
}

function imageVector({vectors, scales, width}, image) {
  return Float32Array.from(vectors.subarray(image * width, (image + 1) * width), (value) => value * scales[image]);
}

/** Cosine similarities of all images. */
function scoreAll({vectors, scales, images, width}, vector) {
  const scores = new Float32Array(images);
  for (let image = 0, at = 0; image < images; image++) {
    let sum = 0;
    for (let i = 0; i < width; i++, at++) sum += vectors[at] * vector[i];
    scores[image] = sum * scales[image];
  }
  return scores;
}

function describe({items}, image, isFile) {
  let file = lowerBound(items.images, image);
  const files = [];
  for (; items.images[file] === image; file++) files.push(file);
  files.sort((a, b) => isFile[b] - isFile[a] || a - b);
  const [shown, ...copies] = files;
  return {row: image, version: items.versions[image], name: items.names[shown], copies: copies.map((copy) => items.names[copy]),
    width: items.widths[image], height: items.heights[image], bytes: items.bytes[shown],
    date: new Date(1000 * items.dates[shown]).toISOString().slice(0, 19), score: null};
}

/** The first position of a value in a sorted list. */
function lowerBound(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}
