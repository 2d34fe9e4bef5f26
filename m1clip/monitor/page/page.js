// The page of the web monitor. `view` is what the user selected; it is also in the address. The rest is fetched.
// Text from a run is only ever set as text, never as HTML.
import {bars, chartElement, drawChart, drawHeatmap, duration, gigabytes, lineStyle, number, percent, plotlyLoaded,
  wrappable} from "./charts.js";
import {el, integer} from "./elements.js";

const TABS = ["curves", "speed", "gradients", "retrievals", "events", "settings"];
const CHARTS = {
  curves: ["loss", "accuracy", "mean_r1", "temperature", "lr", "grad_norm", "t2i_r10", "i2t_r10", "zeroshot_accuracy"],
  speed: ["step_ms", "pairs_per_s", "rss_gb", "available_gb", "device_gb", "temperature_c", "power_w", "wh_so_far", "mean_r1_per_wh"],
  gradients: ["alignment", "modality_gap", "effective_rank_image", "effective_rank_text"],
};
const DRAW = {speed: drawSpeed, gradients: drawGradients, retrievals: drawRetrievals, events: drawEvents, settings: drawSettings};
const $ = (id) => document.getElementById(id);
const view = {run: null, compared: [], tab: "curves", smooth: "0", xAxis: "step", range: null};
const cache = {};  // the curves of each run as last fetched
let runs = [], curves = {}, source = null, pending = 0, refreshing = false, refreshAgain = false;

/** Fetch JSON; the loading bar is shown meanwhile. */
async function fetchJSON(path) {
  $("loading").hidden = ++pending === 0;
  try {
    const response = await fetch(path, {signal: AbortSignal.timeout(60000)});
    if (response.ok) return await response.json();
    let message = await response.text();
    try { message = JSON.parse(message).detail ?? message; } catch { /* not JSON */ }
    throw new Error(String(message).slice(0, 200));
  } finally {
    $("loading").hidden = --pending === 0;
  }
}

const setBusy = (id, busy) => $(id).setAttribute("aria-busy", String(busy));

// ---- the selection ----

function saveView(push = false) {
  const query = new URLSearchParams({run: view.run ?? "", tab: view.tab, smooth: view.smooth, xAxis: view.xAxis});
  view.compared.forEach((name) => query.append("with", name));
  if ("#" + query === location.hash) return;
  history[push ? "pushState" : "replaceState"](null, "", "#" + query);
}

function restoreView() {
  const query = new URLSearchParams(location.hash.slice(1));
  view.run = query.get("run") || view.run;
  view.compared = query.getAll("with");
  if (TABS.includes(query.get("tab"))) view.tab = query.get("tab");
  for (const key of ["smooth", "xAxis"]) {
    const options = [...$(key).options].map((option) => option.value);
    if (options.includes(query.get(key))) view[key] = query.get(key);
    $(key).value = view[key];
  }
}

/** Changes with every record of a run and when its process ends; undefined if there is no such run. */
const version = (name) => JSON.stringify(runs.find((row) => row.run === name), (key, value) => key === "fraction_read" ? value ?? 1 : value);

/** The selected run and those compared with it that still exist. */
function shownRuns() {
  return [view.run, ...view.compared.filter((name) => name !== view.run && version(name))].filter(Boolean);
}

function selectRun(name) {
  view.run = name;
  view.compared = view.compared.filter((other) => other !== name);
  view.range = null;
  setBusy(view.tab, true);
  viewChanged();
}

function compareRun(name, checked) {
  view.compared = view.compared.filter((other) => other !== name);
  if (checked) view.compared.push(name);
  viewChanged();
}

function viewChanged() {
  saveView(true);
  drawRuns();
  refresh();
}

// ---- the list of runs ----

