// View of one slot, found by its number or by a key.

import { RequestError, ConnectionError } from "./api.js";
import { facts, make, setText } from "./dom.js";
import { bytes, count, figure, hexadecimal } from "./format.js";
import { MEANING } from "./occupancy.js";
import { keyLink, slotLink } from "./address.js";
import { crumbs } from "./scope.js";

export class SlotView {
  constructor(poller, place) {
    const [, scope, kind, named] = place.parts;
    this.scope = scope;
    this.asked = kind === "key" ? { keys: [named] } : { slots: [Number(named)] };
    this.key = kind === "key" ? named : "";
    this.title = `${kind} ${named} of ${scope}`;
    this.note = make("p", { class: "quiet", role: "status" });
    this.left = make("span");
    this.facts = make("div");
    this.card = make("section", { class: "card", hidden: true }, this.facts);
    this.element = make("div", { class: "slot" }, crumbs(scope, `${kind} ${named}`),
      make("h1", { tabindex: "-1" }, `${kind === "key" ? "Key" : "Slot"} `, make("span", { class: "name" }, named)), this.note, this.card);
    this.show(poller);
  }

  async show(poller) {
    // The poller reports connection errors.
    if (!poller.scopes || this.busy) return;
    this.busy = true;
    try {
      const [slot] = await poller.api.inspect(this.scope, this.asked);
      this.#tell(slot, poller.scopes.find(({ scope }) => scope === this.scope));
    } catch (error) {
      if (!(error instanceof RequestError || error instanceof ConnectionError)) throw error;
      this.#fail(error);
    } finally {
      this.busy = false;
    }
  }

  #fail(error) {
    setText(this.note, error.status === 404 ? "The server has no such scope." : `The server does not tell: ${error.message}.`);
    this.note.hidden = false;
    if (error instanceof RequestError) this.card.hidden = true;
  }

  #tell(slot, scope) {
    this.card.hidden = slot === null;
    this.note.hidden = slot !== null;
    if (slot === null) {
      this.shown = "";
      setText(this.note, "No live page and no lease has this key. It was never written, or it was evicted or deleted since.");
      return;
    }
    setText(this.left, `${figure(slot.seconds_left)} s`);
    const rest = JSON.stringify({ ...slot, seconds_left: slot.seconds_left > 0 });
    if (rest === this.shown) return;
    this.shown = rest;
    this.facts.replaceChildren(facts(this.#entries(slot, scope)));
  }

  #entries(slot, scope) {
    const live = slot.state === "live";
    const size = scope?.slot_bytes ?? 0;
    return [
      ["State", make("span", { class: `key ${slot.state}` }), make("strong", {}, slot.state), make("p", { class: "quiet" }, MEANING[slot.state])],
      ["Slot", this.#slotLinks(slot, scope)],
      slot.key && ["Key", this.key ? make("span", { class: "name" }, slot.key) : make("a", { class: "name", href: keyLink(this.scope, slot.key) }, slot.key)],
      slot.prefix && ["Key before it", make("a", { class: "name", href: keyLink(this.scope, slot.prefix) }, slot.prefix)],
      ["Generation", slot.generation ? String(slot.generation) : "0: it was never leased"],
      live && ["Length", slot.length ? `${count(slot.length)} bytes (${bytes(slot.length)}${size ? `, ${figure((100 * slot.length) / size)}% of the slot` : ""})` : "not known: a client of the compatible part wrote it"],
      live && ["Checksum", make("code", {}, hexadecimal(slot.checksum)), make("span", { class: "quiet" }, ` ${slot.checksum}`)],
      slot.state === "leased" && ["Owner", slot.owner ? make("code", {}, slot.owner) : "did not name itself"],
      slot.seconds_left > 0 && [slot.state === "leased" ? "Lease ends in" : "Rests for", this.left],
      size && ["In the file", `bytes ${count(slot.slot * size)} to ${count((slot.slot + 1) * size - 1)}`],
    ].map((entry) => entry || null);
  }

  #slotLinks({ slot }, scope) {
    const neighbour = (number, text) => (number < 0 || number >= (scope?.slots ?? 0) ? "" : make("a", { href: slotLink(this.scope, number) }, text));
    return make("span", { class: "neighbours" }, this.key ? make("a", { href: slotLink(this.scope, slot) }, count(slot)) : count(slot),
      neighbour(slot - 1, `← ${count(slot - 1)}`), neighbour(slot + 1, `${count(slot + 1)} →`));
  }
}
