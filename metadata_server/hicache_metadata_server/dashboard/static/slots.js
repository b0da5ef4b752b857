// List of a scope's slots, in ranges from `POST /v2/inspect`.

import { RequestError, ConnectionError } from "./api.js";
import { Rows, make, setText } from "./dom.js";
import { bytes, count, figure, hexadecimal } from "./format.js";
import { STATES } from "./occupancy.js";
import { keyLink, slotLink } from "./address.js";

const ON_A_PAGE = 50;
/** Slots of one request: the server needs a few milliseconds for them, in which other requests wait. */
const IN_A_REQUEST = 1024;
/** Slots searched for a state before the user has to confirm that the search goes on. */
const AT_ONCE = 65_536;

/** The list; `onOptions` is called with `{ state, from }` when the user moves in it. */
export class SlotList {
  constructor(api, scope, limits, { state = "", from = "0" }, onOptions) {
    Object.assign(this, { api, scope: scope.scope, slots: scope.slots, onOptions });
    this.state = STATES.includes(state) ? state : "";
    this.from = Math.min(scope.slots - 1, Math.max(0, Number.parseInt(from, 10) || 0));
    this.inRequest = Math.min(IN_A_REQUEST, limits.keys);
    this.next = this.from;
    this.run = 0;
    this.busy = false;
    const body = make("tbody");
    this.rows = new Rows(body, (slot) => makeRow(this.scope, slot));
    const titles = [["Slot"], ["State"], ["Key"], ["Generation", "wide"], ["Length", "mid"], ["Checksum", "wide"], ["Owner", "wide"], ["Time left"]];
    this.table = make("table", { class: "slots" }, make("caption", { class: "unseen" }, "Slots"),
      make("thead", {}, make("tr", {}, titles.map(([title, style = null]) => make("th", { scope: "col", class: style }, title)))), body);
    this.scroll = make("div", { class: "scroll" }, this.table);
    this.said = make("p", { class: "quiet", role: "status" });
    this.element = make("section", { "aria-labelledby": "slots" },
      make("div", { class: "heading" }, make("h2", { id: "slots" }, "Slots"), this.#choices()),
      this.scroll, this.said, this.#buttons());
    this.load();
  }

  /** Fetch the shown slots again, unless they were found by a search. */
  refresh() {
    if (!this.state && !this.busy) this.load();
  }

  stop() {
    this.run += 1;
  }

  #choices() {
    const choices = ["", ...STATES].map((state) => make("label", {},
      make("input", { type: "radio", name: "state", value: state, checked: state === this.state, onchange: () => this.#go(state, 0) }),
      make("span", {}, state ? make("span", { class: `key ${state}` }) : "", state || "all")));
    return make("div", { class: "choice", role: "group", "aria-label": "State" }, choices);
  }

  #buttons() {
    const button = (text, where) => make("button", { type: "button", onclick: () => this.#go(this.state, where()) }, text);
    this.first = button("First", () => 0);
    this.before = button("Previous", () => Math.max(0, this.from - ON_A_PAGE));
    this.after = button("Next", () => this.next);
    this.number = make("input", { type: "number", min: 0, max: this.slots - 1, placeholder: "slot", "aria-label": "Slot", inputmode: "numeric" });
    const jump = make("form", { class: "search", onsubmit: (event) => {
      event.preventDefault();
      if (this.number.value) location.hash = slotLink(this.scope, this.number.value);
    } }, this.number, make("button", {}, "Go to slot"));
    return make("nav", { class: "pager", "aria-label": "Pages of slots" }, this.first, this.before, this.after, jump);
  }

  #go(state, from) {
    Object.assign(this, { state, from });
    this.onOptions({ state, from: from ? String(from) : "" });
    this.load();
  }

  async load() {
    const run = ++this.run;
    this.busy = true;
    const found = [];
    let looked = this.from;
    try {
      while (looked < this.slots && found.length < ON_A_PAGE && (looked === this.from || looked - this.from < AT_ONCE)) {
        const size = Math.min(this.state ? this.inRequest : ON_A_PAGE, this.slots - looked);
        const slots = await this.api.inspect(this.scope, { slots: Array.from({ length: size }, (_, i) => looked + i) });
        if (run !== this.run) return;
        const fitting = slots.filter((slot) => !this.state || slot.state === this.state).slice(0, ON_A_PAGE - found.length);
        found.push(...fitting);
        looked = found.length === ON_A_PAGE ? found.at(-1).slot + 1 : looked + size;
        this.#show(found, looked);
      }
    } catch (error) {
      if (!(error instanceof RequestError || error instanceof ConnectionError)) throw error;
      if (run === this.run) this.#tell(`The slots could not be read: ${error.message}.`);
    } finally {
      if (run === this.run) this.busy = false;
    }
  }

  #show(found, looked) {
    this.next = looked;
    this.rows.show(found, (slot) => slot.slot);
    this.scroll.hidden = !found.length;
    this.first.disabled = this.from === 0;
    this.before.hidden = Boolean(this.state);
    this.before.disabled = this.from === 0;
    this.after.disabled = looked >= this.slots;
    const enough = found.length === ON_A_PAGE || looked >= this.slots;
    setText(this.after, enough || !this.state ? "Next" : "Look further");
    const range = `${count(this.from)} to ${count(looked - 1)} of ${count(this.slots)}`;
    this.#tell(this.state ? `${count(found.length)} ${this.state} among the slots ${range}.` : `Slots ${range}.`);
  }

  #tell(text) {
    setText(this.said, text);
  }
}

function makeRow(scope, slot) {
  const cells = Object.fromEntries(["state", "key", "generation", "length", "checksum", "owner", "left"].map((name) => {
    const style = { key: "name", generation: "wide", checksum: "wide mono", owner: "wide name", length: "mid" }[name];
    return [name, make("td", { class: style })];
  }));
  const row = make("tr", {}, make("th", { scope: "row" }, make("a", { href: slotLink(scope, slot.slot) }, count(slot.slot))), Object.values(cells));
  let shown = "";
  const update = (now) => {
    setText(cells.left, now.seconds_left > 0 ? `${figure(now.seconds_left)} s` : "–");
    const rest = JSON.stringify({ ...now, seconds_left: 0 });
    if (rest === shown) return;
    shown = rest;
    cells.state.replaceChildren(make("span", { class: `key ${now.state}` }), now.state);
    cells.key.replaceChildren(now.key ? make("a", { href: keyLink(scope, now.key), title: now.key }, now.key) : "–");
    setText(cells.generation, now.generation ? count(now.generation) : "–");
    setText(cells.length, now.length ? bytes(now.length) : "–");
    setText(cells.checksum, now.state === "live" ? hexadecimal(now.checksum) : "–");
    setText(cells.owner, now.owner || "–");
  };
  return { row, update };
}
