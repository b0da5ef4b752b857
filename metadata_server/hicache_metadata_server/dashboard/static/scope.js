// View of one scope: geometry, occupancy, request rates and slots.

import { Chart } from "./chart.js";
import { facts, make, setText } from "./dom.js";
import { bytes, count, share } from "./format.js";
import { Bar, BarLegend } from "./occupancy.js";
import { keepOptions, keyLink, link } from "./address.js";
import { SlotList } from "./slots.js";

const WINDOW_SECONDS = 600;
const LEAST_SECONDS = 60;

export class ScopeView {
  constructor(poller, place) {
    this.name = place.parts[1];
    this.options = Object.fromEntries(place.options);
    this.title = this.name;
    this.samples = [];
    this.bar = new Bar();
    this.legend = new BarLegend();
    this.facts = make("div");
    this.ratio = make("span");
    this.gone = make("span");
    this.log = make("span");
    this.asked = new Chart({ title: "Keys asked for", unit: "per second", format: rate, lines: [
      { name: "hits", style: "one", area: true }, { name: "misses", style: "two dashed" },
    ] });
    this.evicted = new Chart({ title: "Evictions", unit: "pages per second", format: rate, lines: [{ name: "evicted", style: "four", area: true }] });
    this.slots = make("div");
    this.body = make("div", {},
      make("section", { class: "card" }, this.bar.element, this.legend.element, this.facts),
      make("section", { "aria-labelledby": "find" }, make("div", { class: "heading" }, make("h2", { id: "find" }, "Find a page")), this.#search()),
      make("section", { "aria-labelledby": "asked" },
        make("div", { class: "heading" }, make("h2", { id: "asked" }, "While this page is open")),
        make("div", { class: "charts" }, this.asked.element, this.evicted.element)),
      this.slots);
    this.absent = make("p", { class: "quiet" }, "The server has no such scope.");
    this.element = make("div", { class: "scope" }, crumbs(this.name), make("h1", { tabindex: "-1" }, this.name), this.absent, this.body);
    this.show(poller);
  }

  show(poller) {
    const scope = poller.scopes?.find(({ scope: name }) => name === this.name);
    this.body.hidden = !scope;
    this.absent.hidden = Boolean(scope) || !poller.scopes;
    if (!scope) return;
    this.bar.show(scope);
    this.legend.show(scope);
    this.#showFacts(scope);
    this.#showCounts(poller, scope);
    if (!this.list) {
      this.list = new SlotList(poller.api, scope, poller.about.limits, this.options, (options) => keepOptions(["scope", this.name], options));
      this.slots.append(this.list.element);
    } else {
      this.list.refresh();
    }
  }

  stop() {
    this.list?.stop();
  }

  #search() {
    const key = make("input", { id: "key", type: "search", placeholder: "its whole key", spellcheck: "false", autocomplete: "off", required: true });
    return make("form", { class: "search key-search", onsubmit: (event) => {
      event.preventDefault();
      location.hash = keyLink(this.name, key.value);
    } }, make("label", { for: "key" }, "Key"), key, make("button", {}, "Find"));
  }

  #showFacts({ slots, slot_bytes, geometry, identity, model, owner }) {
    const said = JSON.stringify([slots, slot_bytes, geometry, identity, model, owner]);
    if (this.said === said) return;
    this.said = said;
    this.facts.replaceChildren(facts([
      ["Slots", count(slots)],
      ["Bytes of a slot", slot_bytes ? `${count(slot_bytes)} (${bytes(slot_bytes)})` : "not known"],
      slot_bytes ? ["All of it", bytes(slots * slot_bytes)] : null,
      ["Hit ratio", this.ratio],
      ["Evicted", this.gone],
      owner ? ["Owner", make("code", {}, owner)] : null,
      owner ? ["Log", this.log] : null,
      ["Model", model || "not named"],
      ["Identity", identity ? make("code", {}, identity) : "none given"],
      ["Geometry", geometry ? make("code", {}, geometry) : "none given"],
    ]));
  }

  #showCounts(poller, { hits, misses, evicted, log_bytes }) {
    const time = poller.past.offered ? poller.past.now : Date.now() / 1000;
    const last = this.samples.at(-1);
    // After a restart the counters begin at 0 again.
    if (last && (hits < last.hits || misses < last.misses || evicted < last.evicted)) this.samples = [];
    if (!last || time > last.time) this.samples.push({ time, hits, misses, evicted });
    this.samples = this.samples.filter((sample) => sample.time > time - WINDOW_SECONDS);
    setText(this.ratio, hits + misses ? `${share(hits, hits + misses)} of ${count(hits + misses)} keys` : "nothing was asked for");
    setText(this.gone, `${count(evicted)} pages`);
    setText(this.log, bytes(log_bytes ?? 0));
    this.ratio.title = this.gone.title = "since the server's start";
    const steps = this.samples.slice(1).map((sample, i) => ({ sample, before: this.samples[i] }));
    const from = Math.min(this.samples[0].time, time - LEAST_SECONDS);
    const shown = { times: steps.map(({ sample }) => sample.time), stepSeconds: poller.everyMs / 1000, from, to: time };
    const column = (name) => steps.map(({ sample, before }) => (sample[name] - before[name]) / (sample.time - before.time));
    this.asked.show({ ...shown, columns: [column("hits"), column("misses")] });
    this.evicted.show({ ...shown, columns: [column("evicted")] });
  }
}

/** Breadcrumbs. */
export function crumbs(scope, ...further) {
  return make("nav", { class: "crumbs", "aria-label": "Where you are" }, make("a", { href: "#/" }, "Overview"),
    [scope, ...further].map((name, i) => [
      make("span", { "aria-hidden": "true" }, "/"),
      i < further.length ? make("a", { href: link(["scope", scope]) }, name) : make("span", { "aria-current": "page" }, name),
    ]).flat());
}

const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

function rate(value) {
  return value === null ? "–" : short.format(value);
}
