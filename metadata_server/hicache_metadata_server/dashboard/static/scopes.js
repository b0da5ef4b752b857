// Table of scopes, with filter, sorting and paging.

import { Rows, make, setText } from "./dom.js";
import { NONE, bytes, count, share } from "./format.js";
import { Bar } from "./occupancy.js";
import { scopeLink } from "./address.js";

const ON_A_PAGE = 25;

/** Share of a scope's slots that are not free. */
export const occupied = (scope) => (scope.slots - scope.free) / scope.slots;
const hitRatio = (scope) => (scope.hits + scope.misses ? scope.hits / (scope.hits + scope.misses) : -1);
const COLUMNS = [
  { name: "scope", title: "Scope", value: (scope) => scope.scope },
  { name: "model", title: "Model", value: (scope) => scope.model ?? "", wide: true },
  { name: "slots", title: "Slots", value: (scope) => scope.slots, wide: true },
  { name: "live", title: "Live", value: (scope) => scope.live, wide: true },
  { name: "leased", title: "Leased", value: (scope) => scope.leased, wide: true },
  { name: "quarantined", title: "Quarantined", value: (scope) => scope.quarantined, wide: true },
  { name: "free", title: "Free", value: (scope) => scope.free, wide: true },
  { name: "occupied", title: "Occupied", value: occupied },
  { name: "hits", title: "Hit ratio", value: hitRatio },
  { name: "evicted", title: "Evicted", value: (scope) => scope.evicted, mid: true },
  // Of servers that share a store.
  { name: "owner", title: "Owner", value: (scope) => scope.owner ?? "", wide: true, shared: true },
  { name: "log", title: "Log", value: (scope) => scope.log_bytes ?? 0, wide: true, shared: true },
];
const NATURALLY = new Intl.Collator("en", { numeric: true });

/** The table; `onOptions` is called with `{ sort, order, filter, page }` when the user changes one. */
export class ScopeTable {
  constructor(options, onOptions) {
    this.options = { sort: "scope", order: "up", filter: "", page: "1", ...options };
    this.onOptions = onOptions;
    this.scopes = null;
    this.filter = make("input", {
      type: "search", id: "filter", placeholder: "name, model or identity", value: this.options.filter, spellcheck: "false", autocomplete: "off",
      oninput: () => this.#change({ filter: this.filter.value, page: "1" }),
    });
    this.found = make("span", { class: "quiet", role: "status" });
    this.heads = COLUMNS.map((column) => this.#head(column));
    const body = make("tbody");
    this.rows = new Rows(body, makeRow);
    this.table = make("table", { class: "scopes" }, make("caption", { class: "unseen" }, "Scopes"),
      make("thead", {}, make("tr", {}, this.heads)), body);
    this.empty = make("p", { class: "quiet" });
    this.pager = new Pager((page) => this.#change({ page: String(page) }));
    this.scroll = make("div", { class: "scroll" }, this.table);
    this.element = make("section", { "aria-labelledby": "scopes" },
      make("div", { class: "heading" }, make("h2", { id: "scopes" }, "Scopes"),
        make("div", { class: "search" }, make("label", { for: "filter" }, "Filter"), this.filter, this.found)),
      this.scroll, this.empty, this.pager.element);
  }

  show(scopes) {
    this.scopes = scopes;
    const { filter, sort, order } = this.options;
    this.table.classList.toggle("of-one", !scopes.some((scope) => scope.owner));
    const column = COLUMNS.find(({ name }) => name === sort) ?? COLUMNS[0];
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const found = scopes.filter((scope) => words.every((word) => `${scope.scope} ${scope.model ?? ""} ${scope.identity}`.toLowerCase().includes(word)));
    found.sort((a, b) => (order === "down" ? -1 : 1) * compare(column.value(a), column.value(b)) || NATURALLY.compare(a.scope, b.scope));
    const pages = Math.max(1, Math.ceil(found.length / ON_A_PAGE));
    const page = Math.min(pages, Math.max(1, Number.parseInt(this.options.page, 10) || 1));
    this.rows.show(found.slice((page - 1) * ON_A_PAGE, page * ON_A_PAGE), (scope) => scope.scope);
    this.pager.show(page, pages);
    this.#tell(found.length, scopes.length);
  }

  #tell(found, all) {
    setText(this.found, found === all ? count(all) : `${count(found)} of ${count(all)}`);
    this.scroll.hidden = !found;
    this.empty.hidden = Boolean(found);
    setText(this.empty, all ? "No scope has that in its name, model or identity." :
      "No scope yet. The first engine that uses this server initializes its scopes.");
    COLUMNS.forEach(({ name }, i) => {
      const order = name !== this.options.sort ? "none" : this.options.order === "down" ? "descending" : "ascending";
      this.heads[i].setAttribute("aria-sort", order);
    });
  }

  #head(column) {
    return make("th", { scope: "col", class: classOf(column) },
      make("button", { type: "button", onclick: () => this.#sortBy(column.name) }, column.title));
  }

  #sortBy(name) {
    const { sort, order } = this.options;
    const first = ["scope", "model", "owner"].includes(name) ? "up" : "down";
    this.#change({ sort: name, order: sort === name ? (order === "up" ? "down" : "up") : first, page: "1" });
  }

  #change(options) {
    Object.assign(this.options, options);
    this.onOptions(this.options);
    if (this.scopes) this.show(this.scopes);
  }
}

/** Buttons for the pages of a table; hidden if there is only one page. */
class Pager {
  constructor(onPage) {
    this.before = make("button", { type: "button", onclick: () => onPage(this.page - 1) }, "Previous");
    this.after = make("button", { type: "button", onclick: () => onPage(this.page + 1) }, "Next");
    this.where = make("span", { class: "quiet" });
    this.element = make("nav", { class: "pager", "aria-label": "Pages of scopes" }, this.before, this.where, this.after);
  }

  show(page, pages) {
    this.page = page;
    this.element.hidden = pages === 1;
    this.before.disabled = page === 1;
    this.after.disabled = page === pages;
    setText(this.where, `Page ${count(page)} of ${count(pages)}`);
  }
}

function makeRow(scope) {
  const bar = new Bar();
  const model = make("td", { class: "wide name" });
  const numbers = COLUMNS.slice(2).map((column) => make("td", { class: classOf(column) }));
  const occupiedShare = make("span", { class: "figure" });
  numbers[5].classList.add("occupied");
  numbers[5].append(bar.element, occupiedShare);
  const row = make("tr", {}, make("th", { scope: "row" }, make("a", { href: scopeLink(scope.scope) }, scope.scope)), model, numbers);
  const update = (now) => {
    bar.show(now);
    setText(model, now.model ?? "");
    model.title = now.model ?? "";
    setText(occupiedShare, share(now.slots - now.free, now.slots));
    ["slots", "live", "leased", "quarantined", "free"].forEach((name, i) => setText(numbers[i], count(now[name])));
    setText(numbers[6], share(now.hits, now.hits + now.misses));
    setText(numbers[7], count(now.evicted));
    setText(numbers[8], now.owner || "none");
    setText(numbers[9], now.owner ? bytes(now.log_bytes) : NONE);
  };
  return { row, update };
}

function classOf({ wide, mid, shared }) {
  return [wide && "wide", mid && "mid", shared && "shared"].filter(Boolean).join(" ") || null;
}

function compare(a, b) {
  return typeof a === "string" ? NATURALLY.compare(a, b) : a - b;
}
