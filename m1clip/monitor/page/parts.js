// Pieces of the page that know nothing of what is chosen: elements, numbers in words, bars, charts.

// TokenizedCaptions apart also by those who see few colors (Okabe and Ito); beyond eight, by dashes.
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#9B8B00"];
const ON_DARK = ["#56B4E9", "#E69F00", "#2FBF93", "#E08FBF", "#F0E442", "#FF8A5C", "#B0B0B0", "#8FA8FF"];
const DASHES = ["solid", "dot", "dashdot"];
const dark = matchMedia("(prefers-color-scheme: dark)");
export const color = (at) => (dark.matches ? ON_DARK : COLORS)[at % COLORS.length];

export const chip = (at) => `border-top-color:${color(at)};border-top-style:${at < COLORS.length ? "solid" : "dotted"}`;

export const ready = new Promise((done, failed) => {
  const script = document.getElementById("plotly");
  if (window.Plotly) done();
  script.addEventListener("load", () => done());
  script.addEventListener("error", () => failed(new Error("plotly.js could not be loaded; reload the page")));
});

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "boolean") made[name] = value;
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const number = (value) => value == null ? "–" : value.toLocaleString("en");
export const percent = (part) => part == null ? "–" : `${(100 * part).toPrecision(100 * part >= 99.95 ? 4 : 3)} %`;
export const words = (value) => value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
export const gb = (value) => value == null ? "–" : value >= 0.1 || value === 0 ? `${value.toFixed(2)} GB` : `${(1000 * value).toFixed(1)} MB`;

export function clock(exact) {
  const seconds = Math.round(exact);
  if (seconds >= 172800) return `${(seconds / 86400).toFixed(1)} days`;
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return seconds >= 60 ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s` : `${Math.round(seconds)} s`;
}

export function bars(values, most, say) {
  return Object.entries(values).map(([name, value], at) => {
    const bar = el("b", {style: `width:${100 * Math.min(1, (value ?? 0) / most)}%;background:${color(at)}`});
    return el("div", {class: "metrics"}, el("span", {}, name), el("span", {}, bar), el("span", {}, say(value)));
  });
}

/** The element a chart is drawn in, made where there is none yet. */
export function place(box, key, title) {
  const id = "chart-" + key;
  let made = document.getElementById(id);
  if (!made) {
    made = el("div", {class: "plot", id});
    box.append(el("div", {class: "chart"}, el("h2", {}, title), made));
  }
  return made;
}

function look() {
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

/** Lines of several runs; dragging across asks for that range anew, a double click for the whole. */
export async function chart(box, about, lines, chosen, zoomed) {
  const known = lines.some((line) => line.y.some((value) => value !== null));
  box.parentElement.hidden = !known;
  if (!known) return;
  const scale = about.unit === "%" ? 100 : 1;
  const made = lines.map((line, at) => ({
    x: line.x, y: line.y.map((value) => value === null ? null : scale * value), name: line.name,
    mode: line.x.length < 40 ? "lines+markers" : "lines", marker: {size: 5}, connectgaps: false,
    line: {color: color(at), width: at === 0 ? 2 : 1.5, dash: DASHES[Math.floor(at / COLORS.length) % DASHES.length]},
    hovertemplate: `%{y:.4~g}${about.unit ? " " + about.unit : ""}`,
  }));
  const layout = look(), levels = new Set(lines.map((line) => line.chance).filter((level) => level != null));
  const ends = lines.flatMap((line) => line.x.length ? [line.x[0], line.x.at(-1)] : []);
  for (const guess of levels) {  // one, unless batches or validation sets differ in size
    made.push({x: [Math.min(...ends), Math.max(...ends)], y: [scale * guess, scale * guess], name: "chance", mode: "lines",
      line: {color: layout.font.color, width: 1, dash: "dash"}, hovertemplate: "%{y:.3~g}"});
  }
  layout.xaxis.title = {text: chosen.over === "minutes" ? "minutes of training" : "step", standoff: 4};
  if (chosen.range) layout.xaxis.range = chosen.range;
  if (about.kind !== "step") layout.xaxis.rangemode = "tozero";
  layout.yaxis.type = about.log ? "log" : "linear";
  if (about.log) Object.assign(layout.yaxis, {tickvals: decades(made.flatMap((line) => line.y)), tickformat: "~g"});
  if (chosen.over === "step") layout.xaxis.hoverformat = ",.0f";
  layout.yaxis.ticksuffix = about.unit ? ` ${about.unit}` : "";
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${about.title}: ${lines.map((line) => `${line.name} ${words(scale * (line.y.filter((v) => v !== null).at(-1) ?? NaN))}`).join(", ")}`);
  await Plotly.react(box, made.reverse(), layout, CONFIG);  // the run itself is drawn last, over the others
  if (!box.listening) {
    box.listening = true;
    box.on("plotly_relayout", (event) => {
      if (event["xaxis.range[0]"] !== undefined) zoomed([event["xaxis.range[0]"], event["xaxis.range[1]"]]);
    });
    box.on("plotly_doubleclick", () => zoomed(null));
  }
}

/** 1, 2 and 5 of each power of ten between the least and the greatest; of many powers, 1 alone. */
function decades(values) {
  const logs = values.filter((value) => value > 0).map(Math.log10);
  const low = Math.floor(Math.min(...logs)), high = Math.ceil(Math.max(...logs));
  const firsts = high - low > 3 ? [1] : [1, 2, 5];
  return Array.from({length: high - low + 1}, (_, at) => firsts.map((first) => first * 10 ** (low + at))).flat();
}

/** Gradient norms by block over steps. */
export function heat(box, flow) {
  const layout = look();
  const z = flow.norm.map((row) => row.map((value) => value > 0 ? Math.log10(value) : null));
  layout.margin.l = 120;
  layout.yaxis.autorange = "reversed";
  layout.xaxis.title = {text: "step"};
  const trace = {type: "heatmap", x: flow.step, y: flow.block, z, colorscale: "Cividis", customdata: flow.norm,
    hovertemplate: "%{y}<br>step %{x}: %{customdata:.3~g}<extra></extra>",
    colorbar: {title: {text: "norm"}, tickprefix: "10<sup>", ticksuffix: "</sup>", thickness: 12}};
  Plotly.react(box, flow.step.length ? [trace] : [], layout, CONFIG);
}
