// The page of the monitor: what is chosen lives in `chosen` and in the address; everything else is asked for.
// Text from a run is only ever set as text, never as HTML.
import {bars, chart, chip, clock, el, gb, heat, number, percent, place, ready, words} from "./parts.js";

const TABS = ["curves", "speed", "gradients", "retrievals", "events", "setup"];
const CHARTS = {
  curves: ["loss", "accuracy", "mean_r1", "temperature", "lr", "grad_norm", "t2i_r10", "i2t_r10"],
  speed: ["step_ms", "pairs_per_s", "rss_gb", "available_gb", "device_gb", "temperature_c", "power_w"],
  gradients: ["alignment", "modality_gap", "effective_rank_image", "effective_rank_text"],
};
const BOXES = {curves: "curve-charts", speed: "speed-charts", gradients: "space-charts"};
const $ = (id) => document.getElementById(id);
const chosen = {run: null, others: [], tab: "curves", smooth: "0", over: "step", range: null};
const lines = {};  // the curves of each run as they were last asked for
let runs = [], titles = {}, versions = {}, source = null, busy = false, again = false;

async function ask(path) {
  const answer = await fetch(path, {signal: AbortSignal.timeout(60000)});
  if (!answer.ok) {
    const text = await answer.text();
    let said = text;
    try { said = JSON.parse(text).detail ?? text; } catch { /* plain words */ }
    throw new Error(String(said).slice(0, 200));
  }
  return answer.json();
}

// ---- what is chosen ----

function remember(push = false) {
  const query = new URLSearchParams({run: chosen.run ?? "", tab: chosen.tab, smooth: chosen.smooth, over: chosen.over});
  chosen.others.forEach((name) => query.append("with", name));
  if ("#" + query === location.hash) return;
  history[push ? "pushState" : "replaceState"](null, "", "#" + query);
}

function recall() {
  const query = new URLSearchParams(location.hash.slice(1));
  chosen.run = query.get("run") || chosen.run;
  chosen.others = query.getAll("with");
  if (TABS.includes(query.get("tab"))) chosen.tab = query.get("tab");
  for (const key of ["smooth", "over"]) {
    const options = [...$(key).options].map((option) => option.value);
    if (options.includes(query.get(key))) chosen[key] = query.get(key);
    $(key).value = chosen[key];
  }
}

/** The run and those laid over it, as far as these are still there. */
function shown() {
  const there = new Set(runs.map((row) => row.run));
  return [chosen.run, ...chosen.others.filter((name) => name !== chosen.run && there.has(name))].filter(Boolean);
}

function pick(name) {
  chosen.run = name;
  chosen.others = chosen.others.filter((other) => other !== name);
  chosen.range = null;
  changed();
}

function overlay(name, on) {
  chosen.others = chosen.others.filter((other) => other !== name);
  if (on) chosen.others.push(name);
  changed();
}

function changed() {
  remember(true);
  table();
  listen();  // whose first news make it refresh
}

// ---- the table of runs ----

function table() {
  const wanted = $("find-run").value.trim().toLowerCase();
  const match = (row) => [row.run, row.state, row.device, row.data, row.preset].join(" ").toLowerCase().includes(wanted);
  const rows = runs.filter(match);
  const focus = document.activeElement?.dataset?.key;
  $("runs").tBodies[0].replaceChildren(...rows.map((row) => {
    const at = shown().indexOf(row.run), current = row.run === chosen.run;
    const tick = el("input", {type: "checkbox", checked: at >= 0, disabled: current, "aria-label": `compare ${row.run}`});
    tick.dataset.key = "tick " + row.run;
    tick.onchange = () => overlay(row.run, tick.checked);
    const name = el("button", {"aria-current": String(current), title: `${row.preset ?? ""} on ${row.data ?? ""}`}, row.run);
    name.dataset.key = "name " + row.run;
    name.onclick = () => pick(row.run);
    const line = at >= 0 ? el("span", {class: "chip", style: chip(at)}) : "";
    const done = row.total ? percent(row.step / row.total) : number(row.step);
    return el("tr", {}, el("td", {}, tick), el("td", {}, el("span", {class: "run"}, line, name)), el("td", {class: row.state}, row.state),
      el("td", {class: "n"}, done), el("td", {class: "n"}, percent(row.best_score)));
  }));
  performance.mark("table");
  if (focus) document.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
  $("count").textContent = wanted ? `${rows.length} of ${runs.length}` : `${runs.length}`;
}

