// Slots of a scope by state, as a bar with a legend.

import { make, setText } from "./dom.js";
import { count, share } from "./format.js";

export const STATES = ["live", "leased", "quarantined", "free"];

export const MEANING = {
  live: "The slot holds the page of its key.",
  leased: "One client may write the slot until the lease ends. Without a commit by then, the slot is quarantined, and then free again.",
  quarantined: "The slot is given to nobody: whoever was told about its last page may still be reading. Then it is free.",
  free: "The slot may be given to any key.",
};

export class Bar {
  constructor() {
    this.parts = STATES.slice(0, 3).map((state) => make("span", { class: `part ${state}` }));
    this.element = make("div", { class: "bar", role: "img" }, this.parts);
  }

  /** `slots` has the number of slots in each state, and their total. */
  show(slots) {
    STATES.slice(0, 3).forEach((state, i) => {
      // A minimum width, so that one slot among a million is visible.
      this.parts[i].style.width = slots[state] ? `max(2px, ${(100 * slots[state]) / slots.slots}%)` : "0";
    });
    const said = STATES.map((state) => `${count(slots[state])} ${state} (${share(slots[state], slots.slots)})`).join(", ");
    this.element.title = said;
    this.element.setAttribute("aria-label", said);
  }
}

/** Legend of a bar, with the numbers. */
export class BarLegend {
  constructor() {
    this.values = STATES.map(() => make("b"));
    this.shares = STATES.map(() => make("span", { class: "quiet" }));
    const entries = STATES.map((state, i) =>
      make("li", { title: MEANING[state] }, make("span", { class: `key ${state}` }), `${state} `, this.values[i], " ", this.shares[i]));
    this.element = make("ul", { class: "legend states" }, entries);
  }

  show(slots) {
    STATES.forEach((state, i) => {
      setText(this.values[i], count(slots[state]));
      setText(this.shares[i], share(slots[state], slots.slots));
    });
  }
}

/** Sum of all scopes. */
export function sum(scopes) {
  const all = { slots: 0, live: 0, leased: 0, quarantined: 0, free: 0, hits: 0, misses: 0, evicted: 0 };
  for (const scope of scopes) for (const name of Object.keys(all)) all[name] += scope[name];
  return all;
}
