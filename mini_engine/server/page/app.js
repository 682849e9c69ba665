// The page: prompts and knobs go to the engine; its steps come back, wait in a line and are shown one by one.

import { $, el, plural, visible } from "./dom.js";
import { readLink, rememberFields, writeLink } from "./link.js";
import { look, offerLayers } from "./look.js";
import { events, HttpError, send, setKey } from "./stream.js";
import { addStep, disown, nameRequest } from "./timeline.js";
import { offerTour } from "./tour.js";
import { alternatives, changeTree, light, drawPages, drawStages, forgetTree, greedy, promptElements, refusedElement, tokenElement } from "./views.js";

const SHARED = "Once upon a time there was a fox named Mila who lived in a small house near the old mill. One day Mila went for a walk and";
const PROMPTS = [`${SHARED} met a`, `${SHARED} found a`];
const TRAFFIC = ["Once upon a time there was an owl named Tom.", "There was a bear who wanted to", "One morning a cat named Ida", "In a village by the sea lived", "Once there was a dog", "There was a whale who"];
const KNOBS = [  // name, label, least, most, step, first value, whether it is a slider
  ["temperature", "temperature", 0, 2, 0.05, 0.9, true], ["top_k", "top-k (0: off)", 0, 1000, 1, 10], ["top_p", "top-p (1: off)", 0.05, 1, 0.01, 0.9, true],
  ["min_p", "min-p (0: off)", 0, 0.5, 0.01, 0, true], ["repetition_penalty", "repetition penalty (1: off)", 0.5, 2, 0.05, 1, true],
  ["frequency_penalty", "frequency penalty", -2, 2, 0.1, 0], ["presence_penalty", "presence penalty", -2, 2, 0.1, 0], ["seed", "seed", 0, 1e9, 1, 7], ["max_tokens", "tokens at most", 1, 300, 1, 48],
];
const EXAMPLES = { regex: " (red|blue) (ball|boat)\\.", json_schema: '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}' };
const BEHIND = 400;  // steps that may wait before the page shows several at a time

let lanes = [], waiting = [], playing = true, isStopping = false, selected = null, held = 0, timer = 0, tabStop = null, traffic = new AbortController();
const branches = { A: 1, B: 1 };  // the highest number that a branch of each prompt ever had
const known = new Set();  // requests whose first event has come, or that are not ours

// ---------------------------------------------------------------------------------------------- prompts and knobs

function knobs() {
  return Object.fromEntries(KNOBS.map(([name]) => [name, Number($(name).value)]));
}

function grammar() {
  const kind = $("grammar").value;
  return kind ? { [kind]: $("grammar-text").value } : {};
}

function makeKnobs() {
  for (const [name, label, min, max, step, value, slides] of KNOBS) {
    const input = el("input", { id: name, type: slides ? "range" : "number", min, max, step, value });
    const output = slides ? el("output", { for: name }, String(value)) : null;
    input.addEventListener("input", () => { if (output) output.textContent = input.value; rerun(); });
    $("knobs").append(el("label", { for: name }, el("span", {}, label, " ", output), input));
  }
}

function rerun() {
  clearTimeout(timer);
  if ($("auto").checked) timer = setTimeout(run, 500);
}

function run() {
  clearTimeout(timer);
  complain(null);
  writeLink();
  endLanes();
  disown();
  const made = lanes.filter((lane) => lane.given.after), kept = lanes.filter((lane) => lane.isKept && lane.tokens.length);
  lanes = [];
  choose(null);
  $("lanes").replaceChildren();
  const first = addLane({ name: "A", prompt: $("prompt-a").value });
  const rest = $("both").checked ? [addLane({ name: "B", prompt: $("prompt-b").value })] : [];
  const origin = (lane) => [first, ...rest].find((each) => each.name === lane.name[0] && each.prompt === lane.prompt);
  for (const lane of made.filter(origin)) rest.push(addLane({ ...lane.given, after: lanes.findLast((each) => each.name[0] === lane.name[0]) }));
  for (const lane of kept.filter(origin)) keep(lane, origin(lane));
  sayClosed([...kept, ...made].filter((lane) => !origin(lane)));
  first.onFirst = () => rest.forEach(ask);  // when A's prompt is computed, so that the others find it in the cache
  ask(first);
}

