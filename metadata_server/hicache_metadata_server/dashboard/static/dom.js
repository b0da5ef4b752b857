// DOM helpers. They take no markup: names from the server become text, and cannot inject scripts.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (listeners by `onclick` and the like; null leaves one out) and children. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

/** Set a text only where it differs, so that a selection in it stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Definition list; entries of null are left out. */
export function facts(entries) {
  const shown = entries.filter((entry) => entry !== null);
  return make("dl", { class: "facts" }, shown.map(([term, ...what]) => make("div", {}, make("dt", {}, term), make("dd", {}, ...what))));
}

/**
 * Rows of a table, each of which stays the same element while its key is there: focus and selection outlive an update.
 * `makeRow(item)` gives `{ row, update(item) }`.
 */
export class Rows {
  constructor(body, makeRow) {
    this.body = body;
    this.makeRow = makeRow;
    this.rows = new Map();
  }

  show(items, keyOf) {
    const rows = new Map();
    items.forEach((item, i) => {
      const key = keyOf(item);
      const made = this.rows.get(key) ?? this.makeRow(item);
      made.update(item);
      rows.set(key, made);
      if (this.body.children[i] !== made.row) this.body.insertBefore(made.row, this.body.children[i] ?? null);
    });
    while (this.body.children.length > items.length) this.body.lastChild.remove();
    this.rows = rows;
  }
}
