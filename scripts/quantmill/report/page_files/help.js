// Explanations that a click opens, one at a time, below their buttons.

const HELP = {
  verdict: [
    `Move the slider to the loss that you accept. The first sentence names the fastest of the formats within it, by tokens per second as deployed, one request at a time.`,
    `A loss is the perplexity over that of ${DATA.reference} on the same text. Its 95% interval is of the difference, window by window. Where it holds zero, the two are a tie.`,
    "\"As far as can be told\": the intervals of the two speeds overlap. \"At least\": the speed was disturbed, and a disturbance only slows, so what it reached is a lower bound.",
    "On the Pareto front is what no other format beats in speed or quality without losing in the other.",
    ...(MEMORY ? ["Memory is that of the weights and of the keys and values of all users' texts, as the row's engine keeps them. Its buffers for calculation, and what a driver takes, come on top."] : []),
  ],
  plot: [
    "Each point is a row of the table. The word \"better\" stands in the corner to aim at.",
    `Bars are 95% intervals; those of perplexity are of the difference from ${DATA.reference} on the same text, so the reference has none. A dashed line joins the Pareto front: what no other row beats in one without losing in the other, beyond the intervals.`,
    "A roofline marks the speed at which a token's weights would be read as fast as the device copies: one bandwidth for all rows of a device, the best that an undisturbed row saw. Click a point for its figures.",
  ],
  loads: [
    "A server was started afresh several times, warmed up and put under each load. Latencies count from when a request was to be sent, tokens from their ids, and 90% of the requests must be within a limit.",
    "Figures are refused where an answer was short, cut, cached or another model's, or where the client was too slow. A click on \"refused\" says why; every column is in loads.csv.",
  ],
  table: [
    "A bold name is on the Pareto front. A click on a column's title sorts by it, a second click the other way; its ? says what it means.",
    "A dash is a figure that does not exist, or was not measured; a click on it says why. So does a click on an underlined word.",
    "A deployed speed is one that a user of the artifact gets. Quantmill's own kernels and CUDA graph have none.",
  ],
};

let asking = null; // the button whose explanation is open

function closeHelp() {
  if (!asking) return;
  asking.setAttribute("aria-expanded", "false");
  find("explanation").hidden = true;
  asking = null;
}

/** Show an explanation below a place of the page, within its width. */
function place(left, top) {
  const box = find("explanation");
  box.hidden = false;
  const widest = document.documentElement.clientWidth - box.offsetWidth - 8;
  box.style.left = `${Math.max(8, Math.min(left, widest)) + scrollX}px`;
  box.style.top = `${top + scrollY + 4}px`;
}

function toggleHelp(button, content) {
  const open = asking === button;
  closeHelp();
  if (open) return;
  asking = button;
  button.setAttribute("aria-expanded", "true");
  find("explanation").replaceChildren(...[content].flat());
  const { left, bottom } = button.getBoundingClientRect();
  place(left, bottom);
}

/** A button that opens and closes an explanation. `name`: what who cannot see its text is told. */
function question(text, name, content, kind) {
  return element("button", { type: "button", class: kind, "aria-label": name, "aria-expanded": "false", "aria-controls": "explanation", onclick: (event) => toggleHelp(event.currentTarget, content) }, text);
}

const help = (subject, content) => question("?", `What is ${subject}?`, content, "help");
const reason = (text, subject, why) => question(text, `${text}: why? ${subject}`, why, "reason");

/** What a point of a plot says, by a click as well as under a resting pointer. */
function explainPoint(target, event, item) {
  closeHelp();
  if (!item || typeof item.tooltip !== "object" || item.tooltip === null) return;
  asking = target;
  find("explanation").replaceChildren(element("dl", {}, Object.entries(item.tooltip).map(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))])));
  place(event.clientX, event.clientY + 8);
}

document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeHelp(); });
document.addEventListener("click", (event) => {
  if (asking && !asking.contains(event.target) && !find("explanation").contains(event.target)) closeHelp();
});
