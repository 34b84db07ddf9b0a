// The table: every column of results.csv, sorted, filtered, copied.

const PAGE = 100; // rows before a click shows all
const order = { column: null, direction: 1 };
let unfolded = false;

const BYTES = new Set(DATA.columns.filter((column) => column.unit === "B").map((column) => column.name));
const SHARES = new Set(["bandwidth_fraction", ...DATA.columns.filter((column) => column.share).map((column) => column.name)]);
const TASKS = DATA.columns.filter((column) => /^task_.*_score$/.test(column.name)).map((column) => column.name.slice(0, -6));
const BETTER = { higher: "More is better.", lower: "Less is better." };
const FOLDED = new Set(["model", "run", "engine", "nll_difference", "group_size"]); // what stands in another column's cell
// the second line of a cell, which the schema's description of the column does not explain
const BELOW = {
  format: "Below it: the engine, its arithmetic, how it decodes and its threads. A click on \"warning\" shows what else to know.",
  perplexity: "Below it: how much more than the reference's, with the 95% interval of the difference, paired by windows of the same text. A perplexity's interval alone, under \"all columns\", says how it would move with another text; that is common to all formats.",
  tokens_per_second: "Below it: its 95% interval; a click shows what disturbed it, and the other ways to decode that were tried.",
  deployed_tokens_per_second: "Below it: its 95% interval, where that is not the one of tokens/s.",
  kld_mean: "Below it: the 99th percentile.",
  tpot_ms_p50: "Below it: the 99th percentile.",
  bits_per_weight: "Below it: how many weights share a scale, where that was chosen.",
  memory_at_bytes: "Below it: how much of it is the cache of keys and values.",
};
const CARDS = matchMedia("(max-width: 40rem)"); // a card a row where a table would have to be moved sideways

const named = (column) => ["model", "format", "run", "engine", "device", "nll_verdict", "interference"].includes(column.name) || /^task_.*_verdict$/.test(column.name);
const unitOf = (column) => (column.unit && !BYTES.has(column.name) && column.name !== "tokens_per_second" ? column.unit : "");
const TASK_HELP = "Below it: lm-evaluation-harness' standard error; how many answers flipped either way against the reference; and the 95% interval of the difference, paired by documents.";
const helpWith = (column) => help(column.title, [column.text, BETTER[column.better], /^task_.*_score$/.test(column.name) ? TASK_HELP : BELOW[column.name]].filter(Boolean).map((line) => element("p", {}, line)));

/** A figure as text. */
function text(name, value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.join("; ") || "none";
  if (name === "pareto") return value ? "front" : "dominated";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (BYTES.has(name)) return size(value);
  return SHARES.has(name) ? percent(value) : figure(value, name.startsWith("perplexity") ? 4 : 3);
}

/** What made a row's figures, in a line below its name. */
function about(row) {
  const [compute, mode, threads] = row["runs in"];
  const engine = OWN_ENGINES[row.engine] ? `${row.engine} (${OWN_ENGINES[row.engine]})` : row.engine;
  const how = [engine, compute, mode, threads && `${threads} thread${threads > 1 ? "s" : ""}`].filter(Boolean).join(", ");
  return MODELS.length > 1 ? `${row.model}: ${how}` : how;
}

/** A perplexity beside the reference's, and the paired 95% interval of the ratio. */
function paired(row) {
  if (row.reference) return ["the reference"];
  const { ratio, low, high } = row.ratio;
  const tie = row.above_noise_floor === false ? "within the noise" : "a tie";
  return [row.nll_verdict === "tie" ? tie : signedPercent(ratio), `${signedPercent(low)} to ${signedPercent(high)}`];
}

/** A task's score beside the reference's: its error, flips, and the interval of the difference. */
function beside(row, task) {
  const [error, flips, verdict, low, high] = ["stderr", "flips", "verdict", "difference_low", "difference_high"].map((name) => row[`${task}_${name}`]);
  const as = (value) => text(`${task}_score`, value);
  const said = verdict === "reference" ? ["the reference"] : verdict ? [verdict === "tie" ? "a tie" : verdict, `${as(low)} to ${as(high)}`] : [];
  return [...(error === null ? [] : [`± ${as(error)}`]), ...(flips === null || verdict === "reference" ? [] : [`${percent(flips)} flips`]), ...said];
}

