// Draw the mermaid blocks of a page in the colours of its theme. The library is loaded on pages that have one.
const diagrams = [...document.querySelectorAll(".highlight-mermaid")].map((block) => ({ block, text: block.textContent }));
const library = new URL("vendor/mermaid.js", document.currentScript.src).href;
const READABLE = 740; // pixels: on a phone a wide diagram scrolls

async function draw() {
  const theme = document.documentElement.dataset.theme === "dark" ? "dark" : "neutral";
  mermaid.initialize({ startOnLoad: false, theme });
  for (const [number, { block, text }] of diagrams.entries()) {
    block.innerHTML = (await mermaid.render(`diagram-${number}`, text)).svg;
    block.classList.add("drawn");
    const svg = block.firstElementChild;
    svg.style.minWidth = `${Math.min(READABLE, svg.viewBox.baseVal.width)}px`;
  }
}

if (diagrams.length) {
  const script = document.createElement("script");
  script.src = library;
  script.onload = () => {
    draw();
    new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  };
  document.head.append(script);
}
