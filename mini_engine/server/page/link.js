// The address of the page says what was asked: every prompt and knob that is not at its first value, and no key.

import { $ } from "./dom.js";

const first = new Map();  // the fields by their ids, in the order in which they are set, with their first values

const valueOf = (id) => ($(id).type === "checkbox" ? String($(id).checked) : $(id).value);

export function rememberFields(ids) {
  for (const id of ids) first.set(id, valueOf(id));
}

export function writeLink() {
  const changed = [...first].filter(([id, value]) => valueOf(id) !== value).map(([id]) => [id, valueOf(id)]);
  history.replaceState(null, "", changed.length ? `#${new URLSearchParams(changed)}` : location.pathname + location.search);
}

export function readLink() {  // sets every field; returns what is wrong with the link, or nothing
  const said = new URLSearchParams(location.hash.slice(1)), wrong = [];
  for (const id of said.keys()) if (!first.has(id)) wrong.push(`there is no ${id}; it may name ${[...first.keys()].join(", ")}`);
  for (const [id, value] of first) {
    const problem = said.has(id) ? problemOf($(id), said.get(id)) : null;
    if (problem) wrong.push(`${id} is ${said.get(id)}, and it must be ${problem}`);
    set($(id), said.has(id) && !problem ? said.get(id) : value);
  }
  return wrong.length ? `In the link: ${wrong.join("; ")}. These were left out.` : "";
}

function problemOf(field, text) {
  if (field.type === "checkbox") return ["true", "false"].includes(text) ? null : "true or false";
  if (field.tagName === "SELECT") return [...field.options].some((each) => each.value === text) ? null : `one of ${[...field.options].map((each) => each.value || "nothing").join(", ")}`;
  if (!field.min) return null;
  return text.trim() && Number(text) >= Number(field.min) && Number(text) <= Number(field.max) ? null : `a number from ${field.min} to ${field.max}`;
}

function set(field, text) {
  if (field.type === "checkbox") field.checked = text === "true";
  else field.value = text;
  for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind));
}
