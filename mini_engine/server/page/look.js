// What the chosen token looked at: the weights of one layer, drawn as a tint of the text up to this token.

import { $, el, percent, quoted } from "./dom.js";
import { send } from "./stream.js";

const NAMED = 3;  // tokens that the sentence names
let asking = new AbortController(), tinted = null;

export function offerLayers(count) {
  for (let layer = $("layer").options.length - 1; layer < count; layer++) $("layer").append(el("option", { value: layer }, `layer ${layer}`));
}

export async function look(tokens, elements, text) {  // what the last token looked at, or nothing without tokens
  asking.abort();
  asking = new AbortController();
  tinted?.classList.remove("looks");
  const layer = $("layer").value;
  if (!layer || !tokens) return say(layer && "Point at a token of an answer, and the text turns blue where this token looked.");
  try {
    const body = { prompt: tokens.map((each) => each.id), layer: Number(layer) };
    const { weights } = await (await send("v1/attention", body, asking.signal)).json();
    elements.forEach((each, i) => each.style.setProperty("--looked", weights[i] ?? 0));
    text.style.setProperty("--most", Math.max(...weights));
    tinted = text;
    tinted.classList.add("looks");
    say(sentence(tokens, layer, weights));
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
}

function sentence(tokens, layer, weights) {
  const last = tokens.length - 1, order = weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a]).slice(0, NAMED);
  const named = order.map((i) => `${i === last ? "itself" : quoted(tokens[i].piece)} ${percent(weights[i])}`);
  const rest = 1 - order.reduce((sum, i) => sum + weights[i], 0);
  return `Blue is where ${quoted(tokens[last].piece)} looked in layer ${layer}, averaged over heads: ${named.join(", ")}${rest > 5e-5 ? `, all others ${percent(rest)}` : ""}.`;
}

function say(words) {
  $("looked").hidden = !words;
  $("looked").textContent = words;
}
