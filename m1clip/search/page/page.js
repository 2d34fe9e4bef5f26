// The search page. `view` is what the user searches for; it is also in the address. Names of files are only ever set
// as text, never as HTML. source.js says where images come from: a server, or files beside the page.
import {el, integer} from "./elements.js";
import * as source from "./source.js";
import {Viewer} from "./viewer.js";

const COUNT = 60, MAX_COUNT = 200, MAX_RESULTS = 10000;  // results that are fetched at once, at most, and in all
const TYPING_MS = 120;
const EXAMPLES = ["a dog", "people at a table", "a street at night"], FORMULAS = ["beach - people", "cat + 0.5 * window"];
const FILTERS = ["folder", "from", "to"];
const $ = (id) => document.getElementById(id);
const view = {q: "", like: null, folder: "", from: "", to: ""};
const uploads = [];  // images that were searched by; the entries of the history have their numbers
let upload = null;  // {file, address} of the current one
let library = {images: 0, folders: []}, results = [], total = 0, isComplete = true, isNothing = false, showsNearest = false;
let request = null, searchTimer = 0, isTyping = false;

// ---- the address ----

function saveView(push) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) if (value !== "" && value !== null) query.set(name, value);
  const state = {upload: upload ? uploads.indexOf(upload) : null};
  if (push) history.replaceState({...history.state, top: scrollY, count: results.length}, "");
  history[push ? "pushState" : "replaceState"](state, "", String(query) ? `?${query}` : location.pathname);
}

function restoreView() {
  const query = new URLSearchParams(location.search), row = query.get("like");
  for (const name of ["q", ...FILTERS]) view[name] = query.get(name) ?? "";
  view.like = /^\d{1,15}$/.test(row ?? "") ? Number(row) : null;
  upload = uploads[history.state?.upload] ?? null;
  $("query").value = view.q;
  for (const name of FILTERS) $(name).value = view[name];
  view.folder = $("folder").value;  // a folder that is gone is no filter
  clearTimeout(searchTimer);
  drawQuery();
}

/** The user wants something else; `push` makes it a new entry of the history. */
function changeView(changes, push = true) {
  Object.assign(view, changes);
  showsNearest = false;
  saveView(push);
  drawQuery();
  search();
}

// ---- searching ----

const isQuery = () => view.q.trim() !== "" || view.like !== null || upload !== null;

/** The query as far as it is typed: an operator at its end has nothing to combine yet. */
const typedQuery = () => view.q.trim().replace(/\s+[+-]$/, "");

/** Back returns to the place in the results where the search was left. */
async function searchAgain() {
  const {state} = history;
  await search(0, Math.min(MAX_COUNT, Math.max(COUNT, state?.count ?? 0)));
  if (state === history.state) scrollTo(0, state?.top ?? 0);  // or another search has started meanwhile
}

async function search(offset = 0, count = COUNT) {
  request?.abort();
  const current = request = new AbortController();
  setBusy(true);
  try {
    const options = {offset, count, signal: current.signal, report: (text) => { $("status").textContent = text; }};
    const answer = await source.search({...view, q: typedQuery()}, upload?.file ?? null, options);
    if (current !== request) return;
    results = offset ? [...results, ...answer.results] : answer.results;
    isComplete = answer.results.length < count || results.length >= MAX_RESULTS;
    ({images: total, is_nothing: isNothing} = answer);
    showError("");
    draw(offset);
  } catch (error) {
    if (current !== request || error.name === "AbortError") return;
    if (!offset) { results = []; total = 0; isComplete = true; isNothing = false; draw(); $("status").textContent = ""; }
    showError(error.message);
  } finally {
    if (current === request) { request = null; setBusy(false); }
  }
}

