// Fill the controls, draw everything once, and again when a control changes.

const option = ([value, label]) => element("option", { value }, label);
find("quality").append(...Object.entries(DATA.axes.quality).map(([name, [label]]) => option([name, label])));
find("cost").append(...Object.entries(DATA.axes.cost).map(([name, [label]]) => option([name, label])));
// where most of what was scored has no speed, sizes tell more
const scored = ROWS.filter((row) => row.perplexity_loss !== null && row.bits_per_weight !== null);
if (scored.length > 2 * scored.filter((row) => row.tokens_per_second !== null).length) [find("quality").value, find("cost").value] = ["perplexity_loss", "bits_per_weight"];
find("model").append(...MODELS.map((model) => option([model, model])));

find("sort").append(...[["", "the study's order"], ...shownColumns().map((column) => [column.name, column.title])].map(option));
find("model-controls").hidden = MODELS.length === 1;
for (const button of document.querySelectorAll("[data-help]")) button.addEventListener("click", () => toggleHelp(button, HELP[button.dataset.help].map((line) => element("p", {}, line))));

find("budget").addEventListener("input", () => showVerdict());
if (MEMORY) {
  find("memory-controls").hidden = false;
  find("memory-of").textContent = ofUsers();
  find("memory-budget").value = MEMORY.budget_gb ?? "";
  find("memory-budget").addEventListener("input", () => showVerdict());
}
for (const id of ["quality", "cost", "rooflines"]) find(id).addEventListener("change", showPlot);
for (const id of ["filter", "front-only", "all-columns"]) find(id).addEventListener("input", showTable);
find("sort").addEventListener("change", () => {
  order.column = find("sort").value || null;
  order.direction = DATA.columns.find((column) => column.name === order.column)?.better === "higher" ? -1 : 1;
  showTable();
});
CARDS.addEventListener("change", showTable);
new ResizeObserver(hintAtWidth).observe(find("scroll"));
find("scroll").addEventListener("scroll", hintAtWidth);
for (const kind of ["markdown", "csv"]) find(`copy-${kind}`).addEventListener("click", () => copyText(asText(kind), find("copied"), `copied ${shownRows().length} rows`));
find("model").addEventListener("change", () => { showDetails(); showProvenance(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { showPlot(); if (LOADS.length) showLoadPlots(); showDetails(); });

showNotices();
showVerdict();
showTable();
showPlot();
showLoads();
showDetails();
showProvenance();
drawing.then(() => document.documentElement.setAttribute("data-drawn", ""));