function drawRuns() {
  const query = $("find-run").value.trim().toLowerCase();
  const rows = runs.filter((row) => [row.run, row.state, row.device, row.data, row.preset].join(" ").toLowerCase().includes(query));
  const focused = document.activeElement?.dataset?.key, shown = shownRuns();
  $("runs").tBodies[0].replaceChildren(...rows.map((row) => {
    const index = shown.indexOf(row.run), selected = row.run === view.run;
    const checkbox = el("input", {type: "checkbox", checked: index >= 0, disabled: selected, "aria-label": `compare ${row.run}`});
    checkbox.dataset.key = "compare " + row.run;
    checkbox.onchange = () => compareRun(row.run, checkbox.checked);
    const name = el("button", {"aria-current": String(selected), title: `${row.preset ?? ""} on ${row.data ?? ""}`}, ...wrappable(row.run));
    name.dataset.key = "name " + row.run;
    name.onclick = () => selectRun(row.run);
    const line = index >= 0 ? el("span", {class: "line", style: lineStyle(index)}) : "";
    const done = row.state === "finished" ? "" : row.total ? percent(row.step / row.total) : integer(row.step);
    return el("tr", {}, el("td", {}, checkbox), el("td", {}, el("span", {class: "run"}, line, name)),
      el("td", {class: row.warning ? "failed" : row.state, title: row.problem ?? ""}, row.state, row.warning ? `, ${row.warning}` : "", " ", el("span", {class: "n"}, done)), el("td", {class: "n"}, percent(row.best_score)));
  }));
  performance.mark("table");
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  $("count").textContent = query ? `${rows.length} of ${runs.length}` : `${runs.length}`;
}

// ---- the selected run ----

function drawHeader(run) {
  const {summary, current, chance, epoch} = run;
  document.title = `${summary.run} ${summary.state} – m1clip`;
  $("name").replaceChildren(...wrappable(summary.run));
  $("state").textContent = summary.state + (summary.warning ? `, ${summary.warning}` : "");
  $("state").className = "badge " + (summary.warning ? "failed" : summary.state);
  $("done").value = summary.total ? summary.step / summary.total : 0;
  const step = summary.state === "running" ? summary.step : Math.max(summary.step, run.last_step);
  $("step").textContent = `step ${integer(step)}` + (summary.total ? ` of ${integer(summary.total)}` : "") +
    (summary.eta_s != null ? `, ${duration(summary.eta_s)} left` : "") + (summary.device ? `, on ${summary.device}` : "");
  $("reading").textContent = run.fraction_read < 1
    ? `The newest steps of a long log; the history is being read: ${Math.floor(100 * run.fraction_read)} %` : "";
  $("problem").textContent = [summary.problem, summary.reason].filter(Boolean).join("; ");
  if (["dead", "failed"].includes(summary.state)) $("problem").textContent += `; resume: m1clip train --resume --name ${run.path}`;
  document.body.classList.remove("empty");
  const facts = {
    loss: [number(current.loss), number(chance.loss)], accuracy: [percent(current.accuracy), percent(chance.accuracy)],
    "validation R@1": [percent(current.mean_r1), percent(chance.mean_r1)], temperature: [number(current.temperature)],
    "pairs per second": [number(run.pairs_per_s)],
  };
  if (current.zeroshot_accuracy != null) facts["zero-shot"] = [percent(current.zeroshot_accuracy), percent(chance.zeroshot_accuracy)];
  if (epoch.wh_so_far != null) facts.energy = [number(epoch.wh_so_far, "Wh")];
  if (epoch.mean_r1_per_wh != null) facts["R@1 per Wh"] = [number(epoch.mean_r1_per_wh)];
  $("facts").replaceChildren(...Object.entries(facts).map(([name, [value, guess]]) => el("div", {}, el("dt", {}, name),
    el("dd", {}, value, guess ? el("span", {class: "soft"}, ` (chance ${guess})`) : ""))));
  $("csv").href = `api/run/${encodeURIComponent(summary.run)}/metrics.csv`;
}

function drawLegend() {
  const names = shownRuns().length > 1 ? shownRuns() : [];
  $("legend").replaceChildren(...names.map((name, index) => el("li", {}, el("span", {class: "line", style: lineStyle(index)}), name)));
}

