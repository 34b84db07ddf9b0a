// Fill the controls, draw everything once, and again when a control changes.

const option = ([value, label]) => element("option", { value }, label);
find("quality").append(...Object.entries(DATA.axes.quality).map(([name, [label]]) => option([name, label])));
find("cost").append(...Object.entries(DATA.axes.cost).map(([name, [label]]) => option([name, label])));
find("model").append(...MODELS.map((model) => option([model, model])));

find("budget").addEventListener("input", () => showVerdict());
for (const id of ["quality", "cost", "rooflines"]) find(id).addEventListener("change", showPlot);
for (const id of ["filter", "front-only", "all-columns"]) find(id).addEventListener("input", showTable);
find("copy-markdown").addEventListener("click", () => copy("markdown"));
find("copy-csv").addEventListener("click", () => copy("csv"));
find("model").addEventListener("change", () => { showDetails(); showProvenance(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { showPlot(); showDetails(); });

showNotices();
showVerdict();
showTable();
showPlot();
showDetails();
showProvenance();
drawing.then(() => document.documentElement.setAttribute("data-drawn", ""));
