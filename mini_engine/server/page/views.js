// What one token, the tree and the pages look like. Nothing here talks to the server.

import { $, el, percent, plural, quoted, visible } from "./dom.js";
import { nameOf } from "./timeline.js";

// ------------------------------------------------------------------------------------------- stages of the sampler

const STAGE_HELP = {
  logits: "what the model says", penalties: "tokens that came before", grammar: "what the grammar forbids", temperature: "sharper or flatter",
  "top-k": "the k likeliest", "top-p": "the likeliest that reach p", "min-p": "a share of the likeliest", greedy: "takes the likeliest",
};

export function greedy(token) {  // at temperature 0 nothing is drawn, and one token is left
  const last = token.stages.at(-1);
  if (!last) return token;
  const probs = token.tokens.map((each) => Number(each.id === token.id));
  const stage = { name: "greedy", kept: last.chosen, removed: 1 - last.chosen, support: 1, entropy: 0, chosen: 1, probs, others: 0 };
  return { ...token, stages: [...token.stages, stage], isGreedy: true };
}

export function drawStages(lane, token) {
  $("stages-about").textContent = `Token ${token.index + 1} of ${lane.name}: ${quoted(token.piece)}, ${how(token)}.`;
  if (!token.stages.length) return $("stages").replaceChildren();
  const heads = token.stages.map((stage, i) => {
    const removed = stage.removed > 1e-9 ? `, ${percent(stage.removed)} removed` : "";
    return el("th", { scope: "col" },
      el("b", {}, i ? stage.name.replace("temper", "temper\u00ad") : "model"), el("span", {}, STAGE_HELP[stage.name] ?? ""),
      el("span", { class: "mass", "aria-hidden": "true" }, el("i", { style: `width:${100 * stage.kept}%` })),
      el("span", {}, i ? `${percent(stage.kept)} kept${removed}` : "all of it"),
      el("span", {}, `${plural(stage.support, "token")}, ${stage.entropy.toFixed(2)} bits`));
  });
  const lines = token.tokens.map((each, line) => {
    const cells = token.stages.map((stage, i) => cell(stage.probs[line], i ? token.stages[i - 1].probs[line] : 0));
    const chosen = each.id === token.id;
    return el("tr", { class: chosen && "chosen" }, el("th", { scope: "row" }, chosen ? "▶ " : "", visible(each.piece), chosen ? el("span", { class: "unseen" }, " (chosen)") : null), ...cells);
  });
  lines.push(el("tr", { class: "others" }, el("th", { scope: "row" }, "all others"), ...token.stages.map((stage) => cell(stage.others, 0))));
  $("stages").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "token"), ...heads)), el("tbody", {}, ...lines)));
}

function how(token) {
  if (!token.stages.length) return "forced by the grammar";
  const before = percent(token.stages[0].chosen), share = token.stages.at(-1).chosen;
  const after = share > 0 ? `${percent(share)} after all stages` : "removed by the stages";
  if (token.chosenByYou) return `${before} of the model, ${after}, chosen by you`;
  return token.isGreedy ? `${before} of the model, greedy: at temperature 0 the likeliest token is taken, and top-k, top-p and min-p change nothing` : after;
}

function cell(share, before) {
  const cut = share === 0 && before > 0;
  return el("td", { class: cut && "cut" }, el("i", { class: "bar-of", style: `width:${100 * (cut ? before : share)}%` }), el("span", {}, cut ? "removed" : percent(share)));
}

// ------------------------------------------------------------------------------------------------ text of one lane

const probability = (token) => (token.stages.length ? token.stages[0].chosen : 1);
const surprise = (share) => Math.min(1, -Math.log2(Math.max(share, 1e-9)) / 6);

export function tokenElement(token, on) {
  const share = probability(token);
  const classes = ["token", share < 0.25 && "unlikely", token.guessed && "guessed", token.inherited && "inherited", token.chosenByYou && "yours"].filter(Boolean).join(" ");
  const shown = token.piece === "\n" ? "⏎\n" : token.piece;
  const label = `${quoted(token.piece)}, ${token.stages.length ? percent(share) : "forced"}${token.guessed ? ", guessed" : ""}${token.chosenByYou ? ", chosen by you" : ""}`;
  return el("span", { class: classes, role: "button", tabindex: "-1", "aria-haspopup": "dialog", "aria-label": label, style: `--surprise:${surprise(share).toFixed(3)}`, ...on }, shown);
}

export const refusedElement = (piece) => el("del", { class: "refused" }, el("span", { class: "unseen" }, " guessed and refused: "), piece.replaceAll("\n", "⏎"));

export function promptElements(text, tokens) {
  let at = 0;
  return tokens.map(({ piece }, i) => {  // of a character that several tokens write, the first gets all
    let next = at + piece.length;
    if (!text.startsWith(piece, at)) {
      for (let j = i + 1; (next = j < tokens.length ? text.indexOf(tokens[j].piece, at) : text.length) < 0; j++);
    }
    const part = text.slice(at, next);
    at = next;
    return el("span", {}, part);
  });
}

