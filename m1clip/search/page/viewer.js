// The full-screen view of one result. It is an entry of the history, so that Back closes it, as on phones.
import {integer} from "./elements.js";

const $ = (id) => document.getElementById(id);
const AHEAD = 5;  // results before the last one, from which on more are fetched
const SWIPE = 50;  // pixels
const THUMBNAIL = 512, ENLARGED = 2;  // pixels of a static page's thumbnails; how far images are enlarged at most

export class Viewer {
  /** `actions`: more() fetches results, isComplete() says that there are none, like(result), closed(index), describe(result). */
  constructor(source, actions) {
    Object.assign(this, {source, actions, results: [], index: 0});
    const dialog = $("viewer");
    $("close").onclick = () => this.back();
    $("previous").onclick = () => this.show(this.index - 1);
    $("next").onclick = () => this.show(this.index + 1);
    $("like-this").onclick = () => this.actions.like(this.results[this.index]);
    dialog.oncancel = (event) => { event.preventDefault(); this.back(); };
    addEventListener("keydown", (event) => { if (this.isOpen) this.onKey(event); });  // also when nothing has the focus
    let startX = null;
    $("stage").ontouchstart = (event) => { startX = event.touches.length === 1 ? event.touches[0].clientX : null; };
    $("stage").ontouchend = (event) => {
      const distance = startX === null ? 0 : event.changedTouches[0].clientX - startX;
      if (Math.abs(distance) > SWIPE) this.show(this.index - Math.sign(distance));
    };
    // The second click of a double click on a thumbnail comes here.
    $("stage").onclick = (event) => { if (event.target === $("stage") && event.detail === 1) this.back(); };
    if (navigator.clipboard) $("copy").onclick = () => this.copyPath();
    else $("copy").remove();  // not an encrypted or local connection
  }

  get isOpen() { return $("viewer").open; }

  open(index) {
    history.pushState({...history.state, shows: true}, "");
    this.showDialog(index);
  }

  showDialog(index) {
    $("viewer").showModal();
    $("viewer").focus();  // not its first button, which Enter would press
    this.show(index);
  }

  /** Leave through the history, so that its entry is gone; once, however often a button is clicked. */
  back() {
    if (!this.isLeaving) history.back();
    this.isLeaving = true;
  }

  /** Close it; whether it was open, so that what follows replaces its entry of the history. */
  close() {
    const wasOpen = this.isOpen;
    $("viewer").close();
    return wasOpen;
  }

  /** Whether a change of the history was about the viewer alone. */
  popped() {
    this.isLeaving = false;
    if (history.state?.shows && !this.isOpen && this.results.length) {  // forward
      this.showDialog(this.index);
      return true;
    }
    if (!this.isOpen) return false;
    $("viewer").close();
    this.actions.closed(this.index);
    return true;
  }

  /** There are other or more results. */
  update(results) {
    this.results = results;
    if (this.isOpen && results.length) this.drawButtons();
  }

  show(index) {
    if (index < 0 || index >= this.results.length) return;
    this.index = index;
    const result = this.results[index], original = this.source.original(result);
    this.drawButtons();
    this.drawFacts(result, original);
    this.load(result, original);
    for (const near of [this.results[index + 1], this.results[index - 1]]) {
      if (near) new Image().src = this.source.original(near) ?? this.source.thumbnail(near);  // it will be wanted next
    }
    if (index >= this.results.length - AHEAD && !this.actions.isComplete()) this.actions.more();
  }

  /** The thumbnail at once, the image when it is there. */
  async load(result, original) {
    const full = $("full"), image = new Image(), thumbnail = this.source.thumbnail(result);
    const ratio = result.width / result.height, width = original ? result.width : Math.min(result.width, THUMBNAIL * Math.min(1, ratio));
    full.style.setProperty("--ratio", ratio);
    full.style.setProperty("--most", `${ENLARGED * width}px`);
    full.src = thumbnail;
    full.alt = result.name;
    $("missing").hidden = true;
    image.src = original ?? thumbnail;
    const isLoaded = await image.decode().then(() => true, () => false);
    if (result !== this.results[this.index]) return;
    if (isLoaded) full.src = image.src;
    $("missing").hidden = isLoaded;
  }

  drawButtons() {
    $("previous").hidden = this.index === 0;
    $("next").hidden = this.index === this.results.length - 1;
  }

  drawFacts(result, original) {
    const date = new Date(result.date), size = result.bytes;
    const facts = [
      Number.isNaN(date.valueOf()) ? "" : date.toLocaleString(undefined, {dateStyle: "medium", timeStyle: "short"}),
      `${integer(result.width)} × ${integer(result.height)}`, size >= 1e6 ? `${(size / 1e6).toFixed(1)} MB` : `${Math.ceil(size / 1e3)} kB`,
      this.actions.describe(result), result.copies.length ? `also ${result.copies.join(", ")}` : "",
    ];
    $("file-name").textContent = result.name;
    $("file-facts").textContent = facts.filter(Boolean).join(" · ");
    for (const id of ["original", "download"]) { $(id).hidden = !original; if (original) $(id).href = original; }
    $("download").download = result.name.split("/").at(-1);
    $("copy").textContent = "copy path";
  }

  async copyPath() {
    await navigator.clipboard.writeText(this.results[this.index].name);
    $("copy").textContent = "copied";
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1};
    if (moves[event.key]) { event.preventDefault(); this.show(this.index + moves[event.key]); }
    if (event.key === "Home") this.show(0);
    if (event.key === "End") this.show(this.results.length - 1);
    if (event.key === "m") this.actions.like(this.results[this.index]);
  }
}
