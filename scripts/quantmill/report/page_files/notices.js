// Notices above everything else: what failed, what was disturbed, what could not be drawn.

const NOTICED = 12; // lines of a list

/** A command to copy with one click. */
function command(text) {
  const status = element("span", { role: "status" });
  return element("div", { class: "command" }, element("pre", { tabindex: 0 }, text), element("button", { type: "button", onclick: () => copyText(text, status, "copied") }, "copy the command"), status);
}

/** One notice: what is the matter, its lines, and what to run. */
function notice(head, lines, order, text) {
  const shown = lines.slice(0, NOTICED).map((line) => element("li", {}, line));
  if (lines.length > shown.length) shown.push(element("li", {}, `and ${lines.length - shown.length} more: see the table`));
  return element("div", { class: "notice" }, element("p", {}, element("strong", {}, head)), shown.length ? element("ul", {}, shown) : null, text ? [element("p", {}, order), command(text)] : null);
}

function showNotices() {
  const [failed, ...reasons] = DATA.unfinished;
  const measured = ROWS.filter((row) => row.tokens_per_second !== null);
  const loud = measured.filter(disturbed);
  const were = loud.length === 1 ? "was disturbed while its" : "were disturbed while their";
  find("notices").replaceChildren(...[
    DATA.running.length ? notice("Still running; this page fills itself in.", DATA.running) : null,
    failed ? notice(failed, reasons, "This page shows the rest. The same study goes on where it is with:", DATA.commands.resume) : null,
    loud.length ? notice(`${loud.length} of ${measured.length} rows ${were} speed was measured. A disturbance only slows: these speeds are lower bounds.`,
      loud.map((row) => `${row.id}: ${row.interference.join("; ")}`), "To measure just the speed of these again, when nothing else runs there:", DATA.commands.disturbed) : null,
    DATA.undrawn ? notice("This page has no plots.", [DATA.undrawn], "To make the page again, once that is mended:", DATA.commands.redraw) : null,
  ].filter((part) => part !== null));
}
