// The order of what the search finds: the course first and the API last. The other numbers are Sphinx's own.
const PLACES = { lessons: 2000, notebooks: 1000, "docs/api": -1000 };

var Scorer = {
  score: ([page, , , , score]) =>
    score + (Object.entries(PLACES).find(([folder]) => page.startsWith(`${folder}/`))?.[1] ?? 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
