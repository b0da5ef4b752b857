// Polls the server, and keeps its latest responses.

import { RequestError, ConnectionError } from "./api.js";
import { HistoryCache } from "./history.js";

const MANY_SCOPES = 500;
const EVERY_MS = 2_000;
/** Slower polling for large lists, which cost the server some milliseconds, and while the token is refused. */
const RARELY_MS = 10_000;

/** Dispatches `change` after each poll. */
export class Poller extends EventTarget {
  constructor(api) {
    super();
    this.api = api;
    this.about = null;
    this.readiness = null;
    this.scopes = null;
    this.past = new HistoryCache();
    /** Error of the last poll, or null. */
    this.lastError = null;
    /** Times of the last successful poll and of the first failed one after it, by this machine's clock in ms. */
    this.updated = 0;
    this.failedSince = 0;
    /** Time at which the server was found to have another instance than before. */
    this.restarted = 0;
    this.paused = false;
    this.timer = 0;
    this.round = null;
    document.addEventListener("visibilitychange", () => this.#arm(document.hidden ? null : 0));
  }

  get everyMs() {
    const isCostly = (this.scopes?.length ?? 0) > MANY_SCOPES && !(this.lastError instanceof ConnectionError);
    return isCostly || this.wantsToken ? RARELY_MS : EVERY_MS;
  }

  /** True if the server refused the token, or needs one. */
  get wantsToken() {
    return this.lastError?.status === 401 || this.lastError?.status === 403;
  }

  pause(paused) {
    this.paused = paused;
    this.#arm(paused ? null : 0);
  }

  /** Poll now; one poll at a time. */
  poll() {
    this.round ??= this.#ask().finally(() => {
      this.round = null;
      this.#arm(this.paused || document.hidden ? null : this.everyMs);
      this.dispatchEvent(new Event("change"));
    });
    return this.round;
  }

  /** Poll now, with a new poll even if one is in progress. */
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
      this.lastError = null;
      this.updated = Date.now();
    } catch (error) {
      if (!(error instanceof RequestError || error instanceof ConnectionError)) throw error;
      if (!this.lastError) this.failedSince = Date.now();
      this.lastError = error;
    }
  }

  #meet(about) {
    if (this.about && this.about.instance !== about.instance) {
      this.restarted = Date.now();
      this.past = new HistoryCache();
    }
    this.about = about;
  }
}
