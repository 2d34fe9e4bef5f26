// Building blocks without state: formatted numbers, bars, charts.
import {el} from "./elements.js";

// Distinguishable with color blindness (Okabe and Ito); beyond eight runs, by dashes.
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#9B8B00"];
const DARK_COLORS = ["#56B4E9", "#E69F00", "#2FBF93", "#E08FBF", "#F0E442", "#FF8A5C", "#B0B0B0", "#8FA8FF"];
const DASHES = ["solid", "dot", "dashdot"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (index) => (dark.matches ? DARK_COLORS : COLORS)[index % COLORS.length];

export const lineStyle = (index) =>
  `border-top-color:${color(index)};border-top-style:${index < COLORS.length ? "solid" : "dotted"}`;

export const plotlyLoaded = new Promise((resolve, reject) => {
  const script = document.getElementById("plotly");
  if (window.Plotly) resolve();
  script.addEventListener("load", () => resolve());
  script.addEventListener("error", () => reject(new Error("plotly.js could not be loaded; reload the page")));
});

/** Text that may be wrapped after _ . / and hyphens, not inside of a word or a number. */
export const wrappable = (text) => String(text).split(/(?<=[_./])(?!\d)/).flatMap((part, index) => index ? [el("wbr"), part] : [part]);

export const percent = (fraction) => fraction == null ? "–" : `${(100 * fraction).toPrecision(100 * fraction >= 99.95 ? 4 : 3)} %`;
export const number = (value, unit = "") => value == null ? "–"
  : (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)))) + (unit && ` ${unit}`);
export const gigabytes = (gb) => gb == null ? "–" : gb >= 1 ? `${gb.toFixed(2)} GB` : `${(1000 * gb).toFixed(1)} MB`;

export function duration(exact) {
  const seconds = Math.round(exact);
  if (seconds >= 172800) return `${(seconds / 86400).toFixed(1)} days`;
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return seconds >= 60 ? `${Math.floor(seconds / 60)} min ${seconds % 60} s` : `${seconds} s`;
}

export function bars(values, maximum, format) {
  return Object.entries(values).map(([name, value], index) => {
    const bar = el("b", {style: `width:${100 * Math.min(1, (value ?? 0) / maximum)}%;background:${color(index)}`});
    return el("div", {class: "bar-row"}, el("span", {}, name), el("span", {}, bar), el("span", {}, format(value)));
  });
}

/** The element of a chart, created on first use. */
export function chartElement(box, curve) {
  const id = "chart-" + curve.key;
  if (!document.getElementById(id)) {
    const title = curve.title + (curve.log_axis ? " (log)" : "");
    box.append(el("div", {class: "chart"}, el("h2", {}, title), el("div", {class: "plot", id})));
  }
  return document.getElementById(id);
}

function baseLayout() {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--soft").trim(), line = style.getPropertyValue("--line").trim();
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, size: 11},
    margin: {l: 52, r: 10, t: 8, b: 32}, showlegend: false, hovermode: "x unified", dragmode: "zoom",
    xaxis: {gridcolor: line, zerolinecolor: line, automargin: true}, yaxis: {gridcolor: line, zerolinecolor: line, automargin: true},
    hoverlabel: {bgcolor: style.getPropertyValue("--panel").trim(), font: {color: style.getPropertyValue("--ink").trim()}},
  };
}

const CONFIG = {displaylogo: false, responsive: true, displayModeBar: false, doubleClick: false, scrollZoom: false};