// ---- the run shown ----

function header(about) {
  const {summary: row, now, chance} = about;
  document.title = `${row.run} ${row.state} – m1clip`;
  $("name").textContent = row.run;
  $("state").textContent = row.state;
  $("state").className = "badge " + row.state;
  $("done").value = row.total ? row.step / row.total : 0;
  const step = row.state === "running" ? row.step : Math.max(row.step, about.latest);
  $("far").textContent = `step ${number(step)}` + (row.total ? ` of ${number(row.total)}` : "") +
    (row.eta_s != null ? `, ${clock(row.eta_s)} to go` : "") + (row.device ? `, on ${row.device}` : "");
  $("why").textContent = row.trouble || row.reason || "";
  if (["dead", "failed"].includes(row.state)) $("why").textContent += `; m1clip train --resume --name ${about.path} goes on`;
  document.body.classList.remove("empty");
  const recall = about.eval?.mean_r1;
  const facts = {
    loss: [words(now.loss), words(chance.loss)], accuracy: [percent(now.accuracy), percent(chance.accuracy)],
    "validation R@1": [percent(recall), percent(chance.mean_r1)], temperature: [words(now.temperature)],
    "pairs a second": [words(about.pairs_per_s)],
  };
  $("now").replaceChildren(...Object.entries(facts).map(([name, [value, guess]]) => el("div", {}, el("dt", {}, name),
    el("dd", {}, value, guess ? el("span", {class: "soft"}, ` (chance ${guess})`) : ""))));
  $("csv").href = `api/run/${encodeURIComponent(row.run)}/metrics.csv`;
}

function legend() {
  $("legend").replaceChildren(...(shown().length > 1 ? shown() : []).map((name, at) =>
    el("li", {}, el("span", {class: "chip", style: chip(at)}), name)));
}

/** Ask only for what has changed; runs that were never asked for come one by one, for their logs may be long. */
async function curves(tab) {
  const keys = CHARTS[tab];
  const query = new URLSearchParams({over: chosen.over, smooth: chosen.smooth, most: shown().length > 4 ? 300 : 700});
  keys.forEach((key) => query.append("key", key));
  if (chosen.range) { query.set("start", chosen.range[0]); query.set("end", chosen.range[1]); }
  const sign = (name) => `${query} ${JSON.stringify(versions[name])}`;
  const stale = shown().filter((name) => lines[name]?.sign !== sign(name));
  const known = stale.filter((name) => lines[name]);
  for (const some of [known, ...stale.filter((name) => !lines[name]).map((name) => [name])]) {
    if (!some.length) continue;
    const asked = new URLSearchParams(query), signs = some.map(sign);
    some.forEach((name) => asked.append("run", name));
    const found = await ask("api/curves?" + asked);
    some.forEach((name, at) => { lines[name] = {sign: signs[at], ...found[name]}; });
    await draw(tab);
  }
  if (!stale.length) await draw(tab);
}

async function draw(tab) {
  await ready;
  const box = $(BOXES[tab]);
  for (const key of CHARTS[tab]) {
    const drawn = shown().filter((name) => lines[name]?.[key]).map((name) => ({name, ...lines[name][key]}));
    await chart(place(box, key, titles[key].title), titles[key], drawn, chosen, zoomed);
  }
  performance.mark("curves");
}

function zoomed(range) {
  chosen.range = range;
  refresh();
}

