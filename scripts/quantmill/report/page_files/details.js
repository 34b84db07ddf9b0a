// A closer look at one model: divergence, times, texts; and the provenance of every row.

const PLOT_HELP = {
  divergence: "Each line is a format. The further right its hill, the further its predictions are from the reference's; 0 nats would be the same prediction. A position is one token of the evaluation text.",
  gaps: "Each line is a format. It rises where most of its tokens came: further left is faster, steeper is steadier. Where it bends to the right, the slowest tokens were much slower than the others.",
  prompts: "Each point is a prompt in a format: the median time until its first token came. Lower is better; a longer prompt takes longer.",
};

function passages(format, divergence) {
  const items = divergence.worst.map((each) =>
    element("li", {}, element("span", {}, `…${each.before}`), element("mark", {}, each.token), element("span", {}, `${each.after}…`),
      element("small", {}, ` ${figure(each.kld, 3)} nats; the right token ${each.delta_p >= 0 ? "gains" : "loses"} ${figure(Math.abs(each.delta_p) * 100, 3)} points`)));
  return element("details", {}, element("summary", {}, `${format}: where it is furthest from ${DATA.reference}`), element("ol", {}, items));
}

/** A task's answers of a row: its metrics, and the answers that flipped and moved most, with their texts. */
function answers(format, task, told) {
  const said = (flip, answer) => (flip.choices ? flip.choices[answer] : typeof answer === "number" ? (answer ? "right" : "another word") : answer) ?? "nothing";
  const items = told.flips.map((flip) =>
    element("li", {}, element("span", {}, `…${flip.prompt} `), element("mark", {}, said(flip, flip.answer)),
      element("small", {}, ` ${flip.right ? "right" : "wrong"}; ${DATA.reference}: "${said(flip, flip.was)}"; asked for: "${flip.choices?.[flip.target] ?? flip.target}"${flip.nats ? `; ${figure(flip.nats, 3)} nats apart` : ""} (${flip.task}, document ${flip.document})`)));
  const metrics = Object.entries(told.metrics).map(([name, [value, error]]) => `${name.replace(/,none$/, "")} ${figure(value)}${error === null ? "" : ` ± ${figure(error, 2)}`}`);
  const [count, of] = told.documents;
  const heading = `${format}, ${task}: ${metrics.join(", ")}; ${count === of ? count : `${count} of ${of}`} documents${told.flips.length ? "; the worst flips" : ""}`;
  return element("details", {}, element("summary", {}, heading), items.length ? element("ol", {}, items) : element("p", { class: "note" }, format === DATA.reference ? "The reference." : "No answer flipped."));
}

/** That a text repeats itself to its end; `theirs`: what the reference wrote after the same prompt. */
function looped(format, output, theirs) {
  if (!output.loop) return null;
  const habit = format !== DATA.reference && theirs?.loop ? `, as ${DATA.reference} does from token ${theirs.loop} on: the model's own habit` : "";
  return element("small", { class: "warning" }, ` repeats itself from token ${output.loop} to its end${habit}`);
}

function written(format, output, compared, theirs) {
  const same = output.untold ? " returns no tokens" : format === DATA.reference ? " the reference" : compared ? " the same tokens" : " nothing to compare it with";
  const heading = element("h3", {}, format, element("small", {}, output.at === null ? same : ` differs from token ${output.at} on`), looped(format, output, theirs));
  return element("div", {}, heading, element("div", { class: "text", tabindex: 0 }, output.same, output.at === null ? "" : element("mark", {}, output.other), output.rest ?? ""));
}

function texts(model, detail) {
  const formats = Object.entries(detail.formats).filter(([, each]) => each.outputs);
  return detail.prompts.map((prompt, number) => {
    const sides = element("div", { class: "sides" });
    const fill = () => { if (!sides.hasChildNodes()) sides.append(...formats.map(([format, each]) => written(format, each.outputs[number], detail.compared, detail.formats[DATA.reference]?.outputs?.[number]))); };
    return element("details", { ontoggle: fill }, element("summary", {}, `${number + 1}. ${prompt}`), sides);
  });
}

/** The share of a mixture's experts to which the router sent few calibration tokens, as a picture and in words. */
function calibrated(row) {
  const { count, few, below, none, all } = row.experts;
  const said = `the router sent fewer than ${few} calibration tokens to ${percent(below / count)} of ${count} experts${none ? `, and none to ${none}` : ""}${all ? "; its tool showed all tokens to each" : ""}`;
  return element("li", {}, `${row.label} `, element("meter", { min: 0, max: count, low: 0.1 * count, high: 0.5 * count, optimum: 0, value: below, title: said }), ` ${said}`);
}

