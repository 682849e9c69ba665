// Small helpers for elements, and how numbers and tokens are written.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export function percent(share) {
  if (share > 0.9995) return "100 %";
  if (share >= 0.1) return `${(100 * share).toFixed(1)} %`;
  if (share >= 0.0001) return `${(100 * share).toFixed(2)} %`;
  return share > 0 ? "< 0.01 %" : "0 %";
}

export const visible = (piece) => piece.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
export const quoted = (piece) => `“${visible(piece)}”`;
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
