"use strict";
// What every part of the page uses: the data, elements that hold text alone, and numbers as people read them.

const DATA = JSON.parse(document.getElementById("data").textContent);
const ROWS = DATA.rows.map((row, order) => {
  const figures = Object.fromEntries(DATA.columns.map((column, i) => [column.name, row.values[i]]));
  const missing = {};
  for (const [number, names] of Object.entries(row.missing)) for (const name of names) missing[name] = DATA.pool[number];
  const plot = Object.fromEntries(DATA.plotted.map((name, i) => [name, row.plot[i]]));
  const [rate, low, high] = ["", "_low", "_high"].map((end) => figures[`deployed_tokens_per_second${end}`]);
  return { ...row, ...figures, rate, low, high, perplexity_loss: plot.perplexity_loss, plot, missing, order, id: `${figures.model}/${row.label}`, reference: row.label === DATA.reference };
});
const MODELS = [...new Set(ROWS.map((row) => row.model))];
// speeds that are not another program's
const KERNELS = "Quantmill's own kernels, not MLC-LLM";
const OWN_ENGINES = { "quantmill-tvm": KERNELS };
const MEMORY = DATA.config.memory_at; // the users whose memory was counted, if the study asks for it
const disturbed = (row) => Boolean(row.interference?.length); // while its speed was measured
const find = (id) => document.getElementById(id);

/** An element; `inside`: text or elements. Text never becomes markup. */
function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...inside.flat(Infinity).filter((part) => part !== null));
  return made;
}

/** Copy a text by the browser; `status` says that it is done, or why not. */
async function copyText(text, status, done) {
  try {
    await navigator.clipboard.writeText(text);
    status.textContent = done;
  } catch (error) {
    status.textContent = `this browser does not let a page copy: ${error.message}`;
  }
}

/** A number to `digits` significant digits, whole ones in full; below 1e-6 zero, null a dash. */
function figure(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 1e-6) return "0";
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  const text = value.toFixed(Math.min(decimals, 12));
  return decimals ? text.replace(/\.?0+$/, "") : text;
}

/** Bytes in decimal units. */
function size(value) {
  if (value === null) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${figure(value, 3)} ${unit}`;
    value /= 1000;
  }
  return `${figure(value, 3)} TB`;
}

const percent = (value, digits = 3) => (value === null ? "–" : `${figure(value * 100, digits)}%`);
const signedPercent = (ratio) => `${ratio >= 1 ? "+" : "−"}${figure(Math.abs(ratio - 1) * 100, 2)}%`;

/** Numbers from small to large, texts by the alphabet; what is missing last, whichever way. */
function compare(one, other, direction) {
  if (one === null || other === null) return (one === null) - (other === null);
  if (Array.isArray(one)) [one, other] = [one.join(), other.join()];
  return direction * (typeof one === "string" ? one.localeCompare(other) : one - other);
}