/** What stands with a figure when only the main columns are shown: of several parts the first beside it, the others in a line below. */
function below(row, name) {
  const range = (low, high, digits = 3) => (low === null ? [] : [`${figure(low, digits)} to ${figure(high, digits)}`]);
  if (name === "tokens_per_second" || (name === "deployed_tokens_per_second" && row[name] !== row.tokens_per_second)) return range(row[`${name}_low`], row[`${name}_high`]);
  if (name === "perplexity") return row.ratio ? paired(row) : range(row.perplexity_low, row.perplexity_high, 4);
  if (name === "kld_mean") return row.above_noise_floor === false ? ["within the noise"] : [`p99 ${figure(row.kld_p99, 3)}`];
  if (name === "tpot_ms_p50") return [`p99 ${figure(row.tpot_ms_p99, 3)}`];
  if (name === "memory_at_bytes") return [`${size(row.memory_at_kv_cache_bytes)} of cache`];
  if (name === "bits_per_weight" && row.group_size) return [`groups of ${row.group_size}`];
  if (name === "bandwidth_fraction") return [...(row["bandwidth disturbed"] ? ["a disturbed one"] : []), ...(row.joules_per_token === null ? [] : [`${figure(row.joules_per_token, 3)} J/token`])];
  const task = TASKS.find((each) => `${each}_score` === name);
  if (task) return beside(row, task);
  if (name === "pareto" && row["dominated by"].length === 1) return [`by ${row["dominated by"][0]}`];
  return [];
}

/** A word that a click explains, and the explanation; null where there is nothing to explain. */
function hint(row, name) {
  if (name === "format" && row.warnings.length) return ["warning", row.warnings.join("; ")];
  if (name === "pareto" && row["dominated by"].length > 1) return [`by ${row["dominated by"].length} rows`, row["dominated by"].join(", ")];
  if (name !== "tokens_per_second") return null;
  const ways = (row.modes ?? []).map((way) => `${way.mode}: ${figure(way.tokens_per_second)} tokens/s${way.refused ? `, refused: ${way.refused}` : way.differs ? `; ${way.differs}` : ""}`);
  const told = [row.own && `Quantmill's own speed: ${row.own}`, ...(row.interference ?? []), row.differs, ...ways].filter(Boolean);
  return told.length ? [disturbed(row) ? "disturbed" : row.own ? "own" : "why", told.join("; ")] : null;
}

/** What a cell says: its figure, or by a click why there is none, and what qualifies it. */
function content(row, column, whole) {
  const subject = `${column.title} of ${row.id}`;
  const value = column.name === "format" ? row.label : row[column.name];
  if (value === null) {
    const why = row.missing[column.name] ?? "not measured";
    return reason(why.startsWith("still to come") ? "not yet" : /^failed/.test(why) ? "failed" : "–", subject, why);
  }
  const found = hint(row, column.name);
  const asked = found ? reason(found[0], subject, found[1]) : null;
  if (column.name === "format") return [element("span", {}, value), asked && [" ", asked], element("small", {}, question(about(row), `What ran ${row.id}?`, about(row), "about"))];
  const lines = whole ? [] : below(row, column.name);
  const beside = lines.length > 1 ? element("small", { class: "beside" }, ` ${lines[0]}`) : null;
  const notes = lines.slice(beside ? 1 : 0).join(", ");
  return [element("span", {}, text(column.name, value)), beside, notes || asked ? element("small", {}, notes, notes && asked ? " " : "", asked) : null];
}

/** A cell: a row's name, or a figure; on a card with its column's title. */
function cell(row, column, whole) {
  if (column.name === "format") return element("th", { scope: "row", class: "name", role: CARDS.matches ? "rowheader" : null }, content(row, column, whole));
  const inside = content(row, column, whole);
  const title = CARDS.matches ? element("div", { class: "title" }, column.title, unitOf(column) ? `, ${unitOf(column)}` : "", " ", helpWith(column)) : null;
  return element("td", { class: [named(column) ? "name" : "", row[column.name] === null ? "empty" : ""].join(" ").trim() || null, role: CARDS.matches ? "cell" : null }, title, inside);
}

/** The columns that were asked for: every one in the order of results.csv, or what a reader compares first. */
function askedColumns() {
  if (find("all-columns").checked) return DATA.columns;
  const same = ROWS.every((row) => row.rate === row.tokens_per_second); // then one of the two columns says it all
  return DATA.columns.filter((column) => column.shown && ROWS.some((row) => row[column.name] !== null) && !(same && column.name === "deployed_tokens_per_second")).sort((a, b) => a.shown - b.shown);
}

/** Those of the table: the row's name first, and no column for what stands in another's cell, nor for the one model. */
function shownColumns() {
  const whole = find("all-columns").checked;
  const rest = askedColumns().filter((column) => column.name !== "format" && !(whole ? column.name === "model" && MODELS.length === 1 : FOLDED.has(column.name)));
  return [DATA.columns.find((column) => column.name === "format"), ...rest];
}

