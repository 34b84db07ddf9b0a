// Servers under load: which of them serves a number of users, plots of what users see, and the main columns of loads.csv.

const LOADS = (DATA.loads?.rows ?? []).map((values, i) => ({
  ...Object.fromEntries(DATA.loads.columns.map((column, place) => [column.name, values[place]])),
  missing: Object.fromEntries(Object.entries(DATA.loads.missing[i]).flatMap(([number, names]) => names.map((name) => [name, DATA.pool[number]]))),
  quantiles: DATA.loads.quantiles[i],
  trials: DATA.loads.trials[i],
  default: DATA.loads.defaults[i], // the row of its artifact
}));
const LIMITS = DATA.config.loads?.limits; // a page of several runs may have none
const SHORTEST = 0.01; // ms, on an axis that has no zero: tokens that came together
const serverOf = (row) => (MODELS.length > 1 ? `${row.model}/` : "") + `${row.format}@${row.run}`;
const LOAD_PLOTS = {
  throughput: ["What all users get, over what one of them sees", "Each point is a number of users at once; the line joins those of a server. The better corner is the upper right one."],
  slo_attainment: ["Who keeps the limits as requests arrive faster", "Requests arrive by chance (Poisson), whatever the server does. The share of those that met both limits of the config, for each rate that was tried."],
  ttft_ms: ["How long a user waits for the first token", "A curve that is further to the left is faster. The time counts from when the request was to be sent."],
  itl_ms: ["How long the pauses between tokens are", "The time between two events that brought tokens. Where a curve has a long foot, text comes in bursts."],
};

const keeps = (row, ttft, tpot) => row.ttft_ms_p90 <= ttft && row.tpot_ms_p90 <= tpot;

/** Why a load is not ranked: its artifact was not checked, its latencies changed while it lasted, or it was disturbed and
 *  not `kept` within the limits even so; null where it is. */
function unranked(row, kept) {
  const artifact = ROWS.find((each) => each.model === row.model && each.format === row.format && each.unchecked);
  if (artifact) return `its artifact was not checked against its own weights: ${artifact.unchecked}`;
  if (disturbed(row) && !kept) return `${row.load} was disturbed: ${row.interference.join("; ")}`;
  const note = row.notes.find((each) => each.startsWith("the load is not steady"));
  return note ? `${row.load}: ${note}` : null;
}

/** The servers that keep a number of users within limits, those that do not, and those of which nothing is known. That
 *  a load of more users fails says nothing of fewer. */
function serving(users, ttft, tpot) {
  const groups = { yes: [], no: [], unknown: [] };
  for (const server of new Set(LOADS.map(serverOf))) {
    const rows = LOADS.filter((row) => serverOf(row) === server && row.slots !== null);
    const asked = rows.filter((row) => row.slots >= users).sort((a, b) => a.slots - b.slots);
    const told = asked.filter((each) => each.ttft_ms_p90 !== null && each.tpot_ms_p90 !== null);
    const row = told.find((each) => !unranked(each, keeps(each, ttft, tpot)));
    const kept = row && keeps(row, ttft, tpot);
    if (!told.length) groups.unknown.push({ server, why: asked[0]?.missing.ttft_ms_p90 ?? `no load of ${users} users or more` });
    else if (!kept && row !== told[0]) groups.unknown.push({ server, why: unranked(told[0], false) });
    else groups[kept ? "yes" : "no"].push({ server, row });
  }
  const total = ({ row }) => row.output_tokens_per_second ?? 0;
  for (const name of ["yes", "no"]) groups[name].sort((a, b) => total(b) - total(a));
  return groups;
}

/** The sentence on which server keeps most users within the config's limits, of those whose loss and memory the reader allows or
 *  is unknown, and of loads whose latencies did not change while they lasted; null of a
 *  model without such loads, or if no config has limits. A server that returns no probabilities has the loss of its artifact. */
function mostUsers(model, budget) {
  const rows = LOADS.filter((row) => row.model === model && row.slots !== null && row.ttft_ms_p90 !== null && row.tpot_ms_p90 !== null);
  if (!rows.length || !LIMITS) return null;
  const { ttft_ms: ttft, tpot_ms: tpot } = LIMITS;
  const scored = (row) => [`${row.format}@${row.run}`, row.default].map((label) => ROWS.find((each) => each.model === model && each.label === label && each.ratio)).find(Boolean);
  const held = (row) => ROWS.find((each) => each.model === model && each.label === `${row.format}@${row.run}`);
  const allowed = rows.filter((row) => (!scored(row) || within(scored(row), budget)) && (!held(row) || fits(held(row))));
  const kept = allowed.filter((row) => keeps(row, ttft, tpot) && !unranked(row, true));
  const limits = `TTFT ${figure(ttft)} ms and TPOT ${figure(tpot)} ms${rows.some(scored) ? `, of those within ${percent(budget)}` : ""}`;
  if (!kept.length) return `No server keeps a user within ${limits}, as far as it was measured.`;
  const first = best(kept, (a, b) => a.slots > b.slots || (a.slots === b.slots && (a.output_tokens_per_second ?? 0) > (b.output_tokens_per_second ?? 0)));
  const together = first.output_tokens_per_second === null ? "" : `, ${atLeast(first)} tokens/s together`;
  const unknown = scored(first) ? "" : "; its quality was not measured";
  return [`Most users within ${limits}: `, element("strong", {}, `${first.format}@${first.run}`), `, ${first.slots} at once${together}${unknown}.`];
}

const atLeast = (row) => `${disturbed(row) ? "at least " : ""}${figure(row.output_tokens_per_second, 3)}`;

