// Which format? A few sentences a model, for the loss that the reader allows.

const VERDICTS = 8; // models before a click shows all

const names = (rows) => rows.map((row) => row.label).join(", ");
const best = (rows, better) => rows.reduce((one, other) => (one === null || better(other, one) ? other : one), null);
const speed = (row) => `${figure(row.tokens_per_second)} tokens/s`;

/** Whether one row is faster than another beyond both intervals. */
const faster = (one, other) => one.tokens_per_second_low > other.tokens_per_second_high;

/** Whether a row's quality cannot be told from the reference's. */
const tied = (row) => row.reference || row.above_noise_floor === false || row.ratio.tie;

/** Whether a row loses no more than the budget allows: a tie with the reference is within any. */
const within = (row, budget) => tied(row) || row.ratio.ratio <= 1 + budget + 1e-12;

/** What a row loses, in words. */
function loss(row) {
  if (row.reference) return "the reference itself";
  if (row.above_noise_floor === false) return "its loss is within the noise of the arithmetic";
  const interval = `95% interval ${signedPercent(row.ratio.low)} to ${signedPercent(row.ratio.high)}`;
  return row.ratio.tie ? `a tie with ${DATA.reference}'s perplexity, ${interval}` : `perplexity ${signedPercent(row.ratio.ratio)}, ${interval}`;
}

/** The rows of which none is slower than any other beyond the intervals, the one to name first: on the front if one is. */
function fastest(rows) {
  const group = rows.filter((row) => !rows.some((other) => faster(other, row)));
  const front = group.filter((row) => row.pareto !== false);
  const first = best(front.length ? front : group, (a, b) => a.tokens_per_second > b.tokens_per_second);
  return [first, ...group.filter((row) => row !== first)];
}

/** How a row's speed stands beside the reference's; nothing where either is disturbed. */
function gain(row, base, equals) {
  if (!base || base === row || disturbed(base) || disturbed(row) || equals.includes(base)) return "";
  return `, ${figure(row.tokens_per_second / base.tokens_per_second, 3)} times ${DATA.reference}'s`;
}

/** Why the table calls a row dominated that is named here. */
function explained(row, rows, budget) {
  const winners = rows.filter((other) => row["dominated by"].includes(other.label));
  if (!winners.length) return null;
  const other = winners.find((each) => within(each, budget)) ?? winners[0];
  const how = faster(other, row) ? "is faster and loses no more, as far as can be told" : "is as fast, as far as can be told, and loses less";
  const quicker = rows.filter((each) => !disturbed(each) && within(each, budget) && faster(each, other));
  const but = !within(other, budget) ? `; but it is not within ${percent(budget)}` : quicker.length ? `; but it is slower than ${names(quicker)}` : "";
  return `The table calls ${row.label} dominated: ${other.label} ${how}${but}.`;
}

/** The sentence on which of `rows` is the fastest, and those that qualify it. `where`: which rows these are, in words;
 *  `told`: what else to say of a row. Rows that are named join `named`. */
function speeds(rows, base, where, told, named) {
  const [quiet, loud] = [rows.filter((row) => !disturbed(row)), rows.filter(disturbed)];
  const strong = (row) => element("strong", {}, row.label);
  const listed = (several) => several.map((row) => `${row.label} (${[speed(row), told(row)].filter(Boolean).join("; ")})`).join(", ");
  const ends = (row, equals = []) => [`: ${speed(row)}${gain(row, base, equals)}`, told(row) ? `; ${told(row)}.` : "."];
  for (const row of loud) named.add(row);
  if (!quiet.length) {
    const whose = rows.length === 1 ? "Its speed was" : "All their speeds were";
    const heads = rows.length === 1 ? [strong(rows[0]), ` is the only format${where}`, ...ends(rows[0])] : [`Measured${where}: ${listed(rows)}.`];
    return [heads, `${whose} disturbed${rows.length > 1 ? ", so none is called the fastest" : ""}.`];
  }
  const [first, ...equals] = fastest(quiet);
  named.add(first);
  for (const row of equals) named.add(row);
  const found = [];
  const undisturbed = loud.length ? " whose speed was not disturbed" : "";
  if (quiet.length === 1) found.push([strong(first), ` is the only format${where}${undisturbed}`, ...ends(first)]);
  else found.push([strong(first), ` is ${equals.length ? "among the fastest" : "the fastest"}${loud.length ? ` of the ${quiet.length} formats${where}${undisturbed}` : where && ` of those${where}`}`, ...ends(first, equals)]);
  if (equals.length) found.push(`As fast, as far as can be told: ${listed(equals)}.`);
  if (loud.length) found.push(`Disturbed while measured, so not compared: ${listed(loud)}.`);
  return found;
}

/** The sentences of one model, those of each device apart: strings, or elements. */
function sentences(model, budget) {
  const every = ROWS.filter((row) => row.model === model);
  const unchecked = every.filter((row) => row.unchecked && (row.tokens_per_second !== null || row.ratio));
  const left = unchecked.length ? [`Not checked against ${unchecked.length === 1 ? "its" : "their"} own weights, so in no sentence here and on no front: ${unchecked.map((row) => `${row.label} (${row.unchecked})`).join(", ")}.`] : [];
  const all = every.filter((row) => !row.unchecked);
  if (!all.some((row) => row.tokens_per_second !== null || row.ratio) && left.length) return left;
  return [...checked(all, budget), ...left];
}

