// A tour of one minute: a dialog beside one thing of the page after the other.

import { $ } from "./dom.js";

const STEPS = [  // what is pointed at, its name, what is said of it
  ["lanes", "The text", "The engine answers two prompts that begin alike. The stronger the tint, the less likely the model found the token."],
  ["look", "What a token looked at", "Choose a layer here, then point at a token of an answer. The text turns blue where this token looked."],
  ["stages", "How the token was chosen", "Each column is a stage of the sampler. It shows what the stage made of the probability of each token."],
  ["timeline", "The running batch", "Each row is a request, and the steps run to the right. A prompt comes in chunks, then the answer, token by token."],
  ["pages", "Pages of keys and values", "Here is the memory of the engine. Prompts that begin alike share pages, so that their beginning is computed once."],
];
const GAP = 12;  // pixels
let at = 0, target = null;

function show(step) {
  at = step;
  leave();
  const [id, title, text] = STEPS[at];
  target = $(id);
  target.classList.add("toured");
  $("tour-title").textContent = `${at + 1} of ${STEPS.length}: ${title}`;
  $("tour-text").textContent = text;
  $("tour-back").disabled = at === 0;
  $("tour-next").textContent = at === STEPS.length - 1 ? "Done" : "Next";
  if (at === 0) $("tour-next").focus();
  target.scrollIntoView({ block: target.offsetHeight > innerHeight / 2 ? "start" : "center" });
  place();
}

const leave = () => target?.classList.remove("toured");

function place() {  // where it covers nothing of the target, or else at the bottom of the window
  if (!$("tour").open) return;
  const box = target.getBoundingClientRect(), { width, height } = $("tour").getBoundingClientRect();
  const left = Math.max(GAP, Math.min(box.left, innerWidth - width - GAP)), top = Math.max(GAP, Math.min(box.top, innerHeight - height - GAP));
  const spots = [[left, box.bottom + GAP], [left, box.top - height - GAP], [box.right + GAP, top], [box.left - width - GAP, top]];
  const fits = ([x, y]) => x >= 0 && y >= 0 && x + width <= innerWidth && y + height <= innerHeight;
  const [x, y] = spots.find(fits) ?? [left, innerHeight - height - GAP];
  Object.assign($("tour").style, { left: `${x}px`, top: `${y}px` });
}

export function offerTour() {
  $("tour-start").addEventListener("click", () => { $("tour").showModal(); show(0); });
  $("tour-back").addEventListener("click", () => show(at - 1));
  $("tour-next").addEventListener("click", () => (at === STEPS.length - 1 ? $("tour").close() : show(at + 1)));
  $("tour-close").addEventListener("click", () => $("tour").close());
  $("tour").addEventListener("close", leave);
  new ResizeObserver(place).observe(document.body);
  for (const kind of ["scroll", "resize"]) addEventListener(kind, place, { passive: true });
}
