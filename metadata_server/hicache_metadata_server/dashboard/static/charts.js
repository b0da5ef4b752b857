// Charts of the server over time.

import { Chart } from "./chart.js";
import { make } from "./dom.js";
import { NONE, count, figure } from "./format.js";
import { perSecond } from "./history.js";

const RANGES = [
  { name: "10 minutes", series: "seconds", seconds: 600 },
  { name: "24 hours", series: "minutes", seconds: 86_400 },
];

const percent = (value) => (value === null ? NONE : value > 0 && value < 0.05 ? "< 0.1%" : `${value.toFixed(1).replace(".0", "")}%`);
const plain = (value) => (value === null ? NONE : value >= 10_000 ? count(value) : figure(value));
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const compact = (value) => (value === null ? NONE : short.format(value));

const CHARTS = [
  {
    chart: { title: "Requests", unit: "per second", format: compact, lines: [
      { name: "answered", style: "one", area: true }, { name: "4xx", style: "two dashed" }, { name: "5xx", style: "three dotted" },
    ] },
    columns: (series) => ["requests", "refused", "failed"].map((name) => perSecond(series, name)),
  },
  {
    chart: { title: "Hit ratio", unit: "% of keys asked for", format: percent, ceiling: 100, lines: [
      { name: "live", style: "one", area: true },
    ] },
    columns: (series) => [series.hits.map((hits, i) => ratio(hits, series.misses[i]))],
  },
  {
    chart: { title: "Time to answer", unit: "ms", format: plain, logarithmic: true, lines: [
      { name: "median", style: "one" }, { name: "99th percentile", style: "two dashed" },
    ] },
    columns: (series) => [series.median_seconds, series.p99_seconds].map((column) =>
      column.map((seconds) => (seconds === null ? null : 1000 * seconds))),
  },
  {
    chart: { title: "Evictions", unit: "pages per second", format: compact, lines: [{ name: "evicted", style: "four", area: true }] },
    columns: (series) => [perSecond(series, "evicted")],
  },
  {
    chart: { title: "Occupancy", unit: "% of slots", format: percent, ceiling: 100, stacked: true, lines: [
      { name: "live", style: "live", area: true }, { name: "leased", style: "leased", area: true },
      { name: "quarantined", style: "quarantined", area: true },
    ] },
    columns: (series) => ["live", "leased", "quarantined"].map((state) =>
      series[state].map((slots, i) => ratio(slots, series.live[i] + series.leased[i] + series.quarantined[i] + series.free[i] - slots))),
  },
  {
    chart: { title: "Leases and quarantine", unit: "slots", format: compact, lines: [
      { name: "leased", style: "leased" }, { name: "quarantined", style: "quarantined dashed" },
    ] },
    columns: (series) => [series.leased, series.quarantined],
  },
];

/** Charts with a choice of ranges; `onRange` is called with the index of the chosen range. */
export class Charts {
  constructor(range, onRange) {
    this.range = RANGES[range] ?? RANGES[0];
    this.charts = CHARTS.map(({ chart }) => new Chart(chart));
    this.note = make("p", { class: "quiet" });
    const choices = RANGES.map((choice, i) => make("label", {},
      make("input", { type: "radio", name: "range", checked: choice === this.range, onchange: () => this.#choose(i, onRange) }),
      make("span", {}, choice.name)));
    this.element = make("section", { "aria-labelledby": "over-time" },
      make("div", { class: "heading" }, make("h2", { id: "over-time" }, "Over time"),
        make("div", { class: "choice", role: "group", "aria-label": "Range" }, choices)),
      this.note, make("div", { class: "charts" }, this.charts.map((chart) => chart.element)));
  }

  #choose(i, onRange) {
    this.range = RANGES[i];
    onRange(i);
    if (this.past) this.show(this.past);
  }

  show(past) {
    this.past = past;
    const series = past[this.range.series];
    this.note.textContent = past.offered === false ? "This server keeps no history." : series?.times.length ? "" :
      `The first ${this.range.series === "seconds" ? "second" : "minute"} since the start is not over yet.`;
    this.note.hidden = !this.note.textContent;
    if (!series) return;
    const to = Math.max(past.now, series.times.at(-1) ?? 0);
    // The chart of a server younger than the range starts with the server, so that it is not empty.
    const from = Math.max(to - this.range.seconds, Math.min(past.started, to - 2 * 60));
    const shown = { times: series.times, stepSeconds: series.step_seconds, from, to };
    this.charts.forEach((chart, i) => chart.show({ ...shown, columns: CHARTS[i].columns(series) }));
  }
}

function ratio(part, rest) {
  return part + rest > 0 ? (100 * part) / (part + rest) : null;
}
