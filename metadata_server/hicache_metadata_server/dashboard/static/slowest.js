// Table of the slowest calls of the last hour.

import { Rows, make, setText } from "./dom.js";
import { NONE, count, fullTime, milliseconds, timeOfDay } from "./format.js";
import { scopeLink } from "./address.js";

const AT_FIRST = 8;

export class SlowestCalls {
  constructor() {
    this.most = AT_FIRST;
    this.more = make("button", { type: "button", onclick: () => this.#toggle() });
    const titles = [["Time"], ["Took"], ["Route"], ["Entries", "mid"], ["Scope"], ["Status", "mid"], ["Request id", "wide"]];
    const body = make("tbody");
    this.rows = new Rows(body, makeRow);
    this.table = make("table", { class: "slowest" }, make("caption", { class: "unseen" }, "Slowest calls"),
      make("thead", {}, make("tr", {}, titles.map(([title, style = null]) => make("th", { scope: "col", class: style }, title)))), body);
    this.empty = make("p", { class: "quiet" });
    this.scroll = make("div", { class: "scroll" }, this.table);
    this.element = make("section", { "aria-labelledby": "slowest" },
      make("div", { class: "heading" }, make("h2", { id: "slowest" }, "Slowest calls of the last hour"),
        make("p", { class: "quiet" }, "From the last byte of the request to the answer.")),
      this.scroll, this.empty, make("div", { class: "pager" }, this.more));
  }

  #toggle() {
    this.most = this.most === AT_FIRST ? Infinity : AT_FIRST;
    this.show(this.past);
  }

  show(past) {
    this.past = past;
    const longest = past.slowest[0]?.seconds ?? 0;
    this.rows.show(past.slowest.slice(0, this.most).map((call) => ({ ...call, longest })), (call) => `${call.time} ${call.seconds} ${call.route}`);
    this.scroll.hidden = !past.slowest.length;
    this.empty.hidden = !this.scroll.hidden;
    this.more.hidden = past.slowest.length <= AT_FIRST;
    setText(this.more, this.most === AT_FIRST ? `Show all ${past.slowest.length}` : "Show fewer");
    setText(this.empty, past.offered === false ? "This server does not keep them." : "Nobody has called yet.");
  }
}

function makeRow(call) {
  const bar = make("span");
  const scope = call.scope ? [make("a", { href: scopeLink(call.scope) }, call.scope), call.scopes > 1 ? ` and ${call.scopes - 1} more` : ""] : [NONE];
  const row = make("tr", {},
    make("td", { title: fullTime(call.time) }, timeOfDay(call.time)),
    make("td", { class: "took" }, make("span", { class: "figure" }, milliseconds(call.seconds)), make("span", { class: "measure wide", "aria-hidden": "true" }, bar)),
    make("th", { scope: "row" }, make("code", {}, call.route)),
    make("td", { class: "mid" }, count(call.entries)),
    make("td", { class: "name" }, ...scope),
    make("td", { class: call.status >= 400 ? "bad mid" : "mid" }, String(call.status)),
    make("td", { class: "wide name" }, call.request_id ? make("code", {}, call.request_id) : NONE));
  return { row, update: ({ seconds, longest }) => { bar.style.width = `${(100 * seconds) / longest}%`; } };
}
