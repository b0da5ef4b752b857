// Cache of `GET /v2/history`: each poll fetches only the samples that are not here yet.

import { RequestError } from "./api.js";

const KEPT = { seconds: 600, minutes: 1440 };

export class HistoryCache {
  constructor() {
    this.seconds = null;
    this.minutes = null;
    this.slowest = [];
    this.started = 0;
    this.now = 0;
    /** True if the server has the route; null before the first request. */
    this.offered = null;
  }

  async ask(api) {
    if (this.offered === false) return;
    const after = Math.max(0, this.seconds?.times.at(-1) ?? 0);
    let told;
    try {
      told = await api.get(`/v2/history?after=${after}`);
    } catch (error) {
      if (!(error instanceof RequestError && error.status === 404)) throw error;
      this.offered = false;
      return;
    }
    this.offered = true;
    this.seconds = joined(this.seconds, told.seconds, KEPT.seconds);
    this.minutes = joined(this.minutes, told.minutes, KEPT.minutes);
    ({ slowest: this.slowest, started: this.started, now: this.now } = told);
  }
}

function joined(before, told, most) {
  const series = {};
  for (const [name, column] of Object.entries(told)) {
    series[name] = Array.isArray(column) ? [...(before?.[name] ?? []), ...column].slice(-most) : column;
  }
  return series;
}

/** A counter of the samples as rates. */
export function perSecond(series, name) {
  return series[name].map((number, i) => number / series.spans[i]);
}

/** Sum of a counter over the samples of the last `seconds`. */
export function lately(series, name, seconds) {
  const from = (series.times.at(-1) ?? 0) - seconds;
  return series[name].reduce((sum, number, i) => (series.times[i] > from ? sum + number : sum), 0);
}