/** Fetch the curves that changed, run by run, because a log may be long; one that fails does not stop the others. */
async function updateCurves(tab) {
  const query = new URLSearchParams({x_axis: view.xAxis, smooth: view.smooth, max_points: shownRuns().length > 4 ? 300 : 700});
  CHARTS[tab].forEach((key) => query.append("key", key));
  if (view.range) { query.set("start", view.range[0]); query.set("end", view.range[1]); }
  const signature = (name) => `${query} ${version(name)}`;
  const stale = shownRuns().filter((name) => cache[name]?.signature !== signature(name));
  let failure = null, drawn = false;
  for (const name of stale) {
    const current = signature(name), isNew = !cache[name];
    try {
      const fetched = await fetchJSON(`api/curves?${query}&run=${encodeURIComponent(name)}`);
      cache[name] = {signature: current, ...fetched[name]};
      drawn = isNew || name === view.run;
      if (drawn) await drawCurves(tab);
    } catch (error) { failure = error; }
  }
  if (!drawn) await drawCurves(tab);
  if (failure) throw failure;
}

async function drawCurves(tab) {
  await plotlyLoaded;
  for (const key of CHARTS[tab]) {
    const lines = shownRuns().filter((name) => cache[name]?.[key]).map((name) => ({name, ...cache[name][key]}));
    await drawChart(chartElement($(tab + "-charts"), curves[key]), curves[key], lines, view, zoom);
  }
  performance.mark("curves");
}

function zoom(range) {
  view.range = range;
  refresh();
}

function drawSpeed(run) {
  const total = Object.values(run.phases_ms).reduce((sum, ms) => sum + (ms ?? 0), 0);
  const share = (ms) => ms == null ? "–" : `${number(ms, "ms")}  ${(100 * ms / total).toFixed(0)} %`;
  const soft = (text) => el("p", {class: "soft"}, text);
  $("phases").replaceChildren(...bars(run.phases_ms, total, share), soft(`Means of the last ${run.recent_steps} steps.`));
  const last = run.diagnostics, parts = Object.fromEntries(Object.entries(last.memory_gb ?? {}).filter(([, gb]) => gb > 0));
  $("memory").replaceChildren(...bars(parts, Math.max(...Object.values(parts), 1e-9), gigabytes),
    el("p", {}, `process (RSS) ${gigabytes(last.rss_gb)}, peak ${gigabytes(last.peak_rss_gb)}`),
    soft(`available ${gigabytes(last.available_gb)}, swap ${gigabytes(last.swap_used_gb)}` +
      (last.device_gb == null ? "" : `, device ${gigabytes(last.device_gb)}`)));
  const cores = Object.fromEntries((last.cpu_percent ?? []).map((value, core) => [`core ${core}`, value]));
  const wattHours = (joules) => number(joules == null ? null : joules / 3600, "Wh");
  $("sensors").replaceChildren(...bars(cores, 100, (value) => `${value.toFixed(0)} %`),
    soft(`CPU ${number(last.temperature_c, "°C")}, power ${number(last.power_w, "W")}, disk free ${gigabytes(last.disk_free_gb)}`),
    soft(last.joules == null ? "energy not measured" : `energy ${wattHours(last.joules)}, last epoch ${wattHours(run.epoch.joules)}, R@1 per Wh ${number(run.epoch.mean_r1_per_wh)}`));
}

async function drawGradients(run) {
  $("gradients-note").textContent = run.gradient_flow.step.length
    ? "Gradient norm by block before clipping, in each diagnostics record; brighter is larger, on a log scale."
    : "Gradient norms are logged with the diagnostics, every 5 × --log-every steps; none yet.";
  await plotlyLoaded;
  drawHeatmap($("heatmap"), run.gradient_flow);
}