function setBusy(busy) {
  $("loading").hidden = !busy;
  $("results").setAttribute("aria-busy", String(busy));
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

// ---- drawing ----

function drawQuery() {
  const image = upload ? upload.address : view.like === null ? null : source.thumbnail({row: view.like});
  $("example").hidden = image === null;
  if (image !== null) $("example-image").src = image;
  $("query").placeholder = image === null ? "search images ( / )" : "add words";
  const filters = FILTERS.filter((name) => view[name]).length;
  $("clear").hidden = !filters;
  $("show-filters").textContent = filters ? `filters (${filters})` : "filters";
  document.title = `${view.q.trim() || (image === null ? "m1clip search" : "similar images")} – ${library.folder ?? ""}`;
}

function draw(offset = 0) {
  const isHidden = isNothing && !showsNearest;
  $("examples").hidden = isQuery();
  $("nothing").hidden = !isHidden;
  $("results").hidden = isHidden;
  $("nothing-text").textContent = `Nothing like “${typedQuery()}” among ${integer(total)} images.`;
  $("status").textContent = isHidden ? "" : describe();
  if (offset) $("results").append(...results.slice(offset).map(tileOf));
  else {
    $("results").replaceChildren(...results.map(tileOf));
    if (scrollY > $("results").offsetTop) scrollTo(0, 0);
  }
  for (const [key, tile] of tiles) if (!tile.isConnected) tiles.delete(key);
  makeReachable($("results").querySelector(".thumb"));
  viewer.update(results);
}

function describe() {
  const images = (count) => `${integer(count)} ${count === 1 ? "image" : "images"}`;
  const isFiltered = FILTERS.some((name) => view[name]);
  if (!total) return isFiltered ? "No image is in this folder and of these days." : "The library has no images.";
  return images(total) + (isFiltered ? ` of ${integer(library.images)}` : "") + (isNothing ? ", nothing like it; the nearest first" : isQuery() ? ", best first" : ", newest first");
}

const tiles = new Map();  // by row and version: an image that stays is not loaded again

function tileOf(result) {
  const key = `${result.row} ${result.version}`;
  if (!tiles.has(key)) tiles.set(key, createTile(result, key));
  const tile = tiles.get(key), [name, score] = tile.querySelector(".caption").children;
  name.textContent = result.name.split("/").at(-1);
  score.textContent = [result.copies.length ? `+${result.copies.length}` : "", shortScore(result)].filter(Boolean).join(" · ");
  tile.title = [result.name, ...result.copies, longScore(result)].filter(Boolean).join("\n");
  tile.querySelector(".thumb").setAttribute("aria-label", [result.name, longScore(result)].filter(Boolean).join(", "));
  return tile;
}

function createTile(result, key) {
  const image = el("img", {src: source.thumbnail(result), alt: "", loading: "lazy", decoding: "async"});
  const open = el("button", {type: "button", class: "thumb", tabindex: "-1"}, image);
  const similar = el("button", {type: "button", class: "similar", tabindex: "-1", "aria-label": `more like ${result.name}`},
    $("similar-icon").content.cloneNode(true), el("span", {}, "similar"));
  const tile = el("li", {}, open, similar, el("div", {class: "caption"}, el("span"), el("span", {class: "score"})));
  tile.style.setProperty("--ratio", Math.min(2.5, Math.max(0.5, result.width / result.height)).toFixed(4));
  image.draggable = false;
  image.onerror = () => {
    open.replaceChildren(el("span", {class: "gone"}, "cannot be loaded"));
    tiles.delete(key);
  };
  open.onclick = () => viewer.open(indexOf(tile));
  similar.onclick = () => searchLike(result.row);
  return tile;
}

const indexOf = (tile) => [...$("results").children].indexOf(tile);
const shortScore = ({score}) => score?.toFixed(3) ?? "";
const longScore = ({score}) => score == null ? "" : `cosine ${score.toFixed(3)}`;

// ---- searching by image ----

function searchLike(row) {
  upload = null;
  searchByImage({like: row, q: ""});
}

function searchByImage(changes) {
  $("query").value = "";
  changeView(changes, !viewer.close());
  scrollTo(0, 0);
}

function searchByFile(file) {
  if (!source.canUpload || !file) return;
  if (file.type && !file.type.startsWith("image/")) { showError(`${file.name} is not an image.`); return; }
  upload = {file, address: URL.createObjectURL(file)};
  uploads.push(upload);
  searchByImage({like: null, q: ""});
}

function addUploads() {
  $("pick").hidden = false;
  $("pick").onclick = () => $("file").click();
  $("file").onchange = () => { searchByFile($("file").files[0]); $("file").value = ""; };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  for (const type of ["dragenter", "dragover"]) {
    addEventListener(type, (event) => { if (hasFiles(event)) { event.preventDefault(); $("drop").hidden = false; } });
  }
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidden = true; });  // it left the window
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    $("drop").hidden = true;
    searchByFile(event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => {
    const file = [...event.clipboardData?.files ?? []].find(({type}) => type.startsWith("image/"));
    if (file) { event.preventDefault(); searchByFile(file); }
  });
}

// ---- keyboard ----

