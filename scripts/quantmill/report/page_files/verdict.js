// Which format? A few sentences a model, for the loss that the reader allows.

const VERDICTS = 8; // models before a click shows all

const names = (rows) => rows.map((row) => row.label).join(", ");
const best = (rows, better) => rows.reduce((one, other) => (one === null || better(other, one) ? other : one), null);
/** A deployed speed; a disturbance only slows, so the lower end of a disturbed one is a lower bound. */
const speed = (row) => (disturbed(row) ? `at least ${figure(row.low)} tokens/s` : `${figure(row.rate)} tokens/s`);

/** Whether one row was faster than another beyond both intervals. */
const faster = (one, other) => one.low > other.high;

/** Whether a row's quality cannot be distinguished from the reference's. */
const tied = (row) => row.reference || row.above_noise_floor === false || row.ratio.tie;

/** Whether a row loses no more than the budget allows: a tie with the reference is within any. */
const within = (row, budget) => tied(row) || row.ratio.ratio <= 1 + budget + 1e-12;

let roomBytes = null; // what the reader's memory holds; null if any will do
/** The texts whose memory was counted, in words. */
const ofUsers = () => `${MEMORY.context.toLocaleString("en")} tokens and ${MEMORY.users.toLocaleString("en")} user${MEMORY.users > 1 ? "s" : ""}`;
/** Whether a row is known to fit the reader's memory. */
const fits = (row) => roomBytes === null || (row.memory_at_bytes !== null && row.memory_at_bytes <= roomBytes);
/** Words that follow a limit of loss. */
const andRoom = () => (roomBytes === null ? "" : ` and ${size(roomBytes)}`);

/** What a row takes with the study's texts; null where that is not known, or was not asked for. */
function takes(row) {
  if (!MEMORY || !row || row.memory_at_bytes === null) return null;
  const parts = `${size(row.memory_at_weights_bytes)} of weights, ${size(row.memory_at_kv_cache_bytes)} of keys and values`;
  const needed = `${size(row.memory_at_bytes)} (${parts})`;
  return roomBytes === null ? `${row.label} takes ${needed} with ${ofUsers()}.` : `${row.label} fits ${size(roomBytes)} with ${ofUsers()}: it takes ${needed}.`;
}

/** Which rows are left out because they do not fit, or are not known to. */
function unfitting(rows) {
  const [known, unknown] = [rows.filter((row) => row.memory_at_bytes !== null), rows.filter((row) => row.memory_at_bytes === null)];
  return [
    known.length ? `More than ${size(roomBytes)} with ${ofUsers()}: ${known.map((row) => `${row.label} (${size(row.memory_at_bytes)})`).join(", ")}.` : null,
    unknown.length ? `Whether ${unknown.length === 1 ? "it fits" : "they fit"} ${size(roomBytes)} is not known: ${unknown.map((row) => `${row.label} (${row.missing.memory_at_bytes})`).join(", ")}.` : null,
  ].filter(Boolean);
}

/** What a row loses, in words. */
function loss(row) {
  if (row.reference) return "the reference itself";
  if (row.above_noise_floor === false) return "its loss is within the noise of the arithmetic";
  const interval = `95% interval ${signedPercent(row.ratio.low)} to ${signedPercent(row.ratio.high)}`;
  return row.ratio.tie ? `a tie with ${DATA.reference}'s perplexity, ${interval}` : `perplexity ${signedPercent(row.ratio.ratio)}, ${interval}`;
}

/** The rows than which none was faster beyond the intervals; first the one to name: on the front, and undisturbed, if one is. */
function fastest(rows) {
  const group = rows.filter((row) => !rows.some((other) => faster(other, row)));
  const front = group.filter((row) => row.pareto === true);
  const known = (front.length ? front : group).filter((row) => !disturbed(row));
  const first = best(known.length ? known : front.length ? front : group, (a, b) => a.rate > b.rate);
  return [first, ...group.filter((row) => row !== first)];
}

/** A row's speed over the reference's; nothing where the reference is disturbed. Of a disturbed row, a lower bound. */
function gain(row, base, equals) {
  if (!base || base === row || disturbed(base) || equals.includes(base)) return "";
  if (!disturbed(row)) return `, ${figure(row.rate / base.rate, 3)} times ${DATA.reference}'s`;
  return row.low > base.high ? `, at least ${figure(row.low / base.high, 3)} times ${DATA.reference}'s` : "";
}

