// Client of the server's routes, without any display.

const TOKEN = "hicache-metadata-token";
const PATIENCE_MS = 10_000;
// JavaScript's numbers hold 53 bits of a checksum's 64, so that its digits are kept as text. A quote inside a key is escaped.
const CHECKSUM = /"checksum":(\d+)/g;

/** A request that the server refused, with its message. */
export class RequestError extends Error {
  constructor(status, problem) {
    super(problem.message ?? "");
    this.status = status;
    this.code = problem.code ?? "";
    this.field = problem.field ?? "";
  }
}

/** No response, or one that is not this server's. */
export class ConnectionError extends Error {}

export class Api {
  constructor() {
    this.token = remembered();
  }

  /** Kept for this tab only, until it is closed. */
  setToken(token) {
    this.token = token;
    try {
      if (token) sessionStorage.setItem(TOKEN, token);
      else sessionStorage.removeItem(TOKEN);
    } catch {
      // In a browser without storage, the user enters it again after a reload.
    }
  }

  get(path) {
    return this.#ask(path, {});
  }

  inspect(scope, { slots = [], keys = [] }) {
    const body = JSON.stringify({ scope, slots, keys });
    return this.#ask("/v2/inspect", { method: "POST", body, headers: { "Content-Type": "application/json" } }).then(
      (answer) => answer.slots,
    );
  }

  /** `{ ready, code, message }`; needs no token. */
  async readiness() {
    const { response, text } = await this.#fetch("/readyz", {});
    if (response.ok) return { ready: true, code: "", message: "" };
    const { code = "", message = "" } = parsed(text);
    return { ready: false, code, message };
  }

  async #ask(path, options) {
    const headers = { ...options.headers };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    const { response, text } = await this.#fetch(path, { ...options, headers });
    if (!response.ok) throw new RequestError(response.status, parsed(text));
    return parsed(text.replace(CHECKSUM, '"checksum":"$1"'));
  }

  async #fetch(path, options) {
    try {
      const response = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
      return { response, text: await response.text() };
    } catch (error) {
      throw new ConnectionError(error.name === "TimeoutError" ? `no answer to ${path} within ${PATIENCE_MS / 1000} s` : "no connection");
    }
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ConnectionError("an answer that is not JSON: something else may stand between this page and the server");
  }
}

function remembered() {
  try {
    return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return "";
  }
}