function showDetails() {
  const model = find("model").value;
  const detail = DATA.details[model];
  find("details-section").hidden = detail === undefined;
  if (detail === undefined) return;
  if (!detail) {
    find("details").replaceChildren(element("p", { class: "note" }, `There was no room in this page for ${model}: its values of each position, times and texts are in artifacts/${model}/.`));
    return;
  }
  const rows = ROWS.filter((row) => row.model === model);
  const ties = new Set(rows.filter((row) => row.nll_verdict === "tie" || row.above_noise_floor === false).map((row) => row.label));
  const formats = Object.entries(detail.formats);
  const charts = {
    divergence: ["How far each position is from the reference", formats.flatMap(([format, each]) => (each.divergence?.shares ?? []).slice(1).map((share, i) => ({ cell: format, share, kld: DATA.edges[i] }))).filter((each) => each.cell !== DATA.reference)],
    gaps: ["How long each token took after the one before", formats.flatMap(([format, each]) => (each.gaps_ms ?? []).map((itl_ms, i) => ({ cell: format, itl_ms, quantile: DATA.quantiles[i] })))],
    prompts: ["How long each prompt took to its first token", formats.flatMap(([format, each]) => (each.prompts ?? []).map((prompt, i) => ({ cell: format, prompt: i + 1, tokens: prompt.tokens, ttft_ms: prompt.ttft_ms, per_second: prompt.tokens_per_second })))],
  };
  const figures = Object.entries(charts).map(([name, [caption, values]]) => plotted(caption, PLOT_HELP[name], model, DATA["detail plots"][name], values)).filter(Boolean);
  const parts = formats.filter(([format, each]) => each.divergence && format !== DATA.reference && !ties.has(format)).map(([format, each]) => passages(format, each.divergence));
  const asked = formats.flatMap(([format, each]) => Object.entries(each.tasks ?? {}).map(([task, told]) => answers(format, task, told)));
  const more = rows.flatMap((row) => row.variants.filter((each) => !each.skipped).map((each) => [row, each]));
  const variants = more.map(([row, each]) => {
    const what = each.batch ? `batch ${each.batch}` : `a prompt of ${each.tokens} tokens`;
    const said = each.batch ? `${figure(each.tokens_per_second)} tokens/s` : `TTFT ${figure(each.ttft_ms_p50, 3)} ms, TPOT ${figure(each.tpot_ms_p50, 3)} ms`;
    return element("li", {}, `${row.label}, ${what}: ${said}${each.refused ? `; refused: ${each.refused}` : ""}`);
  });
  const mixtures = rows.filter((row) => row.experts);
  find("details").replaceChildren(...[
    element("div", { class: "plots" }, figures),
    mixtures.length ? element("h3", {}, "What experts were calibrated on") : null,
    mixtures.length ? element("ul", {}, mixtures.map(calibrated)) : null,
    parts.length ? element("h3", {}, "The worst passages") : null, parts,
    asked.length ? element("h3", {}, "Tasks") : null, asked,
    variants.length ? element("details", {}, element("summary", {}, "Longer prompts and batches"), element("ul", {}, variants)) : null,
    detail.prompts.length ? element("h3", {}, "What was written") : null,
    detail.prompts.length && detail.random ? element("p", { class: "note" }, "The weights are random, and so is the text.") : null,
    texts(model, detail),
  ].flat().filter((part) => part !== null));
  find("details-section").hidden = !(figures.length || mixtures.length || parts.length || asked.length || variants.length || detail.prompts.length || MODELS.length > 1);
}

/** A value of the provenance as terms and descriptions. */
function described(value) {
  if (value === null || value === undefined || value === "") return "none";
  if (typeof value !== "object") return String(value);
  if (Array.isArray(value)) return value.join(", ") || "none";
  return element("dl", {}, Object.entries(value).map(([name, each]) => [element("dt", {}, name), element("dd", {}, described(each))]));
}

function origin(row) {
  const filled = (entry) => {
    if (!entry.open || entry.childElementCount > 1) return;
    const parts = DATA.origins.map((name, i) => [element("dt", {}, name), element("dd", {}, described(DATA.pool[row.origins[i]]))]);
    entry.append(element("p", {}, row.prebuilt ? "Not built here; fetched again by" : "Built again by"), element("pre", {}, `${DATA.commands.build} artifacts/${row.model}/${row.format}`), element("dl", {}, parts));
  };
  return element("details", { ontoggle: (event) => filled(event.currentTarget) }, element("summary", {}, row.id));
}

function showProvenance() {
  const all = find("details-section").hidden; // and the choice of a model with it
  const rows = ROWS.filter((row) => all || row.model === find("model").value);
  find("provenance").replaceChildren(...[
    DATA.differences.map((line) => element("p", { class: "warning" }, line)),
    DATA.differences.length ? null : element("p", { class: "note" }, "All rows of a model come from one device, one driver and the same versions of the libraries that they share."),
    element("p", { class: "note" }, `This page: Quantmill ${DATA.commit ?? "outside a checkout"}, metrics version ${DATA.versions.metrics_version}.`),
    rows.map(origin),
    element("details", {}, element("summary", {}, "The study's config, every default filled in"), element("pre", {}, JSON.stringify(DATA.config, null, 2))),
  ].flat().filter((part) => part !== null));
}