function keep(lane, main) {  // beside the new answer, which is compared to it
  if (lane.name === main.name) {
    lane.name = `${main.name}${branches[main.name] += 1}`;
    lane.heading.firstChild.textContent = lane.name;
    lane.heading.lastChild.replaceWith(closeButton(lane));
    lane.box.setAttribute("aria-label", lane.name);
    lane.text.setAttribute("aria-label", `Answer ${lane.name}`);
  }
  const now = { ...knobs(), ...grammar() };
  const others = Object.entries({ ...Object.fromEntries(Object.keys(now).map((name) => [name, "none"])), ...lane.settings }).filter(([name, value]) => value !== now[name]);
  lane.keptAt.textContent = `kept, at ${others.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ") || "the same knobs"}`;
  for (const token of lane.tokens) token.element.classList.remove("differs");
  lanes.splice(lanes.indexOf(main) + 1, 0, lane);
  main.box.after(lane.box);
  main.against = lane;
}

function compare(lane, token) {  // marks the first token that differs from the kept answer
  const other = lane.against?.tokens[token.index];
  if (!lane.against || lane.differsAt !== undefined || other?.id === token.id) return;
  lane.differsAt = token.index;
  for (const each of [token, other]) each?.element.classList.add("differs");
}

function comparison(lane, hasEnded) {
  if (!lane.against) return "";
  if (lane.differsAt !== undefined) return `, differs from ${lane.against.name} at token ${lane.differsAt + 1}`;
  return hasEnded ? `, ${lane.tokens.length < lane.against.tokens.length ? "the beginning of" : "the same as"} ${lane.against.name}` : "";
}

function runLink(wrong) {
  run();
  if (wrong) complain(new Error(wrong));
}

function sayClosed(closed) {
  const [were, their] = closed.length === 1 ? ["was", "its"] : ["were", "their"];
  $("note").hidden = !closed.length;
  $("note").textContent = closed.length ? `${closed.map((lane) => lane.name).join(", ")} ${were} closed, because ${their} prompt is no longer asked.` : "";
}

function stop() {  // what has not been shown yet never is
  traffic.abort();
  traffic = new AbortController();
  endLanes();
  isStopping = true;
}

function endLanes() {
  for (const lane of lanes) endLane(lane);
  catchUp();
}

function catchUp() {
  for (const event of waiting) record(event);
  if (waiting.length) drawPages(waiting.at(-1));
  waiting = [];
  showBehind();
}

function endLane(lane) {
  if (lane.hasEnded) return;
  lane.abort?.abort();
  [lane.isStopped, lane.onFirst] = [true, null];
  lane.about.textContent = [lane.tokens.length && plural(lane.tokens.length, "token"), "stopped"].filter(Boolean).join(", ");
}

// ----------------------------------------------------------------------------------------------- lanes of answers

function addLane({ name, prompt, promptTokens = [], tokens = [], after = null }) {
  const given = { name, prompt, promptTokens, tokens, after };
  const lane = { name, prompt, promptTokens, given, tokens: [], data: [], about: el("small", {}), keptAt: el("span", { class: "kept-at" }), text: el("p", { class: "text", role: "group", "aria-label": `Answer ${name}` }) };
  lane.promptText = el("span", { class: "prompt" }, ...(promptTokens.length ? promptElements(prompt, promptTokens) : [prompt]));
  lane.text.append(lane.promptText);
  lane.heading = el("h3", {}, el("span", {}, name), " ", lane.about, " ", lane.keptAt, after ? closeButton(lane) : keepButton(lane));
  lane.box = el("article", { class: "lane", "aria-label": name }, lane.heading, lane.text);
  for (const kind of ["mouseover", "focusin"]) lane.text.addEventListener(kind, (event) => point(lane, event.target));
  lane.text.addEventListener("mouseleave", () => point(null));
  lane.text.addEventListener("keydown", (event) => move(lane, event));
  if (after) { lanes.splice(lanes.indexOf(after) + 1, 0, lane); after.box.after(lane.box); } else { lanes.push(lane); $("lanes").append(lane.box); }
  for (const token of tokens) show(lane, token);
  return lane;
}

const closeButton = (lane) => el("button", { type: "button", class: "close", "aria-label": `Close ${lane.name}`, onclick: () => removeLane(lane) }, "×");

function keepButton(lane) {
  const button = el("button", { type: "button", class: "keep", "aria-pressed": "false", title: "The next run is compared to this answer" }, `Keep ${lane.name}`);
  button.addEventListener("click", () => { lane.isKept = !lane.isKept; button.setAttribute("aria-pressed", String(lane.isKept)); });
  return button;
}

