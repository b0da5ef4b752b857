// Asks the server again and again, and keeps what it said last.

import { Refused, Unreachable } from "./api.js";
import { Past } from "./past.js";

const MANY_SCOPES = 500;
const EVERY_MS = 2_000;
/** A list of thousands takes the server some milliseconds, and who has no right token will hardly get one by asking. */
const RARELY_MS = 10_000;

/** Dispatches `change` after each round. */
export class Watch extends EventTarget {
  constructor(api) {
    super();
    this.api = api;
    this.about = null;
    this.readiness = null;
    this.scopes = null;
    this.past = new Past();
    /** What the last round failed at, or null. */
    this.trouble = null;
    /** When a round succeeded last, and when the trouble began, by this machine's clock in ms. */
    this.updated = 0;
    this.troubled = 0;
    /** When the server was seen to have another instance than before. */
    this.restarted = 0;
    this.paused = false;
    this.timer = 0;
    this.round = null;
    document.addEventListener("visibilitychange", () => this.#arm(document.hidden ? null : 0));
  }

  get everyMs() {
    const isCostly = (this.scopes?.length ?? 0) > MANY_SCOPES && !(this.trouble instanceof Unreachable);
    return isCostly || this.wantsToken ? RARELY_MS : EVERY_MS;
  }

  /** Whether it was refused for its token, or for want of one. */
  get wantsToken() {
    return this.trouble?.status === 401 || this.trouble?.status === 403;
  }

  pause(paused) {
    this.paused = paused;
    this.#arm(paused ? null : 0);
  }

  /** Ask at once; one round at a time. */
  poll() {
    this.round ??= this.#ask().finally(() => {
      this.round = null;
      this.#arm(this.paused || document.hidden ? null : this.everyMs);
      this.dispatchEvent(new Event("change"));
    });
    return this.round;
  }

  /** Ask at once, and not only what a round that has begun will say. */
  async pollAnew() {
    await this.round;
    return this.poll();
  }

  #arm(ms) {
    clearTimeout(this.timer);
    if (ms !== null && !this.paused) this.timer = setTimeout(() => this.poll(), ms);
  }

  async #ask() {
    try {
      this.readiness = await this.api.readiness();
      this.#meet(await this.api.get("/v2"));
      await this.past.ask(this.api);
      this.scopes = (await this.api.get("/v2/scopes")).scopes;
      this.trouble = null;
      this.updated = Date.now();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      if (!this.trouble) this.troubled = Date.now();
      this.trouble = error;
    }
  }

  #meet(about) {
    if (this.about && this.about.instance !== about.instance) {
      this.restarted = Date.now();
      this.past = new Past();
    }
    this.about = about;
  }
}