export function alternatives(token, branch) {
  const last = token.stages.at(-1), first = token.stages[0];
  const others = token.tokens.map((each, i) => ({ ...each, before: first?.probs[i], after: last?.probs[i] }))
    .filter((each) => each.id !== token.id).sort((a, b) => b.after - a.after || b.before - a.before).slice(0, 7);
  const items = others.map((each) => el("li", {}, el("button", { type: "button", onclick: () => branch(each) },
    el("b", {}, visible(each.piece)), el("span", {}, percent(each.before)), el("span", {}, each.after > 0 ? `→ ${percent(each.after)}` : "→ removed"))));
  const chosen = first ? `${percent(first.chosen)} → ${percent(last.chosen)}` : "not drawn";
  return [el("p", {}, el("b", {}, quoted(token.piece)), ` ${chosen}. Go on from another one:`), el("ul", {}, ...items)];
}

// ------------------------------------------------------------------------------------------------------ radix tree

const nodes = new Map();
let pageSize = 1, running = new Map(), lit = {};  // of the newest step; the page and the node that are pointed at
let gone = [], isDue = false;

export function changeTree(change) {
  if (!change) return;
  for (const node of change.changed) nodes.set(node.node, { ...node, isNew: !nodes.has(node.node) });
  gone.push(...change.removed.map((number) => nodes.get(number)).filter(Boolean));
  for (const number of change.removed) nodes.delete(number);
  if (isDue || !(change.changed.length || gone.length)) return;
  isDue = true;
  requestAnimationFrame(drawTree);
}

export function forgetTree(size) {
  nodes.clear();
  pageSize = size;
}

function drawTree() {
  const children = Map.groupBy([...nodes.values(), ...gone.map((each) => ({ ...each, evicted: true }))], (node) => (nodes.has(node.parent) ? node.parent : null));
  const branch = (number) => {
    const below = children.get(number);
    return below && el("ul", {}, ...below.sort((a, b) => a.node - b.node).map((node) => el("li", {}, box(node), node.evicted ? null : branch(node.node))));
  };
  const all = [...nodes.values()], pages = all.reduce((sum, node) => sum + node.pages.length, 0);
  $("tree").replaceChildren(branch(null) ?? el("p", {}, "Nothing is cached yet."));
  $("tree-about").textContent = `${plural(all.length, "node")}, ${plural(pages, "page")}. Prompts that begin alike share the nodes of their beginning.` +
    (gone.length ? ` ${plural(gone.length, "node")} just evicted.` : "");
  [gone, isDue] = [[], false];
  for (const node of all) node.isNew = false;
}

function box(node) {
  const state = node.evicted ? "evicted" : node.locks ? "held" : "";
  const words = [plural(node.pages.length, "page"), node.uses ? `reused ${node.uses}×` : null, node.evicted ? "evicted" : node.locks ? `in use by ${node.locks}` : null];
  const lights = node.node === lit.node ? "lit" : "";
  return el("div", { class: `node ${state} ${node.isNew ? "new" : ""} ${lights}`, "data-node": node.node }, el("span", { class: "text", title: node.text }, node.text.replaceAll("\n", "⏎")), el("small", {}, words.filter(Boolean).join(" · ")));
}

// ----------------------------------------------------------------------------------------------------------- pages

const MOST_DRAWN = 1024, MANY = 256;  // pages; where there are many, the squares are small
let cells = [];

export function drawPages(event) {
  const { total, used, cached, evictable } = event.pages;
  running = new Map(event.running.map((each) => [each.request, each]));
  const count = Math.min(total, MOST_DRAWN);
  if (cells.length !== count) {
    cells = Array.from({ length: count }, () => el("i", { class: "page" }));
    $("pages").classList.toggle("many", count > MANY);
    $("pages").replaceChildren(...cells);
  }
  const look = Array.from(cells, () => ["page", ""]);
  const set = (page, classes, text = "") => { if (page < look.length) look[page] = [classes, text]; };
  for (const node of nodes.values()) for (const page of node.pages) set(page, node.locks ? "page kept held" : "page kept");
  for (const request of event.running) for (const page of request.pages) set(page, "page own", nameOf(request.request));
  if (look[lit.page]) look[lit.page][0] += " lit";
  look.forEach(([classes, text], page) => {
    if (cells[page].className !== classes) cells[page].className = classes;
    if (cells[page].textContent !== text) cells[page].textContent = cells[page].title = text;
  });
  $("pages-about").textContent = `${used} of ${total} used: ${used - cached} by requests, ${cached} cached, of which ${evictable} can be evicted.` +
    (total > cells.length ? ` The first ${cells.length} are drawn.` : "");
}

// ---------------------------------------------------------------------------------- where a token's keys and values are

function placeOf(ids, position, request) {
  const place = Math.floor(position / pageSize), all = [...nodes.values()];
  const below = (parent, at) => all.find((node) => node.parent === parent && node.key === null && node.tokens.every((id, i) => id === ids[at + i]));
  for (let node = below(null, 0), at = 0; node; at += node.tokens.length, node = below(node.node, at)) {
    if (position < at + node.tokens.length) return { node: node.node, page: node.pages[place - at / pageSize] };
  }
  const own = running.get(request);
  return own && position < own.computed ? { page: own.pages[place - own.cached_pages] } : {};
}

export function light(ids, position, request) {
  lit = ids ? placeOf(ids, position, request) : {};
  cells.forEach((each, page) => each.classList.toggle("lit", page === lit.page));
  for (const each of $("tree").querySelectorAll("[data-node]")) each.classList.toggle("lit", Number(each.dataset.node) === lit.node);
}