function removeLane(lane) {
  endLane(lane);
  lane.box.remove();
  lanes = lanes.filter((other) => other !== lane);
}

async function ask(lane) {
  if (lane.given.after && $("grammar").value) { lane.about.textContent = "not asked, because a grammar cannot begin in the middle of an answer"; return; }
  const begun = () => { lane.onFirst?.(); lane.onFirst = null; };
  lane.abort = new AbortController();
  [lane.isStarting, isStopping] = [true, false];
  const own = lane.tokens.map((token) => token.id), settings = knobs();
  lane.settings = { ...settings, ...grammar() };
  const prompt = lane.promptTokens.length ? [...lane.promptTokens.map((token) => token.id), ...own] : lane.prompt;
  const body = { prompt, ...settings, ...grammar(), max_tokens: Math.max(1, settings.max_tokens - own.length) };
  lane.about.textContent = "waits";
  try {
    for await (const [name, event] of events("v1/stages", body, lane.abort.signal)) {
      if (name === "start") {
        [lane.request, lane.isStarting] = [event.request, false];
        if (!lane.promptTokens.length) {
          lane.promptTokens = event.prompt;
          lane.promptText.replaceChildren(...promptElements(lane.prompt, lane.promptTokens));
        }
        known.add(event.request);
        nameRequest(event.request, lane.name);
      } else if (name === "token") {
        lane.data[event.index] = { ...(settings.temperature ? event : greedy(event)), index: event.index + own.length };
        if (event.index === 0) begun();
      } else if (name === "error") throw new Error(event.error.message);
    }
  } catch (error) {
    if (error.name === "AbortError" || !lanes.includes(lane)) return;
    complain(error);
    lane.about.textContent = "error";
    begun();
  } finally {
    lane.isStarting = false;
  }
}

function show(lane, token) {
  const element = tokenElement(token, {
    onmouseenter: () => { if (isQuiet) return; if (token !== selected?.token) select(lane, token, false); openMenu(lane, token, element); },
    onmouseleave: () => scheduleClose(),
    onfocus: () => select(lane, token, true),
    onclick: () => openMenu(lane, token, element, true),
  });
  token.element = element;
  lane.tokens.push(token);
  compare(lane, token);
  lane.text.append(element);
  if (!tabStop?.isConnected) setTabStop(element);
  if (!selected && lane === followed()) drawStages(lane, token);
}

const elements = (lane) => [...lane.promptText.children, ...lane.tokens.map((token) => token.element)];  // by position

let pointed = null;  // the lane and the position whose page and node are lit

function point(lane, element) {
  const position = lane ? elements(lane).indexOf(element) : -1;
  pointed = position < 0 ? null : { lane, position };
  lightPointed();
}

function lightPointed() {
  if (!pointed) return light(null);
  const { lane, position } = pointed;
  light([...lane.promptTokens, ...lane.tokens].map((token) => token.id), position, lane.request);
}

function setTabStop(element) {
  tabStop?.setAttribute("tabindex", "-1");
  tabStop = element;
  element.setAttribute("tabindex", "0");
}

function select(lane, token, isFocus) {
  choose({ lane, token });
  if (isFocus) setTabStop(token.element);
  drawStages(lane, token);
}

function choose(chosen) {
  selected?.token.element.classList.remove("selected");
  selected = chosen;
  selected?.token.element.classList.add("selected");
  $("follow").hidden = !selected;
  lookAgain();
}

function lookAgain() {
  if (!selected) return look();
  const { lane, token } = selected;
  return look([...lane.promptTokens, ...lane.tokens.slice(0, token.index + 1)], elements(lane), lane.text);
}

const followed = () => lanes.find((lane) => lane.request && !lane.hasEnded && !lane.isStopped) ?? lanes.find((lane) => lane.tokens.length);

function follow() {
  choose(null);
  const lane = followed();
  if (lane?.tokens.length) drawStages(lane, lane.tokens.at(-1));
}

function move(lane, event) {
  const at = lane.tokens.findIndex((token) => token.element === document.activeElement);
  if (at < 0) return;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: lane.tokens.length - 1 }[event.key];
  if (to !== undefined) lane.tokens[to]?.element.focus();
  else if (event.key === "Enter" || event.key === " ") openMenu(lane, lane.tokens[at], lane.tokens[at].element, true);
  else return;
  event.preventDefault();
}

// ------------------------------------------------------------------------------------- alternatives and branches

let closing = 0, isQuiet = false;  // quiet: the text moves below a pointer that rests