async function drawRetrievals() {
  const fetched = await fetchJSON(`api/run/${encodeURIComponent(view.run)}/retrievals`);
  const wanted = $("find-query").value.trim().toLowerCase();
  const all = fetched.queries ?? [];
  const rows = all.filter((row) => row.text.toLowerCase().includes(wanted));
  $("query-count").textContent = all.length ? `${rows.length} of ${all.length} queries, evaluated at step ${integer(fetched.step)}`
    : "No evaluation yet.";
  const groups = {
    errors: "Errors with the largest margin of a wrong image over the true one",
    sample: "A fixed sample of captions",
  };
  $("queries").replaceChildren(...Object.entries(groups).flatMap(([group, title]) => {
    const members = rows.filter((row) => row.group === group);
    return members.length ? [el("h2", {}, title), ...members.map((row) => queryElement(row, fetched.shown))] : [];
  }));
}

function queryElement(query, images) {
  const figure = (hit, rank, isTrue) => {
    const image = images[hit.row] ?? {};
    const picture = image.jpeg ? el("img", {src: "data:image/jpeg;base64," + image.jpeg, alt: image.caption})
      : el("span", {class: "no-image"}, "no image");
    return el("figure", {class: isTrue ? "true" : "", title: image.name ?? ""}, picture,
      el("figcaption", {}, el("b", {}, `${rank}.` + (isTrue ? " true" : hit.same_caption ? " same caption" : "")),
        ` ${hit.score.toFixed(3)}`, el("br"), image.caption ?? ""));
  };
  const hits = query.top.map((hit, index) => figure(hit, index + 1, hit.row === query.truth));
  if (query.rank > query.top.length) {
    hits.push(el("div", {class: "beyond"}, figure({row: query.truth, score: query.true_score}, query.rank, true)));
  }
  return el("article", {class: "query"}, el("p", {}, `“${query.text}” `,
    el("span", {class: "soft"}, `the true image has rank ${integer(query.rank)}`)), el("div", {class: "hits"}, ...hits));
}

function drawEvents(run) {
  const rows = run.events.map((event) => el("li", {class: event.event === "diagnosis" ? "diagnosis" : ""},
    el("time", {}, event.time ? new Date(1000 * event.time).toLocaleString() : "–"), `step ${integer(event.step)}: ${event.text}`));
  if (run.bad_lines.length) rows.push(el("li", {class: "diagnosis"}, `${integer(run.bad_line_count)} lines of metrics.jsonl cannot be parsed; the first is line ${run.bad_lines[0]}.`));
  $("event-list").replaceChildren(...(rows.length ? rows : [el("li", {class: "soft"}, "No events yet.")]));
}

function drawSettings(run) {
  const wanted = $("find-setting").value.trim().toLowerCase();
  const text = (value) => value == null ? "–" : Array.isArray(value) ? value.join(", ") : String(value);
  const flatten = (tree, prefix = "") => Object.entries(tree ?? {}).flatMap(([key, value]) =>
    value && typeof value === "object" && !Array.isArray(value) ? flatten(value, `${prefix}${key}.`) : [[prefix + key, value]]);
  for (const table of ["config", "machine", "data"]) {
    const rows = flatten(run[table]).filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(wanted));
    $(table).replaceChildren(...rows.map(([key, value]) => {
      const changed = table === "config" && key in run.preset_values;
      const preset = changed ? el("span", {class: "soft"}, ` (preset ${text(run.preset_values[key])})`) : "";
      return el("tr", {class: changed ? "changed" : ""}, el("td", {}, ...wrappable(key)), el("td", {}, ...wrappable(text(value)), preset));
    }));
  }
  const count = Object.keys(run.preset_values).length;
  $("changed-count").textContent = `${count} ${count === 1 ? "setting differs" : "settings differ"} from preset ${run.config.preset ?? "–"}`;
}

// ---- updates ----