function serves({ server, row }) {
  const together = row.output_tokens_per_second === null ? "" : `${atLeast(row)} tokens/s together, `;
  return [element("strong", {}, server), ` (${row.load}): ${together}${disturbed(row) ? "at most " : ""}TTFT ${figure(row.ttft_ms_p90, 3)} ms, TPOT ${figure(row.tpot_ms_p90, 3)} ms for 90% of the requests`];
}

function showServers() {
  const [users, ttft, tpot] = ["users", "limit-ttft", "limit-tpot"].map((id) => (find(id).value === "" ? Infinity : Number(find(id).value)));
  const { yes, no, unknown } = serving(users, ttft, tpot);
  const lines = [];
  for (const [place, each] of yes.entries()) lines.push([place ? "So does " : `${users} user${users > 1 ? "s are" : " is"} served best within these limits by `, ...serves(each), "."]);
  if (!yes.length) lines.push(`No server keeps ${users} user${users > 1 ? "s" : ""} within these limits, as far as it was measured.`);
  for (const each of no) lines.push([...serves(each), `: beyond the limit of ${[each.row.ttft_ms_p90 > ttft ? "TTFT" : "", each.row.tpot_ms_p90 > tpot ? "TPOT" : ""].filter(Boolean).join(" and ")}.`]);
  for (const each of unknown) lines.push(`${each.server}: not known (${each.why}).`);
  find("servers").replaceChildren(element("ul", {}, lines.map((line) => element("li", {}, line))));
}

/** The rows of one plot, as its specification takes them. */
function drawnLoads(name) {
  const named = (row) => ({ model: row.model, cell: `${row.format}@${row.run}`, load: row.load });
  if (name === "throughput") return LOADS.filter((row) => row.slots !== null && row.output_tokens_per_second !== null && row.user_tokens_per_second !== null).map((row) => ({ ...row, ...named(row) }));
  if (name === "slo_attainment") {
    const rates = LOADS.filter((row) => row.rate !== null && row.slo_attainment !== null).map((row) => ({ ...named(row), rate: row.rate, slo_attainment: row.slo_attainment }));
    return [...rates, ...LOADS.flatMap((row) => (row.trials ?? []).map(([rate, slo_attainment]) => ({ ...named(row), rate, slo_attainment })))];
  }
  const chosen = find("distribution").value;
  return LOADS.filter((row) => row.load === chosen).flatMap((row) => (row.quantiles[name] ?? []).map((ms, i) => ({ ...named(row), ms: Math.max(ms, SHORTEST), quantile: DATA.loads.levels[i] })));
}

function showLoadPlots() {
  const model = find("load-model").value;
  const figures = Object.entries(LOAD_PLOTS).map(([name, [caption, what]]) => plotted(caption, what, model, DATA["load plots"][name], drawnLoads(name).filter((row) => row.model === model)));
  find("load-plots").replaceChildren(element("div", { class: "plots" }, figures));
}

/** A figure, or by a click why there is none. */
function loadCell(row, column) {
  const value = row[column.name];
  if (column.name === "run") return element("td", { class: "name" }, value);
  if (value === null) {
    const why = row.missing[column.name] ?? "not measured";
    const text = why.startsWith("still to come") ? "not yet" : /^failed/.test(why) ? "failed" : /^refused/.test(why) ? "refused" : "–";
    return element("td", { class: "empty" }, reason(text, `${column.title} of ${serverOf(row)}, ${row.load}`, why));
  }
  const shares = ["slo_attainment", "tokens_equal_solo"].includes(column.name);
  const [low, high] = [row[`${column.name}_low`], row[`${column.name}_high`]];
  const below = low === undefined || low === null ? null : element("small", {}, `${figure(low, 3)} to ${figure(high, 3)}`);
  const notes = column.name === "load" ? [...row.notes, ...row.interference] : [];
  return element("td", { class: typeof value === "string" ? "name" : null }, element("span", {}, typeof value === "string" ? value : shares ? percent(value) : figure(value, 3)), below, notes.length ? reason("notes", `${serverOf(row)}, ${row.load}`, notes.join("; ")) : null);
}

function showLoadTable() {
  const shown = DATA.loads.columns.filter((column) => column.shown && (column.name !== "model" || MODELS.length > 1) && LOADS.some((row) => row[column.name] !== null || row.missing[column.name]?.startsWith("refused"))).sort((a, b) => a.shown - b.shown);
  const head = shown.map((column) => element("th", { scope: "col" }, column.title, column.unit ? `, ${column.unit}` : "", " ", help(column.title, [column.text, BETTER[column.better]].filter(Boolean).map((line) => element("p", {}, line)))));
  const body = LOADS.map((row) => element("tr", {}, shown.map((column) => loadCell(row, column))));
  find("load-table").replaceChildren(element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
}

function showLoads() {
  find("loads-section").hidden = !LOADS.length;
  if (!LOADS.length) return;
  const option = (value) => element("option", { value }, value);
  const loads = [...new Set(LOADS.filter((row) => Object.keys(row.quantiles).length).map((row) => row.load))];
  find("distribution").append(...loads.map(option));
  find("load-model").replaceChildren(...[...new Set(LOADS.map((row) => row.model))].map(option));
  find("load-model-label").hidden = MODELS.length === 1;
  find("distribution-label").hidden = loads.length < 2;
  find("users").value = Math.max(1, ...LOADS.map((row) => row.slots ?? 1));
  find("limit-ttft").value = LIMITS?.ttft_ms ?? "";
  find("limit-tpot").value = LIMITS?.tpot_ms ?? "";
  for (const id of ["users", "limit-ttft", "limit-tpot"]) find(id).addEventListener("input", showServers);
  for (const id of ["distribution", "load-model"]) find(id).addEventListener("change", showLoadPlots);
  showServers();
  showLoadPlots();
  showLoadTable();
}
