// What `GET /v2/history` told, put together over the rounds: each asks only for samples that are not here yet.

import { Refused } from "./api.js";

const KEPT = { seconds: 600, minutes: 1440 };

export class Past {
  constructor() {
    this.seconds = null;
    this.minutes = null;
    this.slowest = [];
    this.started = 0;
    this.now = 0;
    /** Whether the server offers it; null before it was asked. */
    this.offered = null;
  }

  async ask(api) {
    if (this.offered === false) return;
    const after = Math.max(0, this.seconds?.times.at(-1) ?? 0);
    let told;
    try {
      told = await api.get(`/v2/history?after=${after}`);
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) throw error;
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

/** Something counted in each sample, as a rate. */
export function perSecond(series, name) {
  return series[name].map((number, i) => number / series.spans[i]);
}

/** A sum over the latest samples, no more than so many seconds back. */
export function lately(series, name, seconds) {
  const from = (series.times.at(-1) ?? 0) - seconds;
  return series[name].reduce((sum, number, i) => (series.times[i] > from ? sum + number : sum), 0);
}
