// A field above each hidden answer of a lesson's section "Predict". What is written there stays in this browser.
const answers = document.querySelectorAll("section#predict details");

for (const [number, answer] of answers.entries()) {
  const key = `prediction ${number + 1} of ${location.pathname}`;
  const field = document.createElement("textarea");
  field.className = "prediction";
  field.rows = 2;
  field.placeholder = "Your prediction. It stays in this browser.";
  field.setAttribute("aria-label", `Your prediction for question ${number + 1}`);
  field.value = localStorage.getItem(key) ?? "";
  field.addEventListener("input", () => localStorage.setItem(key, field.value));
  answer.before(field);
}