function speed(about) {
  const total = Object.values(about.phases_ms).reduce((sum, ms) => sum + (ms ?? 0), 0);
  const part = (ms) => ms == null ? "–" : `${words(ms)} ms  ${(100 * ms / total).toFixed(0)} %`;
  $("phases").replaceChildren(...bars(about.phases_ms, total, part), el("p", {class: "soft"}, `Means of the last ${about.recent} steps.`));
  const seen = about.logger ?? {}, parts = Object.fromEntries(Object.entries(seen.memory_gb ?? {}).filter(([, size]) => size > 0));
  $("memory").replaceChildren(...bars(parts, Math.max(...Object.values(parts), 1e-9), gb), el("p", {class: "soft"},
    `process ${gb(seen.rss_gb)}, peak ${gb(seen.peak_rss_gb)}, free ${gb(seen.available_gb)}, swap ${gb(seen.swap_used_gb)}`));
  const cores = Object.fromEntries((seen.cpu_percent ?? []).map((part, at) => [`core ${at}`, part]));
  const unit = (value, name) => value == null ? "–" : `${words(value)} ${name}`;
  $("machine-now").replaceChildren(...bars(cores, 100, (part) => `${part.toFixed(0)} %`), el("p", {class: "soft"},
    `heat ${unit(seen.temperature_c, "°C")}, power ${unit(seen.power_w, "W")}, disk free ${gb(seen.disk_free_gb)}`));
}

async function gradients(about) {
  $("flow-note").textContent = about.flow.step.length
    ? "Length of the gradient by block before clipping, at every look inside; brighter is larger, the scale is logarithmic."
    : "Gradients are looked at every --logger-every steps; not yet.";
  await ready;
  heat($("flow"), about.flow);
}

async function retrievals() {
  const found = await ask(`api/run/${encodeURIComponent(chosen.run)}/retrievals`);
  const wanted = $("find-query").value.trim().toLowerCase();
  const all = found.queries ?? [];
  const rows = all.filter((row) => row.text.toLowerCase().includes(wanted));
  $("found").textContent = all.length ? `${rows.length} of ${all.length} queries, evaluated at step ${number(found.step)}`
    : "No evaluation has been made yet.";
  const groups = {
    errors: "Most instructive errors: a wrong image beats the true one by most",
    sample: "A sample: the same captions at every evaluation",
  };
  $("queries").replaceChildren(...Object.entries(groups).flatMap(([group, title]) => {
    const mine = rows.filter((row) => row.group === group);
    return mine.length ? [el("h2", {}, title), ...mine.map((row) => query(row, found.shown))] : [];
  }));
}

function query(row, images) {
  const image = (hit, label, right) => {
    const seen = images[hit.row] ?? {};
    const image = seen.jpeg ? el("img", {src: "data:image/jpeg;base64," + seen.jpeg, alt: seen.caption})
      : el("span", {class: "lost"}, "no image");
    return el("figure", {class: right ? "true" : "wrong", title: seen.name ?? ""}, image,
      el("figcaption", {}, el("b", {}, label + (right ? " true" : hit.same_caption ? " same words" : "")),
        ` ${hit.score.toFixed(3)}`, el("br"), seen.caption ?? ""));
  };
  const hits = row.top.map((hit, at) => image(hit, `${at + 1}.`, hit.row === row.truth));
  if (row.rank > row.top.length) {
    hits.push(el("div", {class: "beyond"}, image({row: row.truth, score: row.true_score}, `${row.rank}.`, true)));
  }
  return el("article", {class: "query"}, el("p", {}, `“${row.text}” `,
    el("span", {class: "soft"}, row.rank === 1 ? "found first" : `the true image is number ${row.rank}`)),
    el("div", {class: "hits"}, ...hits));
}

function events(about) {
  const rows = about.events.map((event) => el("li", {class: event.event === "diagnosis" ? "diagnosis" : ""},
    el("time", {}, event.time ? new Date(1000 * event.time).toLocaleString() : "–"), `step ${number(event.step)}: ${event.words}`));
  if (about.broken.length) rows.push(el("li", {class: "diagnosis"}, `Some lines of metrics.jsonl cannot be read, the first is line ${about.broken[0]}.`));
  $("event-list").replaceChildren(...rows);
}