async function refresh() {
  if (!view.run) return;
  if (refreshing) { refreshAgain = true; return; }
  refreshing = true;
  const tab = view.tab;
  try {
    $("whole").disabled = view.range === null;
    const run = await fetchJSON(`api/run/${encodeURIComponent(view.run)}`);
    drawHeader(run);
    drawLegend();
    if (CHARTS[tab]) await updateCurves(tab);
    await DRAW[tab]?.(run);
    showError("");
  } catch (error) {
    showError(error.message);
    if (!runs.some((row) => row.run === view.run)) {
      $("name").replaceChildren(...wrappable(view.run));
      $("state").textContent = "gone";
      $("state").className = "badge gone";
    }
  } finally {
    setBusy(tab, false);
    refreshing = false;
    if (refreshAgain) { refreshAgain = false; refresh(); }
  }
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

function listen() {
  source?.close();
  source = new EventSource("api/live");
  source.onmessage = (event) => {
    const versions = () => [view.run, ...view.compared].map(version).join(), before = versions();
    runs = JSON.parse(event.data);
    if (!view.run && runs.length) { selectRun(runs[0].run); return; }
    drawRuns();
    if (versions() !== before) refresh();
  };
  source.onopen = () => { showError(""); refresh(); };
  source.onerror = () => {
    showError("The monitor does not answer. Is it still running? Retrying …");
    if (source.readyState === EventSource.CLOSED) setTimeout(retry, 3000);  // it was refused, not cut off
  };
}

/** Listen again after a refusal, whose reason is shown: too many pages, or a token that is no longer valid. */
async function retry() {
  if (document.hidden || source.readyState !== EventSource.CLOSED) return;
  try { await fetchJSON("api/runs"); listen(); } catch (error) { showError(error.message); setTimeout(retry, 3000); }
}

function showTab(tab, push = true) {
  view.tab = tab;
  for (const name of TABS) {
    $(name).hidden = name !== tab;
    $("tab-" + name).setAttribute("aria-selected", String(name === tab));
    $("tab-" + name).tabIndex = name === tab ? 0 : -1;
  }
  setBusy(tab, true);
  saveView(push);
  refresh();
}

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { $("runs-box").open = true; $("find-run").focus(); event.preventDefault(); }
  if (event.key === "w") zoom(null);
  if (TABS[Number(event.key) - 1]) { showTab(TABS[Number(event.key) - 1]); $("tab-" + view.tab).focus(); }
}

function onTabKey(event) {
  const direction = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!direction) return;
  showTab(TABS[(TABS.indexOf(view.tab) + direction + TABS.length) % TABS.length]);
  $("tab-" + view.tab).focus();
}

function addListeners() {
  $("tabs").replaceChildren(...TABS.map((name) => {
    const tab = el("button", {role: "tab", id: "tab-" + name, "aria-controls": name}, name);
    tab.onclick = () => showTab(name);
    return tab;
  }));
  $("tabs").onkeydown = onTabKey;
  addEventListener("keydown", onKey);
  $("find-run").oninput = drawRuns;
  $("find-query").oninput = $("find-setting").oninput = refresh;
  for (const key of ["smooth", "xAxis"]) {
    $(key).onchange = () => { view[key] = $(key).value; if (key === "xAxis") view.range = null; saveView(); refresh(); };
  }
  $("whole").onclick = () => zoom(null);
  // A browser opens six connections to a server: a hidden page must not hold one.
  document.addEventListener("visibilitychange", () => { if (document.hidden) source?.close(); else listen(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawRuns(); refresh(); });
  addEventListener("popstate", () => {  // the back button, or an edited address
    restoreView();
    view.range = null;
    drawRuns();
    showTab(view.tab, false);
  });
}

async function start() {
  restoreView();
  addListeners();
  if (innerWidth < 800) $("runs-box").open = false;
  const [answer, table] = await Promise.all([fetchJSON("api/runs"), fetchJSON("curves.json")]);
  runs = answer.runs;
  curves = Object.fromEntries(table.map((curve) => [curve.key, curve]));
  if (!version(view.run)) view.run = answer.start ?? runs[0]?.run ?? null;
  drawRuns();
  setBusy("runs-box", false);
  $("name").textContent = view.run ?? "no runs yet; m1clip train starts one";
  showTab(view.tab, false);
  listen();
}

start().catch((error) => showError(error.message));
