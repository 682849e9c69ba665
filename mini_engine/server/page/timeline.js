// The batch, step by step, and the pages below it, drawn by plotly. Steps that did nothing are not counted.

import { $, el, plural } from "./dom.js";

const SHOWN_STEPS = 150, SHOWN_ROWS = 12, HEIGHT = 24;
// Okabe and Ito's colours; patterns say the same without colour.
const KINDS = {
  waiting: { label: "waits", color: "#999999", shape: "", width: 0.16 },
  prompt: { label: "prompt chunk", color: "#0072b2", shape: "" },
  again: { label: "computed again", color: "#d55e00", shape: "x" },
  decode: { label: "decode", color: "#56b4e9", shape: "" },
};
const rows = new Map();  // request -> {name, spans, marks, reached, isOwn}
const pages = [];  // a line for each step
let step = 0, previous = new Set(), waitingBefore = new Set(), plotly = null, drawn = 0, timer = 0;

export function rowOf(request) {
  if (!rows.has(request)) rows.set(request, { name: String(rows.size + 1), spans: [], marks: [], reached: 0 });
  return rows.get(request);
}

export const nameRequest = (request, name) => Object.assign(rowOf(request), { name, isOwn: true });
export const disown = () => rows.forEach((row) => { row.isOwn = false; });  // rows of an earlier run
export const nameOf = (request) => rowOf(request).name;

function add(row, kind, tokens, text) {
  const last = row.spans.at(-1);
  const joins = last && last.kind === kind && last.to === step && (kind === "waiting" || kind === "decode");
  if (joins) { last.to = step + 1; last.tokens += tokens; } else row.spans.push({ kind, from: step, to: step + 1, tokens, text });
}

export function addStep(event) {
  for (const request of event.waiting) add(rowOf(request), "waiting", 0);
  for (const request of event.preempted) rowOf(request).marks.push(step);
  for (const chunk of event.chunks) {
    const row = rowOf(chunk.request);
    const begins = !previous.has(chunk.request) && chunk.start > 0;
    const kind = chunk.start < row.reached && row.marks.length ? "again" : chunk.start >= chunk.prompt ? "decode" : "prompt";
    if (begins) row.cached = chunk.start;
    add(row, kind, chunk.tokens, begins ? `, ${chunk.start} from the cache` : "");
    row.reached = Math.max(row.reached, chunk.start + chunk.tokens);
  }
  previous = new Set(event.running.map((each) => each.request));
  const { used, cached, evictable, total } = event.pages;
  pages.push({ step, own: used - cached, held: cached - evictable, evictable, total });
  if (pages.length > SHOWN_STEPS * 2) pages.shift();
  step += 1;
  describe(event);
  drawSoon();
}

function chooseRows() {  // the reader's own rows, and the newest others
  const recent = [...rows.values()].filter((row) => row.spans.length && row.spans.at(-1).to > step - SHOWN_STEPS);
  const others = recent.filter((row) => !row.isOwn), room = Math.max(0, SHOWN_ROWS - recent.length + others.length);
  const hidden = new Set(others.slice(0, Math.max(0, others.length - room)));
  return { shown: recent.filter((row) => !hidden.has(row)), total: recent.length };
}

function describe(event) {
  const { shown, total: requests } = chooseRows();
  const { used, total } = event.pages;
  $("batch-about").textContent = `Step ${event.step}: ${event.running.length} running, ${event.waiting.length} waiting, ` +
    `${plural(event.chunks.reduce((sum, each) => sum + each.tokens + (event.drafted[each.request] ?? 0), 0), "row")} computed, ${used} of ${total} pages used.` + (shown.length < requests ? ` ${shown.length} of ${requests} requests drawn.` : "");
  const body = $("steps").querySelector("tbody") ?? table();
  const did = event.chunks.map((c) => `${nameOf(c.request)}: ${c.tokens === 1 && c.start >= c.prompt ? "decode" : `tokens ${c.start} to ${c.start + c.tokens - 1}`}${guesses(event, c.request)}`);
  const lost = event.preempted.map((request) => `${nameOf(request)} preempted`);
  const cells = [event.step, [...did, ...lost].join("; "), event.waiting.map(nameOf).join(", "), used];
  body.prepend(el("tr", {}, ...cells.map((cell) => el("td", {}, String(cell)))));
  if (body.children.length > 20) body.lastChild.remove();
}

