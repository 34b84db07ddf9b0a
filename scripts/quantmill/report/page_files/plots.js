// The plots: Vega draws the specifications that report.write compiled, with this page's rows and colours.

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
  // a legend names what is drawn, in the table's order
  const drawn = new Set(values.flatMap((value) => [value.cell, value.engine]));
  const named = (scale) => specification.scales.find((each) => each.name === scale).domain.filter((name) => drawn.has(name));
  filled.legends = (specification.legends ?? []).map((legend) => (legend.stroke || legend.fill ? { ...legend, values: named(legend.stroke ?? legend.fill) } : legend));
  return vegaEmbed(target, filled, { mode: "vega", actions: false, logLevel: ERRORS, renderer: values.length > SHAPES ? "canvas" : "svg", tooltip: { theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" } })
    .then(({ view }) => view.addEventListener("click", (event, item) => explainPoint(target, event, item)));
}

/** A plot of one model below its caption, which `what` explains; null without rows, or where nothing can be drawn. */
function plotted(caption, what, model, specification, values) {
  if (DATA.undrawn || !values.length) return null;
  const target = element("div", { class: "plot" });
  draw(target, `${caption}, ${model}`, specification, values);
  return element("figure", {}, element("figcaption", {}, caption, " ", help(`this plot: ${caption}`, what)), target);
}

/** Whether a cost is the artifact's, on whichever device and however disturbed. */
const sized = (cost) => DATA.axes.sizes.includes(cost);

/** Which rows share a front: those of a model, and where the cost is of a device, of that. */
const frontOf = (row, cost) => (sized(cost) ? row.model : `${row.model} on ${row.device}`);

/** Whether a front is the measured one, which minds intervals. */
const weighed = (quality, cost) => quality.startsWith("perplexity") && cost === "tokens_per_second";

/** Whether no other row of the model is at least as good on both axes, or only a later one as good. An unchecked row has
 *  no place, nor has Quantmill's own speed. A disturbed row is only worse than it would be. */
function onFront(row, quality, cost) {
  if (weighed(quality, cost)) return row.pareto === true;
  const counts = (each) => !each.unchecked && (sized(cost) || each.rate !== null);
  if (!counts(row)) return false;
  const signs = [quality, cost].map((name) => (DATA.axes["more is better"].includes(name) ? 1 : -1));
  const place = (each) => [quality, cost].map((name, i) => signs[i] * each[name]);
  const [up, across] = place(row);
  return !ROWS.some((other) => {
    if (other === row || !counts(other) || frontOf(other, cost) !== frontOf(row, cost) || other[quality] === null || other[cost] === null) return false;
    const [u, a] = place(other);
    return u >= up && a >= across && (u > up || a > across || other.order < row.order);
  });
}

/** A plot's marks without labels that are not asked for; a label cannot avoid the mark of a roofline that is not drawn. */
function marksOf(specification, labelled, rooflines) {
  const there = (name) => rooflines || !name.startsWith("roofline");
  const avoiding = (step) => (step.avoidMarks ? { ...step, avoidMarks: step.avoidMarks.filter(there) } : step);
  return specification.marks.filter((mark) => !mark.name?.endsWith("labels") || (labelled && there(mark.name)))
    .map((mark) => (mark.transform ? { ...mark, transform: mark.transform.map(avoiding) } : mark));
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
  const measured = weighed(quality, cost);
  const pale = (row) => row.plot.pale && !sized(cost);
  const why = (row) => (row.rate === null ? "Quantmill's own speed" : "disturbed");
  const one = new Set(drawn.map((row) => row.model)).size === 1;
  const few = ROWS.length <= 1000; // points' own dominance on other axes is quadratic
  const values = drawn.map((row) => ({
    ...Object.fromEntries(DATA.columns.map((column) => [column.name, row[column.name]])),
    ...row.plot,
    cell: row.label,
    label: (one ? row.label : row.plot.label) + (pale(row) ? ` (${why(row)})` : ""),
    compute_type: row["runs in"][0],
    pale: pale(row),
    front: measured ? row.pareto : few && onFront(row, quality, cost),
  }));
  const label = `${DATA.axes.quality[quality][0]} over ${DATA.axes.cost[cost][0]}, ${drawn.length} rows; the table below has every figure`;
  const joined = [...new Set(values.filter((value) => value.front).map((value) => frontOf(value, cost)))]
    .some((group) => values.filter((value) => value.front && frontOf(value, cost) === group).length > 1);
  const rooflines = ruled && find("rooflines").checked;
  find("plot-note").textContent = [
    quality.startsWith("perplexity") ? `Bars: 95% intervals, those of perplexity of the difference from ${DATA.reference} on the same text.` : null,
    joined ? (measured ? "Dashed: the Pareto front." : "Dashed: rows that no other of their model equals or beats on both axes, intervals left aside.") : null,
    drawn.length < ROWS.length ? `Not drawn, for lack of one of the two figures: ${ROWS.length - drawn.length} of ${ROWS.length} rows.` : null,
    cost === "memory_at_bytes" ? `Memory: weights and cache of ${ofUsers()}.` : null,
    drawn.some(pale) ? `Pale: ${[...new Set(drawn.filter(pale).map(why))].join(", or ")}.` : null,
    rooflines ? "Roofline: the speed at which a token's weights would be read as fast as the device copies." : null,
    rooflines && drawn.some((row) => row["bandwidth disturbed"]) ? "Every row of a device was disturbed here, and the bandwidth with them." : null,
  ].filter(Boolean).join(" ");
  const signals = { rooflines };
  const specification = DATA.plots[`${quality}/${cost}`];
  draw(find("plot"), label, { ...specification, marks: marksOf(specification, drawn.length <= LABELS, rooflines) }, values, signals);
}
