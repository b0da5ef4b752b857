// Overview: readiness, rates, charts and scopes of the server.

import { Charts } from "./charts.js";
import { facts, make, setText } from "./dom.js";
import { NONE, count, figure, fullTime, milliseconds, share, span } from "./format.js";
import { Bar, BarLegend, sum } from "./occupancy.js";
import { lately } from "./history.js";
import { keepOptions, scopeLink } from "./address.js";
import { ScopeTable, occupied } from "./scopes.js";
import { SlowestCalls } from "./slowest.js";

/** Seconds over which the tiles' rates are taken. */
const LATELY = 30;

export class Overview {
  title = "Overview";

  constructor(poller, place) {
    this.options = Object.fromEntries(place.options);
    this.charts = new Charts(this.options.range === "day" ? 1 : 0, (range) => this.#keep({ range: range ? "day" : "" }));
    const { sort, order, filter, page } = this.options;
    const given = Object.entries({ sort, order, filter, page }).filter(([, value]) => value !== undefined);
    this.table = new ScopeTable(Object.fromEntries(given), (options) => this.#keep(options));
    this.slowest = new SlowestCalls();
    this.health = make("div", { class: "health", role: "status" });
    this.about = make("div");
    this.up = make("span");
    this.bar = new Bar();
    this.legend = new BarLegend();
    // The fullest scope, not the sum: one full scope evicts while all together are nearly empty.
    this.fullest = make("a");
    this.fullestShare = make("span");
    this.slots = make("section", { class: "card", "aria-label": "All slots" }, this.bar.element, this.legend.element,
      make("p", { class: "quiet fullest" }, "Fullest scope: ", this.fullest, ", ", this.fullestShare));
    this.tiles = ["Requests", "Hit ratio", "Median", "99th percentile", "Evictions"].map((title) => new Tile(title));
    this.element = make("div", { class: "overview" },
      make("h1", { class: "unseen", tabindex: "-1" }, "Overview"),
      make("section", { class: "card now", "aria-label": "Now" }, this.health, this.about),
      make("section", { class: "tiles", "aria-label": `The last ${LATELY} seconds` }, this.tiles.map((tile) => tile.element)),
      this.slots,
      this.charts.element, this.table.element, this.slowest.element);
    this.show(poller);
  }

  show(poller) {
    const { readiness, about, past, scopes } = poller;
    if (readiness) this.#showHealth(readiness);
    if (about) this.#showAbout(about, past);
    if (past.seconds) this.#showTiles(past.seconds);
    this.charts.show(past);
    this.slowest.show(past);
    if (!scopes) return;
    const all = sum(scopes);
    this.slots.hidden = !scopes.length;
    this.bar.show(all);
    this.legend.show(all);
    this.#showFullest(scopes);
    this.table.show(scopes);
  }

  #showFullest(scopes) {
    if (!scopes.length) return;
    const fullest = scopes.reduce((most, scope) => (occupied(scope) > occupied(most) ? scope : most));
    setText(this.fullest, fullest.scope);
    this.fullest.href = scopeLink(fullest.scope);
    setText(this.fullestShare, `${share(fullest.slots - fullest.free, fullest.slots)} of ${count(fullest.slots)} slots in use`);
  }

  #showHealth({ ready, code, message }) {
    const title = ready ? "Ready" : code === "draining" ? "Draining" : "Not ready";
    const text = ready ? "It takes all requests." : sentence(message || "it does not say why");
    if (this.health.dataset.said === title + text) return;
    this.health.dataset.said = title + text;
    this.health.dataset.state = ready ? "ready" : code === "draining" ? "draining" : "failing";
    this.health.replaceChildren(make("span", { class: "sign", "aria-hidden": "true" }, ready ? "✓" : "!"),
      make("div", {}, make("strong", {}, title), make("p", {}, text)));
  }

  #showAbout(about, past) {
    const { limits } = about;
    if (this.instance !== about.instance) {
      this.instance = about.instance;
      this.about.replaceChildren(facts([
        ["Server", about.server],
        ["Protocol", about.protocol],
        ["Instance", make("code", {}, about.instance)],
        ["Durability", about.durability],
        ["Up for", this.up],
        ["Leases last", `${figure(limits.lease_seconds)} s`],
        ["Quarantine", `${figure(limits.quarantine_seconds)} s`],
      ]));
    }
    setText(this.up, past.offered ? span(past.now - past.started) : NONE);
    this.up.title = past.offered ? `since ${fullTime(past.started)}` : "";
  }

  #showTiles(series) {
    const seconds = lately(series, "spans", LATELY);
    const [requests, failed, hits, misses, evicted] = ["requests", "failed", "hits", "misses", "evicted"].map(
      (name) => lately(series, name, LATELY));
    const rate = (number) => (seconds ? figure(number / seconds) : NONE);
    const [each, hit, median, p99, eviction] = this.tiles;
    each.show(rate(requests), "per second", failed ? `${rate(failed)} of them failed` : "");
    hit.show(share(hits, hits + misses), "", hits + misses ? `of ${rate(hits + misses)} keys per second` : "no key was asked for");
    median.show(milliseconds(typical(series.median_seconds)), "", "to answer");
    p99.show(milliseconds(worst(series.p99_seconds)), "", `the worst second of ${LATELY}`);
    eviction.show(rate(evicted), "pages per second", evicted ? `${count(evicted)} in ${LATELY} s` : "");
  }

  #keep(options) {
    Object.assign(this.options, options);
    const { sort, order, filter, page, range } = this.options;
    const sorted = sort && (sort !== "scope" || order !== "up");
    keepOptions([], { range, filter, sort: sorted ? sort : "", order: sorted ? order : "", page: page === "1" ? "" : page });
  }
}

class Tile {
  constructor(title) {
    this.value = make("b", {}, NONE);
    this.unit = make("span", { class: "unit" });
    this.more = make("p", { class: "quiet" });
    this.element = make("div", { class: "tile" }, make("h2", {}, title), make("p", { class: "value" }, this.value, " ", this.unit), this.more);
  }

  show(value, unit, more) {
    setText(this.value, value);
    setText(this.unit, unit);
    setText(this.more, more);
  }
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
}

function typical(column) {
  const known = column.slice(-LATELY).filter((value) => value !== null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : null;
}

function worst(column) {
  return column.slice(-LATELY).reduce((most, value) => (value !== null && value > (most ?? -1) ? value : most), null);
}
