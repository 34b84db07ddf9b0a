// The table: every column of results.csv, sorted, filtered, copied.

const PAGE = 100; // rows before a click shows all
const order = { column: null, direction: 1 };
let unfolded = false;

const BYTES = new Set(["size_bytes", "peak_memory_bytes"]);
const SHARES = new Set(["top1_agreement", "bandwidth_fraction", "delta_p_rms"]);
const title = (name) => DATA.columns.find((column) => column.name === name).title;
const named = (column) => ["model", "format", "run", "engine", "device", "nll_verdict", "interference"].includes(column.name);

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

/** What stands below a figure when only the main columns are shown. */
function below(row, name) {
  const range = (low, high, digits = 3) => (low === null ? [] : [`${figure(low, digits)} to ${figure(high, digits)}`]);
  if (name === "format") return [row["runs in"].slice(0, 2).filter(Boolean).join(", ") + (row["runs in"][2] ? `, ${row["runs in"][2]} thread${row["runs in"][2] > 1 ? "s" : ""}` : "")];
  if (name === "tokens_per_second") {
    const others = (row.modes ?? []).map((way) => `${way.mode}: ${figure(way.tokens_per_second)}${way.refused ? ", refused" : ""}`);
    return [...range(row.tokens_per_second_low, row.tokens_per_second_high), ...others, ...(disturbed(row) ? ["disturbed"] : [])];
  }
  if (name === "perplexity") return range(row.perplexity_low, row.perplexity_high, 4);
  if (name === "nll_difference" && row.ratio) return [row.format === DATA.reference ? "the reference" : `${row.nll_verdict}, ×${figure(row.ratio.ratio, 5)}`];
  if (name === "kld_mean") return row.above_noise_floor === false ? ["within the noise"] : [`p99 ${figure(row.kld_p99, 3)}`];
  if (name === "tpot_ms_p50") return [`p99 ${figure(row.tpot_ms_p99, 3)}`];
  if (name === "bandwidth_fraction") return [...(row["bandwidth disturbed"] ? ["a disturbed one"] : []), ...(row.joules_per_token === null ? [] : [`${figure(row.joules_per_token, 3)} J/token`])];
  if (name === "pareto" && row["dominated by"].length) return [`by ${row["dominated by"].join(", ")}`];
  return [];
}

const hints = (row, name) =>
  name === "tokens_per_second" ? [...(row.interference ?? []), row.differs, ...(row.modes ?? []).map((way) => way.refused ?? way.differs)].filter(Boolean).join("; ") || null : null;

function cell(row, column, whole) {
  const value = row[column.name];
  if (value === null) {
    const why = row.missing[column.name] ?? "not measured";
    return element("td", { class: "empty" }, element("span", { title: why, tabindex: 0, role: "note", "aria-label": why }, /^failed/.test(why) ? "failed" : "–"));
  }
  const notes = whole ? [] : below(row, column.name).map((line) => element("small", {}, line));
  if (column.name === "format") notes.push(...row.warnings.map((line) => element("small", { class: "warning" }, line)));
  const hint = hints(row, column.name);
  if (hint) notes.push(element("small", { class: "hint", title: hint, tabindex: 0, role: "note", "aria-label": hint }, "why"));
  return element("td", { class: named(column) ? "name" : null }, text(column.name, value), notes);
}

const shownColumns = () => (find("all-columns").checked ? DATA.columns
  : DATA.columns.filter((column) => column.shown && ROWS.some((row) => row[column.name] !== null)).sort((a, b) => a.shown - b.shown));

/** The rows that the filter leaves, in the order that was chosen. */
function shownRows() {
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = ROWS.filter((row) => {
    const haystack = [row.model, row.format, row.engine, row.device ?? "", ...row["runs in"].filter(Boolean)].join(" ").toLowerCase();
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

function showTable() {
  const [columns, rows, whole] = [shownColumns(), shownRows(), find("all-columns").checked];
  const heads = columns.map((column) => {
    const sorted = order.column === column.name ? (order.direction > 0 ? "ascending" : "descending") : "none";
    const arrow = { ascending: " ▲", descending: " ▼", none: "" }[sorted];
    const button = element("button", { type: "button", id: `sort-${column.name}`, title: column.text, onclick: () => sortBy(column.name) }, title(column.name) + arrow);
    const unit = column.unit && !BYTES.has(column.name) ? element("small", {}, column.unit) : null;
    return element("th", { scope: "col", "aria-sort": sorted, class: named(column) ? "name" : null }, button, unit);
  });
  const lines = (unfolded ? rows : rows.slice(0, PAGE)).map((row) => element("tr", { class: row.pareto ? "front" : null }, columns.map((column) => cell(row, column, whole))));
  find("table").replaceChildren(element("thead", {}, element("tr", {}, heads)), element("tbody", {}, lines));
  const more = lines.length < rows.length ? element("button", { type: "button", onclick: () => { unfolded = true; showTable(); } }, `show all ${rows.length}`) : null;
  find("table-note").replaceChildren(...[`${rows.length} of ${ROWS.length} rows. Intervals are of 95%. Every column says what it is when the pointer rests on it. `, more].filter(Boolean));
}

const markdownCell = (value) => value.replaceAll("|", "\\|").replaceAll("\n", " ");
const csvCell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

/** What the table shows, as Markdown with figures as they are read, or as CSV with figures as they are. */
function asText(kind) {
  const [columns, rows] = [shownColumns(), shownRows()];
  if (kind === "csv") {
    const raw = (value) => (value === null ? "" : Array.isArray(value) ? value.join("; ") || "none" : String(value));
    return [columns.map((column) => column.name), ...rows.map((row) => columns.map((column) => raw(row[column.name])))].map((line) => line.map(csvCell).join(",")).join("\n") + "\n";
  }
  const heads = columns.map((column) => title(column.name) + (column.unit && !BYTES.has(column.name) ? `, ${column.unit}` : ""));
  const lines = rows.map((row) => columns.map((column) => (text(column.name, row[column.name]) || "–") + (column.name === "tokens_per_second" && disturbed(row) ? ", disturbed" : "")));
  return [heads, columns.map((column) => (named(column) ? "---" : "---:")), ...lines].map((line) => `| ${line.map(markdownCell).join(" | ")} |`).join("\n") + "\n";
}

async function copy(kind) {
  try {
    await navigator.clipboard.writeText(asText(kind));
    find("copied").textContent = `copied ${shownRows().length} rows`;
  } catch (error) {
    find("copied").textContent = `this browser does not let a page copy: ${error.message}`;
  }
}
