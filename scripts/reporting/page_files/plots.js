// The plots: Vega draws the specifications that report.py compiled, with this page's rows and colours.

const LABELS = 40; // rows; more labels than that hide the plot
const SHAPES = 300; // rows; more shapes than that are drawn faster as pixels
const ERRORS = 1; // Vega's level of messages
let drawing = Promise.resolve();

/** Colours of the page's theme, as Vega wants them. */
function theme() {
  const probe = element("span", { style: "color: var(--ink); border-color: var(--line)" });
  document.body.append(probe);
  const style = getComputedStyle(probe);
  const [ink, line] = [style.color, style.borderTopColor];
  probe.remove();
  const text = { labelColor: ink, titleColor: ink };
  return { background: "transparent", axis: { ...text, gridColor: line, domainColor: line, tickColor: line }, legend: text, text: { fill: ink } };
}

/** Draw after what is being drawn; what fails says so in its place. */
function draw(target, ...what) {
  drawing = drawing.then(() => embed(target, ...what)).catch((error) => target.replaceChildren(element("p", { class: "note" }, `This plot failed: ${error.message}`)));
}

/** One specification in an element, with `values` as its rows; `label`: what it shows, for who cannot see it. */
function embed(target, label, specification, values, signals = {}) {
  const data = specification.data.map((each) => (each.name === "rows" ? { ...each, values } : each));
  const filled = { ...specification, data, background: "transparent", description: label, config: { ...specification.config, ...theme(), axis: { ...specification.config?.axis, ...theme().axis } } };
  filled.signals = (specification.signals ?? []).map((each) => (each.name in signals ? { ...each, value: signals[each.name] } : each));
  return vegaEmbed(target, filled, { mode: "vega", actions: false, logLevel: ERRORS, renderer: values.length > SHAPES ? "canvas" : "svg", tooltip: { theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" } });
}

/** Whether no other row of the model is at least as good on both axes and better on one; what was disturbed is not asked. */
function onFront(row, quality, cost) {
  if (quality === "perplexity" && cost === "tokens_per_second") return row.pareto === true;
  const counts = (each) => cost === "size_bytes" || !disturbed(each);
  if (!counts(row)) return false;
  const signs = [quality, cost].map((name) => (DATA.axes["more is better"].includes(name) ? 1 : -1));
  const place = (each) => [quality, cost].map((name, i) => signs[i] * each[name]);
  const [up, across] = place(row);
  return !ROWS.some((other) => {
    if (other === row || !counts(other) || other.model !== row.model || other.device !== row.device || other[quality] === null || other[cost] === null) return false;
    const [u, a] = place(other);
    return u >= up && a >= across && (u > up || a > across);
  });
}

function showPlot() {
  if (DATA.undrawn) {
    for (const control of find("plot-controls").querySelectorAll("select, input")) control.disabled = true;
    find("plot").replaceChildren(element("p", { class: "note" }, `The plots could not be drawn: ${DATA.undrawn}. The table has their figures.`));
    return;
  }
  const [quality, cost] = [find("quality").value, find("cost").value];
  const drawn = ROWS.filter((row) => row[quality] !== null && row[cost] !== null);
  const ruled = cost === "tokens_per_second" && drawn.some((row) => row.plot.roofline !== null);
  find("rooflines-label").hidden = !ruled;
  if (!drawn.length) {
    find("plot").replaceChildren(element("p", { class: "note" }, "No row has both figures, so there is nothing to plot."));
    return;
  }
  const measured = quality === "perplexity" && cost === "tokens_per_second";
  const one = new Set(drawn.map((row) => row.model)).size === 1;
  const few = ROWS.length <= 1000; // points' own dominance on other axes is quadratic
  const values = drawn.map((row) => ({
    ...Object.fromEntries(DATA.columns.map((column) => [column.name, row[column.name]])),
    ...row.plot,
    label: one ? row.format + (disturbed(row) ? " (disturbed)" : "") : row.plot.label,
    compute_type: row["runs in"][0],
    disturbed: disturbed(row),
    front: measured ? row.pareto : few && onFront(row, quality, cost),
  }));
  const label = `${DATA.axes.quality[quality][0]} over ${DATA.axes.cost[cost][0]}, ${drawn.length} rows; the table below has every figure`;
  find("plot-note").textContent =
    (measured ? `Bars are 95% intervals; those of perplexity are of the difference from ${DATA.reference} on the same text. The dashed line joins the Pareto front: what no other row beats in one without losing in the other, beyond the intervals.`
      : "The dashed line joins rows that no other of their model equals or beats on both axes; the intervals are not asked.") +
    (drawn.some(disturbed) ? " Pale points were disturbed while they were measured and join no front." : "") +
    (ruled ? " A roofline marks the speed at which a token's weights would be read as fast as the device copies: one bandwidth for all rows of a device, the best that an undisturbed row saw." : "") +
    (ruled && drawn.some((row) => row["bandwidth disturbed"]) ? " Every row of a device was disturbed here, and the bandwidth with them." : "");
  const signals = { rooflines: find("rooflines").checked };
  const specification = DATA.plots[`${quality}/${cost}`];
  const marks = specification.marks.filter((mark) => mark.name !== "labels" || drawn.length <= LABELS);
  draw(find("plot"), label, { ...specification, marks }, values, signals);
}