function openMenu(lane, token, element, focus = false) {
  clearTimeout(closing);
  const menu = $("menu");
  menu.replaceChildren(...alternatives(token, (other) => branch(lane, token, other)));
  if (!menu.matches(":popover-open")) menu.showPopover();
  const place = element.getBoundingClientRect(), size = menu.getBoundingClientRect();
  const below = place.bottom + size.height + 8 < innerHeight;
  menu.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
  menu.style.top = `${below ? place.bottom + 2 : Math.max(8, place.top - size.height - 2)}px`;
  menu.onkeydown = (event) => walkMenu(event, element);
  if (focus) menu.querySelector("button")?.focus();
}

function walkMenu(event, element) {
  const buttons = [...$("menu").querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
  if (to !== undefined) { buttons[(to + buttons.length) % buttons.length].focus(); event.preventDefault(); }
  if (event.key === "Escape") { closeMenu(); element.focus(); }
}

const closeMenu = () => $("menu").matches(":popover-open") && $("menu").hidePopover();
const scheduleClose = () => { clearTimeout(closing); closing = setTimeout(() => $("menu").contains(document.activeElement) || closeMenu(), 250); };

function branch(lane, token, other) {
  closeMenu();
  complain(null);
  isQuiet = true;
  if ($("grammar").value) return complain(new Error("A grammar begins with the answer, so it cannot begin in the middle of one. Set the grammar to none, then branch."));
  const before = lane.tokens.slice(0, token.index).map((each) => ({ ...each, inherited: true, guessed: false }));
  const line = token.tokens.findIndex((each) => each.id === other.id);
  const stages = token.stages.map((stage) => ({ ...stage, chosen: stage.probs[line] }));
  const chosen = { ...token, id: other.id, piece: other.piece, stages, chosenByYou: true, inherited: true };
  const letter = lane.name[0];
  branches[letter] += 1;
  const made = addLane({ name: `${letter}${branches[letter]}`, prompt: lane.prompt, promptTokens: lane.promptTokens, tokens: [...before, chosen], after: lane });
  $("live").textContent = `${made.name} goes on from ${other.piece} in ${lane.name}.`;
  follow();
  made.box.scrollIntoView({ block: "nearest" });
  made.tokens.at(-1).element.focus({ preventScroll: true });
  ask(made);
}

// ---------------------------------------------------------------------------------------------------------- steps

async function watch() {
  for (;;) {
    try {
      for await (const [name, event] of events("v1/steps")) {
        if (name === "step") arrive(event);
        else if (name === "engine") welcome(event);
        else throw new HttpError(0, event.error.message);
      }
    } catch (error) {
      complain(error instanceof HttpError ? error : new Error("The engine does not answer. Trying again …"));
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function arrive(event) {  // after Stop nothing waits until the engine has let go of what was stopped
  waiting.push(event);
  if (!isStopping) return;
  catchUp();
  isStopping = event.running.length + event.waiting.length > 0;
}

let isWelcomed = false;

function welcome(engine) {
  complain(null);
  forgetTree(engine.page_size);
  offerLayers(engine.num_layers);
  waiting = [];
  const limit = engine.max_tokens_per_step ? `${engine.max_tokens_per_step} rows a step` : "whole prompts";
  $("about").textContent = [`${engine.model}`, engine.modules && `the modules of ${engine.modules}`, `${engine.num_pages} pages of ${engine.page_size} tokens`, limit, `${engine.max_running_requests} requests at a time`, engine.prefix_cache ? "radix cache" : "no cache", `compute: ${engine.compute}`].filter(Boolean).join(" · ");
  if (!isWelcomed) runLink(wrongAtStart);
  isWelcomed = true;
}

function isReady(event) {  // everything that the step says of our own requests has come
  if (event.chunks.some((chunk) => !known.has(chunk.request)) && lanes.some((lane) => lane.isStarting)) return false;
  return lanes.filter((lane) => !lane.isStopped).every((lane) => event.tokens.filter((token) => token.request === lane.request).every((_, i) => lane.data[(lane.shown ?? 0) + i]));
}

function playStep() {
  const event = waiting[0];
  if (!event) return false;
  if (!isReady(event) && held++ < 40) return false;
  held = 0;
  waiting.shift();
  for (const lane of lanes) if (!lane.isStopped) showStep(lane, event);
  record(event);
  drawPages(event);
  lightPointed();
  return true;
}

function record(event) {
  for (const chunk of event.chunks) known.add(chunk.request);
  addStep(event);
  changeTree(event.tree);
}

function showStep(lane, event) {
  const chunk = event.chunks.find((each) => each.request === lane.request);
  if (chunk && lane.cached === undefined) {
    lane.cached = chunk.start;
    for (const element of elements(lane).slice(0, lane.cached)) element.classList.add("cached");
  }
  let accepted = event.accepted[lane.request] ?? 0;
  for (const token of event.tokens.filter((each) => each.request === lane.request)) {
    const data = lane.data[lane.shown ?? 0];
    lane.shown = (lane.shown ?? 0) + 1;
    if (data && data.id === token.id) show(lane, { ...data, guessed: accepted-- > 0 });
  }
  lane.text.append(...(event.refused[lane.request] ?? []).map(refusedElement));
  lane.drafted = (lane.drafted ?? 0) + (event.drafted[lane.request] ?? 0);
  const reason = event.finished[lane.request];
  if (!chunk && !reason) return;
  const cached = lane.cached ? `, ${plural(lane.cached, "token")} from the cache` : "";
  const came = lane.drafted ? `, ${lane.tokens.filter((each) => each.guessed).length} of ${lane.drafted} guesses came` : "";
  lane.about.textContent = `${plural(lane.tokens.length, "token")}${cached}${came}${reason ? `, ended: ${reason}` : ""}${comparison(lane, reason)}`;
  lane.hasEnded ||= Boolean(reason);
  if (reason) $("live").textContent = `${lane.name} has ended: ${lane.tokens.map((each) => each.piece).join("")}`;
}

const showBehind = () => { $("behind").textContent = waiting.length ? `${plural(waiting.length, "step")} not shown yet` : ""; };

function tick() {
  if (playing) for (let i = Math.ceil(waiting.length / BEHIND); i > 0 && playStep(); i--);
  showBehind();
  setTimeout(tick, 1000 / Number($("speed").value));
}

// ----------------------------------------------------------------------------------------------------------- start

function complain(error) {
  $("alert").hidden = !error;
  $("alert").textContent = error?.message ?? "";
  if (error?.status === 401) $("key-label").hidden = false;
}

function addTraffic() {  // all on one connection, because browsers open no more than six to a server
  isStopping = false;
  send("v1/completions", { prompt: TRAFFIC, ...knobs(), max_tokens: 90, ignore_eos: true }, traffic.signal).catch((error) => error.name === "AbortError" || complain(error));
}

$("prompt-a").value = PROMPTS[0];
$("prompt-b").value = PROMPTS[1];
makeKnobs();
rememberFields(["prompt-a", "prompt-b", "both", ...KNOBS.map(([name]) => name), "grammar", "grammar-text"]);
if (matchMedia("(max-width: 700px)").matches) $("knobs-box").open = false;
$("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
for (const id of ["prompt-a", "prompt-b"]) $(id).addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); });
$("stop").addEventListener("click", stop);
$("traffic").addEventListener("click", addTraffic);
$("both").addEventListener("change", () => { $("second").hidden = !$("both").checked; rerun(); });
$("pause").addEventListener("click", () => { [playing, isStopping] = [!playing, false]; $("pause").textContent = playing ? "Pause" : "Go on"; $("pause").setAttribute("aria-pressed", String(!playing)); });
$("next").addEventListener("click", () => { if (playing) $("pause").click(); playStep(); });
$("speed").addEventListener("input", () => { $("speed-out").textContent = $("speed").value; });
$("follow").addEventListener("click", follow);
$("layer").addEventListener("change", lookAgain);
$("grammar").addEventListener("change", () => { const kind = $("grammar").value; $("grammar-text-label").hidden = !kind; $("grammar-text").value = EXAMPLES[kind] ?? ""; rerun(); });
$("grammar-text").addEventListener("change", rerun);
addEventListener("hashchange", () => runLink(readLink()));
$("key").addEventListener("change", () => setKey($("key").value));
$("menu").addEventListener("mouseenter", () => clearTimeout(closing));
$("menu").addEventListener("mouseleave", scheduleClose);
document.addEventListener("pointermove", () => { isQuiet = false; });
document.addEventListener("pointerdown", (event) => { if (!event.target.closest("#menu, .token")) closeMenu(); });
addEventListener("scroll", () => $("menu").contains(document.activeElement) || closeMenu(), { passive: true });
const wrongAtStart = readLink();  // before the engine answers, so that nothing typed meanwhile is lost
clearTimeout(timer);
offerTour();
tick();
watch();