/** The rows that the filter leaves, in the order that was chosen. */
function shownRows() {
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = ROWS.filter((row) => {
    const haystack = [row.model, row.label, row.engine, row.device ?? "", ...row["runs in"].filter(Boolean)].join(" ").toLowerCase();
    return words.every((word) => haystack.includes(word)) && (!find("front-only").checked || row.pareto);
  });
  if (order.column) rows.sort((a, b) => compare(a[order.column], b[order.column], order.direction) || a.order - b.order);
  return rows;
}

function sortBy(name) {
  order.direction = order.column === name ? -order.direction : 1;
  order.column = name;
  showTable();
  find(`sort-${name}`).focus();
}

/** The heading of a column: its title, which sorts, its unit, and what it means. */
function heading(column) {
  const sorted = order.column === column.name ? (order.direction > 0 ? "ascending" : "descending") : "none";
  const arrow = { ascending: " ▲", descending: " ▼", none: "" }[sorted];
  const button = element("button", { type: "button", class: "sort", id: `sort-${column.name}`, onclick: () => sortBy(column.name) }, column.title.split(/(?<=\/)/).flatMap((part, i) => (i ? [element("wbr"), part] : part)), arrow);
  const unit = unitOf(column) ? element("small", {}, unitOf(column)) : null;
  return element("th", { scope: "col", "aria-sort": sorted, class: named(column) ? "name" : null }, button, " ", helpWith(column), unit);
}

/** Say which columns lie beyond the table's right edge. */
function hintAtWidth() {
  const scroll = find("scroll");
  const edge = scroll.getBoundingClientRect().right;
  const beyond = CARDS.matches ? [] : [...scroll.querySelectorAll("thead th")].filter((head) => head.getBoundingClientRect().right > edge + 1);
  scroll.classList.toggle("more", beyond.length > 0);
  const note = find("width-note");
  note.hidden = CARDS.matches || scroll.scrollWidth <= scroll.clientWidth;
  note.style.visibility = beyond.length ? "visible" : "hidden"; // its room stays: nothing moves under the pointer
  note.textContent = `${beyond.length} more column${beyond.length > 1 ? "s" : ""} to the right: move the table sideways to see ${beyond.length > 1 ? "them" : "it"}.`;
}

function showTable() {
  closeHelp();
  const [columns, rows, whole] = [shownColumns(), shownRows(), find("all-columns").checked];
  const cards = CARDS.matches;
  const shown = unfolded ? rows : rows.slice(0, PAGE);
  const lines = shown.map((row) => element("tr", { class: row.pareto ? "front" : null, role: cards ? "row" : null }, columns.map((column) => cell(row, column, whole))));
  find("table").classList.toggle("cards", cards);
  find("sort-label").hidden = !cards;
  find("table").replaceChildren(...[cards ? null : element("thead", {}, element("tr", {}, columns.map(heading))), element("tbody", { role: cards ? "rowgroup" : null }, lines)].filter(Boolean));
  const more = lines.length < rows.length ? element("button", { type: "button", onclick: () => { unfolded = true; showTable(); } }, `show all ${rows.length}`) : null;
  find("notes").replaceChildren(...DATA.notes.map((line) => element("p", { class: "note" }, line)));
  find("table-note").replaceChildren(...[`${rows.length} of ${ROWS.length} rows. Intervals are of 95%. `, more].filter(Boolean));
  hintAtWidth();
}

const markdownCell = (value) => value.replaceAll("|", "\\|").replaceAll("\n", " ");
const csvCell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

/** What the table shows, as Markdown with figures as they are read, or as CSV with figures as they are. */
function asText(kind) {
  const [columns, rows] = [askedColumns(), shownRows()];
  if (kind === "csv") {
    const raw = (value) => (value === null ? "" : Array.isArray(value) ? value.join("; ") || "none" : String(value));
    return [columns.map((column) => column.name), ...rows.map((row) => columns.map((column) => raw(row[column.name])))].map((line) => line.map(csvCell).join(",")).join("\n") + "\n";
  }
  const heads = columns.map((column) => column.title + (unitOf(column) ? `, ${unitOf(column)}` : ""));
  const lines = rows.map((row) => columns.map((column) => ((column.name === "format" ? row.label : text(column.name, row[column.name])) || "–") + (column.name === "tokens_per_second" && disturbed(row) ? ", disturbed" : "")));
  return [heads, columns.map((column) => (named(column) ? "---" : "---:")), ...lines].map((line) => `| ${line.map(markdownCell).join(" | ")} |`).join("\n") + "\n";
}