/** Why the table calls a row dominated that is named here. */
function explained(row, budget) {
  const rows = ROWS.filter((other) => other.model === row.model && other.device === row.device && other.ratio && other.rate !== null);
  const winners = rows.filter((other) => row["dominated by"].includes(other.label));
  if (!winners.length) return null;
  const other = winners.find((each) => within(each, budget) && fits(each)) ?? winners[0];
  const how = faster(other, row) ? "is faster and loses no more, as far as can be told" : "is as fast, as far as can be told, and loses less";
  const quicker = rows.filter((each) => within(each, budget) && fits(each) && faster(each, other));
  const but = !fits(other) ? `; but it is not known to fit ${size(roomBytes)}` : !within(other, budget) ? `; but it is not within ${percent(budget)}` : quicker.length ? `; but it is slower than ${names(quicker)}` : "";
  return `The table calls ${row.label} dominated: ${other.label} ${how}${but}.`;
}

/** The sentence on which of `rows` is the fastest, and those that qualify it. `where`: which rows these are, in words;
 *  `told`: what else to say of a row. Rows that are named join `named`. */
function speeds(rows, base, where, told, named) {
  const strong = (row) => element("strong", {}, row.label);
  const listed = (several) => several.map((row) => `${row.label} (${[speed(row), told(row)].filter(Boolean).join("; ")})`).join(", ");
  const ends = (row, equals = []) => [`: ${speed(row)}${gain(row, base, equals)}`, told(row) ? `; ${told(row)}.` : "."];
  if (rows.every(disturbed)) {
    for (const row of rows) named.add(row);
    if (rows.length > 1) return [`Measured${where}: ${listed(rows)}.`, "All their speeds were disturbed, so none is called the fastest."];
    return [[strong(rows[0]), ` is the only format${where}`, ...ends(rows[0])], "Its speed was disturbed."];
  }
  const [first, ...equals] = fastest(rows);
  const open = rows.filter((row) => disturbed(row) && row !== first && !equals.includes(row));
  for (const row of [first, ...equals, ...open]) named.add(row);
  const found = [];
  if (rows.length === 1) found.push([strong(first), ` is the only format${where}`, ...ends(first)]);
  else found.push([strong(first), ` is ${equals.length ? "among the fastest" : "the fastest"}${where && ` of those${where}`}${open.length ? ", as far as is known" : ""}`, ...ends(first, equals)]);
  if (equals.length) found.push(`As fast, as far as can be told: ${listed(equals)}.`);
  if (open.length) found.push(`Disturbed, and perhaps faster than measured: ${listed(open)}.`);
  return found;
}

/** The sentences of one model, those of each device apart: strings, or elements. */
function sentences(model, budget) {
  const every = ROWS.filter((row) => row.model === model);
  const unchecked = every.filter((row) => row.unchecked && (row.tokens_per_second !== null || row.ratio));
  const left = unchecked.length ? [`Not checked against ${unchecked.length === 1 ? "its" : "their"} own weights, so in no sentence here and on no front: ${unchecked.map((row) => `${row.label} (${row.unchecked})`).join(", ")}.`] : [];
  const all = every.filter((row) => !row.unchecked);
  const measured = all.filter((row) => row.tokens_per_second !== null || row.ratio);
  if (!measured.length && left.length) return left;
  const without = unfitting(measured.filter((row) => !fits(row)));
  if (measured.length && !measured.some(fits)) return [`Nothing is known to fit ${size(roomBytes)} with ${ofUsers()}.`, ...without, ...left];
  return [...checked(all.filter(fits), budget), ...without, ...left];
}

/** Those of a model's rows that were checked. */
function checked(all, budget) {
  const rows = all.filter((row) => row.rate !== null);
  const own = all.filter((row) => row.rate === null && row.own);
  const untimed = all.filter((row) => row.rate === null && row.ratio && row.size_bytes !== null);
  const left = own.length ? [`Not ranked, since no deployment has these speeds: ${own.map((row) => `${row.label} (${row.own})`).join(", ")}.`] : [];
  if (!rows.length && !untimed.length) return left.length ? left : ["Nothing was measured; the table says why."];
  if (!rows.length) return [own.length ? "No deployed speed was measured." : "No speed was measured; the table says why.", smallest([], untimed, null, budget, new Set()), ...left].filter((each) => each !== null);
  const devices = [...new Set(rows.map((row) => row.device))];
  if (devices.length === 1) return [...ofDevice(rows, untimed, budget), ...left];
  return [...devices.flatMap((device) => [`On ${device}:`, ...ofDevice(rows.filter((row) => row.device === device), [], budget)]), ...left];
}