const guesses = ({ drafted, accepted }, request) => (drafted[request] ? `, ${accepted[request] ?? 0} of ${plural(drafted[request], "guessed token")} came` : "");

function table() {
  const body = el("tbody");
  const heads = ["Step", "Computed", "Waiting", "Pages used"].map((name) => el("th", { scope: "col" }, name));
  $("steps").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body));
  return body;
}

function drawSoon() {
  if (timer) return;
  timer = setTimeout(() => { timer = 0; drawn = performance.now(); draw(); }, Math.max(0, 300 - (performance.now() - drawn)));
}

export async function draw() {
  plotly ??= await load();
  const first = Math.max(0, step - SHOWN_STEPS);
  const { shown } = chooseRows();
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, ground] = ["--ink", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
  const traces = Object.entries(KINDS).map(([kind, look]) => {
    const spans = shown.flatMap((row, index) => row.spans.filter((s) => s.kind === kind && s.to > first).map((s) => ({ ...s, y: index, name: row.name })));
    return {
      type: "bar", orientation: "h", name: look.label, y: spans.map((s) => s.y), base: spans.map((s) => s.from), x: spans.map((s) => s.to - s.from),
      width: look.width ?? 0.7, marker: { color: look.color, line: { color: ground, width: 1 }, pattern: { shape: look.shape, fgcolor: ground, fillmode: "overlay" } },
      hovertemplate: spans.map((s) => `${s.name}: ${look.label}${s.tokens ? `, ${plural(s.tokens, "token")}` : ""}${s.text ?? ""}<extra></extra>`),
    };
  });
  const marks = shown.flatMap((row, index) => row.marks.filter((at) => at >= first).map((at) => [at, index]));
  traces.push({ type: "scatter", mode: "markers", name: "preempted", x: marks.map((m) => m[0]), y: marks.map((m) => m[1]),
    marker: { symbol: "x", size: 10, color: "#d55e00", line: { color: ink, width: 1 } }, hovertemplate: "sent back to wait<extra></extra>" });
  const layers = [["own", "of requests", "#0072b2", ""], ["held", "cached, in use", "#cc79a7", "/"], ["evictable", "cached", "#e69f00", "."]];
  const own = pages.filter((each) => each.step >= first);
  for (const [field, label, color, shape] of layers) {
    traces.push({ type: "scatter", mode: "lines", stackgroup: "pages", name: label, x: own.map((p) => p.step + 0.5), y: own.map((p) => p[field]), yaxis: "y2",
      line: { shape: "hvh", color, width: 1 }, fillpattern: { shape, fgcolor: color, bgcolor: "rgba(0,0,0,0)", fillmode: "replace" }, hovertemplate: `%{y} pages ${label}<extra></extra>` });
  }
  const timelineHeight = Math.max(4, shown.length) * HEIGHT, pagesHeight = 90, gap = 16;
  const height = timelineHeight + pagesHeight + gap + 88, inner = timelineHeight + pagesHeight + gap;
  const axis = { gridcolor: faint, zeroline: false, fixedrange: true, color: ink };
  await plotly.react($("timeline"), traces, {
    height, barmode: "overlay", margin: { l: 64, r: 8, t: 4, b: 84 }, paper_bgcolor: ground, plot_bgcolor: ground, font: { color: ink, size: 12 },
    xaxis: { ...axis, anchor: "y2", range: [first, first + Math.max(40, Math.min(SHOWN_STEPS, step - first))], title: { text: "steps", standoff: 2 } },
    yaxis: { ...axis, range: [Math.max(4, shown.length) - 0.5, -0.5], tickvals: shown.map((_, i) => i), ticktext: shown.map((row) => row.name), domain: [(pagesHeight + gap) / inner, 1] },
    yaxis2: { ...axis, range: [0, pages.at(-1)?.total ?? 1], domain: [0, pagesHeight / inner], nticks: 3, title: { text: "pages" } },
    legend: { orientation: "h", y: -44 / inner, yanchor: "top", font: { size: 11 }, itemclick: false, itemdoubleclick: false }, hovermode: "closest",
  }, { displayModeBar: false, responsive: true });
}

function load() {
  return new Promise((resolve, reject) => {
    const script = el("script", { src: "page/plotly.js", onload: () => resolve(window.Plotly), onerror: () => reject(new Error("plotly did not load")) });
    document.head.append(script);
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plotly && draw());
