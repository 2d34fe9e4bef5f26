// The text encoder of a CLIP in the browser: tokenizer and ONNX Runtime. Fetched when it is first needed.
import {cleanText} from "./clean.js";

/** The bytes of a gzipped file; a host that says Content-Encoding: gzip has unpacked them already. */
async function unpack(response) {
  const bytes = new Uint8Array(await response.arrayBuffer());
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export class QueryEncoder {
  /** `settings` are those of the tokenizer and of the graph, in settings.json. */
  constructor(settings, fetchFile) {
    Object.assign(this, {settings, fetchFile, isLoaded: false, loading: null, cache: new Map()});
  }

  load() {
    this.loading ??= this.loadFiles().catch((error) => { this.loading = null; throw error; });
    return this.loading;
  }

  async loadFiles() {
    const [ort, {Tokenizer}, wasm, graph, tokenizer] = await Promise.all([
      import("./ort.js"), import("./tokenizers.js"), this.fetchFile("ort.wasm.gz").then(unpack),
      this.fetchFile(this.settings.file).then((response) => response.arrayBuffer()),
      this.fetchFile("tokenizer.json").then((response) => response.json()),
    ]);
    ort.env.wasm.numThreads = 1;  // threads need SharedArrayBuffer, and that COOP and COEP headers
    ort.env.wasm.wasmBinary = wasm;
    this.tokenizer = new Tokenizer(tokenizer, {});
    this.Tensor = ort.Tensor;
    this.session = await ort.InferenceSession.create(new Uint8Array(graph), {executionProviders: ["wasm"]});
    this.isLoaded = true;
  }

  /** Token ids, as of tokenizer.py: cleaned, truncated and padded. */
  tokenize(text) {
    const {clean, context_length: length, zeroed_id: zeroed, unknown_ids: [unknown]} = this.settings;
    let ids = this.tokenizer.encode(cleanText(text, clean)).ids.map((id) => id ?? unknown);
    if (zeroed !== null) ids = ids.map((id) => id === zeroed ? 0 : id);
    return ids.length > length ? [...ids.slice(0, length - 1), ids.at(-1)] : ids;
  }

  /** INT8 ranges depend on the padding, so it is that of Python. */
  pad(ids) {
    const {fixed_length: fixed, pad_id: id, pad_left: left} = this.settings;
    const width = fixed ?? ids.length;
    const padding = Array(Math.max(0, width - ids.length)).fill(id);
    return left ? [...padding, ...ids] : [...ids, ...padding];
  }

  /** A unit vector. */
  async encode(text) {
    if (this.cache.has(text)) return this.cache.get(text);
    await this.load();
    this.requireKnownScript(text);
    const ids = this.pad(this.tokenize(text)), {session, Tensor} = this, isLong = this.settings.type === "tensor(int64)";
    const values = isLong ? BigInt64Array.from(ids, BigInt) : Int32Array.from(ids);
    const input = new Tensor(isLong ? "int64" : "int32", values, [1, ids.length]);
    // One query at a time: a session cannot be run again before its last run has ended.
    this.running = (this.running ?? Promise.resolve()).catch(() => {}).then(() => session.run({[session.inputNames[0]]: input}));
    const vector = (await this.running)[session.outputNames[0]].data;
    if (this.cache.size > 500) this.cache.clear();
    this.cache.set(text, vector);
    return vector;
  }

  /** As find_unknown_script in query.py: letters that are single bytes or unknown tokens are of another language. */
  requireKnownScript(text) {
    const letters = text.match(/\p{L}/gu) ?? [], unknown = this.settings.unknown_ids;
    if (letters.every((letter) => letter <= "\x7f")) return;
    const {ids} = this.tokenizer.encode(letters.join("").toLowerCase(), {add_special_tokens: false}), bytes = new Blob(letters).size;
    if (ids.every((id) => id == null || unknown.includes(id)) || (ids.length >= bytes && bytes > letters.length)) {
      throw new Error(`The model's tokenizer does not know “${text}”: it was trained on other languages.`);
    }
  }
}