/** The sentences of one model's rows whose speed was measured on one device; `untimed`: those of known quality alone. */
function ofDevice(rows, untimed, budget) {
  const named = new Set();
  const found = rows.some((row) => row.ratio) ? judged(rows, untimed, budget, named) : unjudged(rows, named);
  const own = [...named].filter((row) => OWN_ENGINES[row.engine]);
  if (own.length) found.push(`${names(own)}: ${KERNELS}.`);
  const warnings = [...named].filter((row) => row.warnings.length);
  return [...found, ...warnings.map((row) => element("span", { class: "warning" }, `Warning, ${row.label}: ${row.warnings.join("; ")}.`))];
}

/** What can be said where nothing is known of the quality. */
function unjudged(rows, named) {
  const why = rows.map((row) => row.missing.perplexity).find(Boolean) ?? `there is no ${DATA.reference} to compare with`;
  const first = rows.every(disturbed) ? null : fastest(rows)[0];
  const found = speeds(rows, null, rows.length === 1 ? " that was measured" : "", () => "", named);
  return [...found, takes(first), `Nothing is known of the quality (${why}).`].filter((each) => each !== null);
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
    found.push(`No format${roomBytes === null ? "" : ` that fits ${size(roomBytes)}`} is ${limit} of ${DATA.reference}'s perplexity. The closest is ${closest.label}: ${loss(closest)}.`);
  } else {
    const base = ROWS.find((row) => row.reference && row.model === rows[0].model && row.device === rows[0].device && row.rate !== null && !row.unchecked);
    const where = rows.length === 1 ? ` that was measured${roomBytes === null ? "" : ` and fits ${size(roomBytes)}`}` : ` ${limit}${andRoom()}`;
    found.push(...speeds(allowed, base, where, loss, named));
    const leading = allowed.every(disturbed) ? [] : fastest(allowed);
    [first = null] = leading;
    if (first && !tied(first) && first.ratio.high > 1 + budget) found.push(`Its interval reaches beyond ${percent(budget)}.`);
    found.push(takes(first));
    for (const row of leading) found.push(explained(row, budget));
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
  const limit = `within ${percent(budget)}${andRoom()}`;
  if (first?.size_bytes === least.size_bytes) {
    const equal = rows.filter((row) => row !== first && row.size_bytes === least.size_bytes);
    return `It is also the smallest of those ${limit}, ${size(least.size_bytes)}${equal.length ? `, as small as ${names(equal)}` : ""}.`;
  }
  named.add(least);
  const unknown = untimed.includes(least) ? `; its ${least.own ? "deployed " : ""}speed was not measured` : "";
  return `The smallest of those ${limit}: ${least.label}, ${size(least.size_bytes)} (${loss(least)}${unknown}).`;
}

/** The Pareto front, where there is more than one row to be on it. */
function theFront(scored, named) {
  if (scored.length < 2) return null;
  const [front, open] = [scored.filter((row) => row.pareto), scored.filter((row) => row.pareto === null)];
  if (!front.length && scored.length > open.length) return null; // what dominates these does not fit
  if (!front.length) return "There is no Pareto front, since every speed was disturbed.";
  for (const row of front) named.add(row);
  return `The Pareto front, whatever the loss${roomBytes === null ? "" : `, of what fits ${size(roomBytes)}`}: ${names(front)}.${open.length ? ` Open, since disturbed: ${names(open)}.` : ""}`;
}

function showVerdict(all = false) {
  const budget = Number(find("budget").value) / 100;
  find("budget-value").textContent = percent(budget);
  const room = MEMORY ? Number(find("memory-budget").value) : 0;
  roomBytes = room > 0 ? room * 1e9 : null;
  const shown = all ? MODELS : MODELS.slice(0, VERDICTS);
  const parts = shown.map((model) => [
    MODELS.length > 1 ? element("h3", {}, model) : null,
    element("ul", {}, [...sentences(model, budget), mostUsers(model, budget)].filter((each) => each !== null).map((each) => element("li", {}, each))),
  ]);
  const more = shown.length < MODELS.length ? element("button", { type: "button", onclick: () => showVerdict(true) }, `all ${MODELS.length} models`) : null;
  find("verdict").replaceChildren(...[parts, more].flat(2).filter((part) => part !== null));
}
