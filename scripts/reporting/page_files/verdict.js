// Which format? A sentence a model, for the loss that the reader allows.

const VERDICTS = 8; // models before a click shows all

/** Whether two rows' speeds cannot be told apart: their intervals overlap. */
function asFast(one, other) {
  return one.tokens_per_second_low <= other.tokens_per_second_high && other.tokens_per_second_low <= one.tokens_per_second_high;
}

/** What a row loses, in words. */
function loss(row) {
  if (row.format === DATA.reference) return "the reference itself";
  if (row.above_noise_floor === false) return "its loss is within the noise of the arithmetic";
  if (row.ratio.tie) return "a tie with the reference's perplexity";
  return `perplexity ${signedPercent(row.ratio.ratio)}, 95% interval ${signedPercent(row.ratio.low)} to ${signedPercent(row.ratio.high)}`;
}

const names = (rows) => rows.map((row) => row.format).join(", ");
const best = (rows, better) => rows.reduce((one, other) => (one === null || better(other, one) ? other : one), null);

/** The sentences of one model, those of each device apart: strings, or elements. */
function sentences(model, budget) {
  const rows = ROWS.filter((row) => row.model === model && row.tokens_per_second !== null);
  if (!rows.length) return ["Nothing was measured; the table says why."];
  const devices = [...new Set(rows.map((row) => row.device))];
  if (devices.length === 1) return ofDevice(rows, budget);
  return devices.flatMap((device) => [`On ${device}:`, ...ofDevice(rows.filter((row) => row.device === device), budget)]);
}

/** The sentences of one model's rows that were measured on one device. */
function ofDevice(rows, budget) {
  const fastest = (several) => best(several, (a, b) => a.tokens_per_second > b.tokens_per_second);
  const scored = rows.filter((row) => row.ratio);
  if (!scored.length) {
    const first = fastest(rows);
    const why = first.missing.perplexity ?? "there is no reference to compare with";
    return [`${first.format} is the fastest, ${figure(first.tokens_per_second)} tokens/s. Nothing is known of its quality (${why}).`];
  }
  const within = scored.filter((row) => row.ratio.ratio <= 1 + budget + 1e-12);
  const found = [];
  if (!within.length) return [`No format is within ${percent(budget)} of ${DATA.reference}'s perplexity.`];
  const first = fastest(within);
  const base = rows.find((row) => row.format === DATA.reference);
  const gain = base && base !== first ? `, ${figure(first.tokens_per_second / base.tokens_per_second, 3)} times ${DATA.reference}'s` : "";
  found.push([element("strong", {}, first.format), ` is the fastest: ${figure(first.tokens_per_second)} tokens/s${gain}; ${loss(first)}.`]);
  if (first.interference?.length) found.push("Its measurement was disturbed.");
  if (first.ratio.high > 1 + budget && !first.ratio.tie) found.push(`Its interval reaches beyond ${percent(budget)}.`);
  const equals = within.filter((row) => row !== first && asFast(row, first));
  if (equals.length) found.push(`As fast, as far as can be told: ${names(equals)}.`);
  const smallest = best(within, (a, b) => a.size_bytes < b.size_bytes);
  if (smallest !== first) found.push(`Smallest: ${smallest.format}, ${size(smallest.size_bytes)} (${loss(smallest)}).`);
  else found.push(`It is the smallest too, ${size(first.size_bytes)}.`);
  const front = scored.filter((row) => row.pareto);
  found.push(`The Pareto front, whatever the loss: ${names(front)}.`);
  return found;
}

function showVerdict(all = false) {
  const budget = Number(find("budget").value) / 100;
  find("budget-value").textContent = percent(budget);
  const shown = all ? MODELS : MODELS.slice(0, VERDICTS);
  const parts = shown.map((model) => [
    MODELS.length > 1 ? element("h3", {}, model) : null,
    element("ul", {}, sentences(model, budget).map((each) => element("li", {}, each))),
  ]);
  const failed = ROWS.filter((row) => row.tokens_per_second === null || (row.perplexity === null && /^failed/.test(row.missing.perplexity)));
  const said = failed.length ? element("p", { class: "warning" }, `Not complete: ${failed.slice(0, 12).map((row) => row.id).join(", ")}${failed.length > 12 ? ", …" : ""} failed. The table says why.`) : null;
  const more = shown.length < MODELS.length ? element("button", { type: "button", onclick: () => showVerdict(true) }, `all ${MODELS.length} models`) : null;
  find("verdict").replaceChildren(...[said, parts, more].flat(2).filter((part) => part !== null));
}