function setup(about) {
  const wanted = $("find-setting").value.trim().toLowerCase();
  const flat = (tree, before = "") => Object.entries(tree ?? {}).flatMap(([key, value]) =>
    value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${before}${key}.`) : [[before + key, value]]);
  for (const name of ["config", "machine", "data"]) {
    const rows = flat(about[name]).filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(wanted));
    $(name).replaceChildren(...rows.map(([key, value]) => el("tr", {}, el("td", {}, key), el("td", {}, value == null ? "–" : String(value)))));
  }
}

// ---- keeping up ----

async function refresh() {
  if (!chosen.run) return;
  if (busy) { again = true; return; }
  busy = true;
  try {
    $("whole").disabled = chosen.range === null;
    const about = await ask(`api/run/${encodeURIComponent(chosen.run)}`);
    header(about);
    legend();
    const tab = chosen.tab;
    if (CHARTS[tab]) await curves(tab);
    if (tab === "speed") speed(about);
    if (tab === "gradients") await gradients(about);
    if (tab === "retrievals") await retrievals();
    if (tab === "events") events(about);
    if (tab === "setup") setup(about);
    trouble("");
  } catch (error) {
    trouble(error.message);
    if (!runs.some((row) => row.run === chosen.run)) {
      $("name").textContent = chosen.run;
      $("state").textContent = "gone";
      $("state").className = "badge gone";
    }
  } finally {
    busy = false;
    if (again) { again = false; refresh(); }
  }
}

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

function listen() {
  source?.close();
  const query = new URLSearchParams();
  shown().forEach((name) => query.append("run", name));
  source = new EventSource("api/live?" + query);
  source.addEventListener("runs", (event) => {
    const state = () => runs.find((row) => row.run === chosen.run)?.state, before = state();
    runs = JSON.parse(event.data);
    if (!chosen.run && runs.length) { pick(runs[0].run); return; }
    table();
    if (state() !== before) refresh();  // a process that is killed writes nothing any more
  });
  source.addEventListener("changed", (event) => { versions = JSON.parse(event.data); refresh(); });
  source.onopen = () => trouble("");
  source.onerror = () => trouble("The monitor does not answer; is it still running? Trying again …");
}

function show(tab, push = true) {
  chosen.tab = tab;
  for (const name of TABS) {
    $(name).hidden = name !== tab;
    $("tab-" + name).setAttribute("aria-selected", String(name === tab));
    $("tab-" + name).tabIndex = name === tab ? 0 : -1;
  }
  remember(push);
  refresh();
}

function keys(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { $("runs-box").open = true; $("find-run").focus(); event.preventDefault(); }
  if (event.key === "w") zoomed(null);
  if (TABS[Number(event.key) - 1]) { show(TABS[Number(event.key) - 1]); $("tab-" + chosen.tab).focus(); }
}

function arrows(event) {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!step) return;
  show(TABS[(TABS.indexOf(chosen.tab) + step + TABS.length) % TABS.length]);
  $("tab-" + chosen.tab).focus();
}

async function begin() {
  recall();
  $("tabs").replaceChildren(...TABS.map((name) => {
    const tab = el("button", {role: "tab", id: "tab-" + name, "aria-controls": name}, name);
    tab.onclick = () => show(name);
    return tab;
  }));
  if (innerWidth < 800) $("runs-box").open = false;
  $("tabs").onkeydown = arrows;
  addEventListener("keydown", keys);
  $("find-run").oninput = table;
  $("find-query").oninput = $("find-setting").oninput = refresh;
  for (const key of ["smooth", "over"]) $(key).onchange = () => { chosen[key] = $(key).value; if (key === "over") chosen.range = null; remember(); refresh(); };
  $("whole").onclick = () => zoomed(null);
  // A browser has six connections to a server: a page that nobody looks at must not hold one.
  document.addEventListener("visibilitychange", () => { if (document.hidden) source?.close(); else listen(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { table(); refresh(); });
  const all = await ask("api/runs");
  runs = all.runs;
  titles = Object.fromEntries(all.curves.map((one) => [one.key, one]));
  const known = new Set(runs.map((row) => row.run));
  chosen.others = chosen.others.filter((name) => known.has(name));
  if (!known.has(chosen.run)) chosen.run = all.start ?? runs[0]?.run ?? null;
  table();
  if (!chosen.run) $("name").textContent = "no run yet; m1clip train makes one";
  show(chosen.tab, false);
  listen();
  addEventListener("popstate", () => {  // back, or another address
    recall();
    chosen.range = null;
    table();
    show(chosen.tab, false);
    listen();
  });
}

begin().catch((error) => trouble(error.message));