/** Of all results one is reached by Tab; arrow keys go on from there. */
function makeReachable(open) {
  for (const other of $("results").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  if (!open) return;
  open.tabIndex = 0;
  open.parentElement.querySelector(".similar").tabIndex = 0;
}

function focusTile(index) {
  const open = $("results").children[Math.max(0, Math.min(index, results.length - 1))]?.querySelector(".thumb");
  if (!open) return;
  makeReachable(open);
  open.focus();
  open.scrollIntoView({block: "nearest"});
}

/** The tile in the row above or below that is nearest. */
function verticalNeighbor(index, direction) {
  const boxes = [...$("results").children].map((tile) => tile.getBoundingClientRect());
  const {left, right, top} = boxes[index], middle = (left + right) / 2;
  const rows = boxes.map((box) => box.top).filter((other) => direction * (other - top) > 4);
  const row = direction > 0 ? Math.min(...rows) : Math.max(...rows);
  let nearest = index;
  for (const [other, box] of boxes.entries()) {
    const distance = Math.abs((box.left + box.right) / 2 - middle);
    const best = nearest === index ? Infinity : Math.abs((boxes[nearest].left + boxes[nearest].right) / 2 - middle);
    if (Math.abs(box.top - row) <= 4 && distance < best) nearest = other;
  }
  return nearest;
}

function onGridKey(event) {
  const tile = event.target.closest("li"), index = tile ? indexOf(tile) : -1;
  if (index < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {ArrowRight: () => index + 1, ArrowLeft: () => index - 1, Home: () => 0, End: () => results.length - 1,
    ArrowDown: () => verticalNeighbor(index, 1), ArrowUp: () => verticalNeighbor(index, -1)};
  if (event.key === "m") searchLike(results[index].row);
  if (!moves[event.key]) return;
  event.preventDefault();
  const target = moves[event.key]();
  if (event.key === "ArrowUp" && target === index) $("query").focus(); else focusTile(target);
}

function onKey(event) {
  if ($("viewer").open) return;
  const isTyping = /^(INPUT|SELECT)$/.test(event.target.tagName) && (event.target !== $("query") || event.target.value);
  if (event.key === "/" && !isTyping) { event.preventDefault(); $("query").focus(); $("query").select(); }
  if (event.target !== $("query")) return;
  if (event.key === "ArrowDown" && results.length) { event.preventDefault(); focusTile(0); }
  if (event.key === "Backspace" && !$("query").value && !$("example").hidden) $("forget").click();
}

// ---- the start ----

const viewer = new Viewer(source, {
  isComplete: () => isComplete, more: () => { if (!request) search(results.length); }, like: (result) => searchLike(result.row),
  closed: (index) => focusTile(index), describe: longScore,
});

function onInput() {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => {
    changeView({q: $("query").value}, !isTyping);  // what is typed in one go is one entry of the history
    isTyping = true;
  }, TYPING_MS);
}

/** The year of a date that is typed is 0002 after its first digit. */
const isUnfinished = ({type, value}) => type === "date" && value.startsWith("0");

function onSubmit(event) {
  event.preventDefault();
  clearTimeout(searchTimer);
  if ($("query").value !== view.q) changeView({q: $("query").value}, !isTyping);
  isTyping = false;
  if (matchMedia("(hover: none)").matches) $("query").blur();  // hides the keyboard of a phone
}

function addListeners() {
  history.scrollRestoration = "manual";  // results are not there yet when the browser would scroll
  $("form").onsubmit = onSubmit;
  $("query").oninput = onInput;
  $("query").onblur = () => { isTyping = false; };
  $("forget").onclick = () => { upload = null; changeView({like: null}); $("query").focus(); };
  for (const name of FILTERS) $(name).onchange = () => { if (!isUnfinished($(name))) changeView({[name]: $(name).value}); };
  $("clear").onclick = () => { for (const name of FILTERS) $(name).value = ""; changeView({folder: "", from: "", to: ""}); };
  $("show-filters").onclick = () => $("show-filters").setAttribute("aria-expanded", String($("filters").classList.toggle("open")));
  $("nearest").onclick = () => { showsNearest = true; draw(); focusTile(0); };
  $("results").onkeydown = onGridKey;
  addEventListener("keydown", onKey);
  addEventListener("popstate", () => { if (viewer.popped()) return; restoreView(); showsNearest = false; searchAgain(); });
  new IntersectionObserver((entries) => {
    if (entries[0].isIntersecting && results.length && !isComplete && !request && !$("results").hidden) search(results.length);
  }, {rootMargin: "800px"}).observe($("more"));
}

function drawExamples() {
  const example = (text) => {
    const button = el("button", {type: "button"}, text);
    button.onclick = () => { $("query").value = text; changeView({q: text}); };
    return [button, " "];
  };
  $("example-list").replaceChildren(...EXAMPLES.flatMap(example));
  $("formula-list").replaceChildren(...FORMULAS.flatMap(example));
}

function drawLibrary() {
  $("library").textContent = `images in ${library.folder}`;
  const indented = ({name, files}) => {
    const parts = name.split("/");
    return el("option", {value: name}, "\u2003".repeat(parts.length - 1) + `${parts.at(-1)} (${integer(files)})`);
  };
  $("folder").replaceChildren(el("option", {value: ""}, `${library.folder} (${integer(library.images)})`), ...library.folders.map(indented));
  $("folder").parentElement.hidden = !library.folders.length;
  for (const name of ["from", "to"]) { $(name).min = library.first ?? ""; $(name).max = library.last ?? ""; }
}

async function start() {
  $("start").remove();
  addListeners();
  drawExamples();
  if (source.canUpload) addUploads();
  setBusy(true);
  library = await source.facts();
  drawLibrary();
  restoreView();
  if (FILTERS.some((name) => view[name])) $("show-filters").click();
  await searchAgain();
}

start().catch((error) => { setBusy(false); showError(error.message); });