/** Draw the curves of several runs; dragging calls zoom with a range, a double click with null. */
export async function drawChart(box, curve, lines, view, zoom) {
  const known = lines.some((line) => line.y.some((value) => value !== null));
  box.parentElement.hidden = !known;
  if (!known) return;
  const scale = curve.unit === "%" ? 100 : 1;
  const traces = lines.map((line, index) => ({
    x: line.x, y: line.y.map((value) => value === null ? null : scale * value), name: line.name,
    mode: line.x.length < 40 ? "lines+markers" : "lines", marker: {size: 5}, connectgaps: false,
    line: {color: color(index), width: index === 0 ? 2 : 1.5, dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length]},
    hovertemplate: `%{y:.4~g}${curve.unit ? " " + curve.unit : ""}`,
  }));
  const layout = baseLayout(), levels = new Set(lines.map((line) => line.chance).filter((level) => level != null));
  const ends = lines.flatMap((line) => line.x.length ? [line.x[0], line.x.at(-1)] : []);
  for (const level of levels) {  // several if batch sizes or validation sets differ
    traces.push({x: [Math.min(...ends), Math.max(...ends)], y: [scale * level, scale * level], name: "chance", mode: "lines",
      line: {color: layout.font.color, width: 1, dash: "dash"}, hovertemplate: "%{y:.3~g}"});
  }
  layout.xaxis.title = {text: view.xAxis === "minutes" ? "minutes of training" : "step", standoff: 4};
  if (view.range) layout.xaxis.range = view.range;
  if (curve.kind !== "step") layout.xaxis.rangemode = "tozero";
  if (view.xAxis === "step") Object.assign(layout.xaxis, {tickformat: ",.12~g", hoverformat: ",.0f"});
  layout.yaxis.ticksuffix = curve.unit ? ` ${curve.unit}` : "";
  if (curve.log_axis) {
    const ticks = logTicks(traces.flatMap((trace) => trace.y));
    Object.assign(layout.yaxis, {type: "log", tickvals: ticks, ticktext: ticks.map((tick) => number(tick))});
  }
  const last = (line) => number(scale * (line.y.filter((value) => value !== null).at(-1) ?? NaN));
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${curve.title}: ${lines.map((line) => `${line.name} ${last(line)}`).join(", ")}`);
  await Plotly.react(box, traces.reverse(), layout, CONFIG);  // the first run is drawn last, over the others
  if (!box.listening) {
    box.listening = true;
    box.on("plotly_relayout", (event) => {
      if (event["xaxis.range[0]"] !== undefined) zoom([event["xaxis.range[0]"], event["xaxis.range[1]"]]);
    });
    box.on("plotly_doubleclick", () => zoom(null));
  }
}

/** Round values, or the ends and the middle of a narrow range; at most about six, so that labels do not overlap. */
export function logTicks(values) {
  const logs = values.filter((value) => value > 0).map(Math.log10);
  const low = Math.min(...logs), high = Math.max(...logs), decades = high - low;
  const digits = decades > 2 ? [1] : decades > 1 ? [1, 3] : decades > 0.5 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
  const stride = Math.max(1, Math.ceil(decades / 6));
  const ticks = [];
  for (let exponent = Math.floor(low); exponent <= high; exponent += stride) {
    ticks.push(...digits.map((digit) => Number(`${digit}e${exponent}`)));
  }
  const margin = 0.05 * decades;  // what plotly leaves free above and below
  const inside = ticks.filter((tick) => Math.log10(tick) >= low - margin && Math.log10(tick) <= high + margin);
  return inside.length > 1 ? inside : [...new Set([low, (low + high) / 2, high])].map((log) => 10 ** log);
}

/** Gradient norms by block over steps. */
export function drawHeatmap(box, flow) {
  const layout = baseLayout();
  const norms = flow.norm.map((row) => row.map((norm) => norm > 0 ? Math.log10(norm) : null));
  const ticks = logTicks(flow.norm.flat());
  layout.margin.l = 120;
  layout.yaxis.autorange = "reversed";
  Object.assign(layout.xaxis, {title: {text: "step"}, tickformat: ",.12~g"});
  const trace = {type: "heatmap", x: flow.step, y: flow.block, z: norms, colorscale: "Cividis", customdata: flow.norm,
    hovertemplate: "%{y}<br>step %{x}: %{customdata:.3~g}<extra></extra>",
    colorbar: {title: {text: "norm (log)"}, tickvals: ticks.map(Math.log10), ticktext: ticks.map((tick) => number(tick)), thickness: 12}};
  Plotly.react(box, flow.step.length ? [trace] : [], layout, CONFIG);
}