/** Those of a model's rows that were checked. */
function checked(all, budget) {
  const rows = all.filter((row) => row.tokens_per_second !== null);
  const untimed = all.filter((row) => row.tokens_per_second === null && row.ratio && row.size_bytes !== null);
  if (!rows.length && !untimed.length) return ["Nothing was measured; the table says why."];
  if (!rows.length) return ["No speed was measured; the table says why.", smallest([], untimed, null, budget, new Set())].filter((each) => each !== null);
  const devices = [...new Set(rows.map((row) => row.device))];
  if (devices.length === 1) return ofDevice(rows, untimed, budget);
  return devices.flatMap((device) => [`On ${device}:`, ...ofDevice(rows.filter((row) => row.device === device), [], budget)]);
}

/** The sentences of one model's rows whose speed was measured on one device; `untimed`: those of known quality alone. */
function ofDevice(rows, untimed, budget) {
  const named = new Set();
  const found = rows.some((row) => row.ratio) ? judged(rows, untimed, budget, named) : unjudged(rows, named);
  const own = [...named].filter((row) => OWN_ENGINES[row.engine]);
  const graphs = [...named].filter((row) => row["runs in"][1]?.startsWith("captured"));
  if (own.length) found.push(`${names(own)}: ${KERNELS}.`);
  if (graphs.length) found.push(`${names(graphs)}: ${graphs[0]["runs in"][1]}, not the engine as shipped.`);
  const warnings = [...named].filter((row) => row["verdict warnings"].length);
  return [...found, ...warnings.map((row) => element("span", { class: "warning" }, `Warning, ${row.label}: ${row["verdict warnings"].join("; ")}.`))];
}

/** What can be said where nothing is known of the quality. */
function unjudged(rows, named) {
  const why = rows.map((row) => row.missing.perplexity).find(Boolean) ?? `there is no ${DATA.reference} to compare with`;
  return [...speeds(rows, null, rows.length === 1 ? " that was measured" : "", () => "", named), `Nothing is known of the quality (${why}).`];
}

function judged(rows, untimed, budget, named) {
  const scored = rows.filter((row) => row.ratio);
  const allowed = scored.filter((row) => within(row, budget));
  const limit = `within ${percent(budget)}`;
  const found = [];
  let first = null;
  if (!allowed.length) {
    const closest = best(scored, (a, b) => a.ratio.ratio < b.ratio.ratio);
    named.add(closest);
    found.push(`No format is ${limit} of ${DATA.reference}'s perplexity. The closest is ${closest.label}: ${loss(closest)}.`);
  } else {
    const base = rows.find((row) => row.reference);
    const where = rows.length === 1 ? " that was measured" : ` ${limit}`;
    found.push(...speeds(allowed, base, where, loss, named));
    const quiet = allowed.filter((row) => !disturbed(row));
    if (quiet.length) [first] = fastest(quiet);
    if (first && !tied(first) && first.ratio.high > 1 + budget) found.push(`Its interval reaches beyond ${percent(budget)}.`);
    for (const row of quiet.length ? fastest(quiet) : []) found.push(explained(row, scored, budget));
  }
  found.push(smallest(allowed, untimed, first, budget, named));
  const unscored = rows.filter((row) => !row.ratio);
  if (unscored.length) found.push(`Nothing is known of the quality of ${names(unscored)}, so the sentences above leave ${unscored.length === 1 ? "it" : "them"} out.`);
  found.push(theFront(scored, named));
  return found.filter((each) => each !== null);
}

/** The smallest within the budget, of rows with a speed (`allowed`) and without; null where there is no choice. */
function smallest(allowed, untimed, first, budget, named) {
  const rows = [...allowed, ...untimed.filter((row) => within(row, budget))];
  if (!rows.length || (rows.length === 1 && allowed.length)) return null;
  const least = best(rows, (a, b) => a.size_bytes < b.size_bytes);
  const limit = `within ${percent(budget)}`;
  if (first?.size_bytes === least.size_bytes) {
    const equal = rows.filter((row) => row !== first && row.size_bytes === least.size_bytes);
    return `It is also the smallest of those ${limit}, ${size(least.size_bytes)}${equal.length ? `, as small as ${names(equal)}` : ""}.`;
  }
  named.add(least);
  const unknown = untimed.includes(least) ? "; its speed was not measured" : "";
  return `The smallest of those ${limit}: ${least.label}, ${size(least.size_bytes)} (${loss(least)}${unknown}).`;
}

/** The Pareto front, where there is more than one row to be on it. */
function theFront(scored, named) {
  const quiet = scored.filter((row) => !disturbed(row));
  if (scored.length < 2) return null;
  if (!quiet.length) return "There is no Pareto front, since every speed was disturbed.";
  if (quiet.length === 1) return `There is no Pareto front, since only ${names(quiet)} was not disturbed.`;
  const front = quiet.filter((row) => row.pareto);
  for (const row of front) named.add(row);
  return `The Pareto front${quiet.length < scored.length ? " of the rows that were not disturbed" : ""}, whatever the loss: ${names(front)}.`;
}

function showVerdict(all = false) {
  const budget = Number(find("budget").value) / 100;
  find("budget-value").textContent = percent(budget);
  const shown = all ? MODELS : MODELS.slice(0, VERDICTS);
  const parts = shown.map((model) => [
    MODELS.length > 1 ? element("h3", {}, model) : null,
    element("ul", {}, [...sentences(model, budget), mostUsers(model, budget)].filter((each) => each !== null).map((each) => element("li", {}, each))),
  ]);
  const more = shown.length < MODELS.length ? element("button", { type: "button", onclick: () => showVerdict(true) }, `all ${MODELS.length} models`) : null;
  find("verdict").replaceChildren(...[parts, more].flat(2).filter((part) => part !== null));
}
