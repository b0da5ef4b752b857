// Line chart over time, as SVG. The legend shows the latest values, or those at the cursor.

import { make, makeSvg, setText } from "./dom.js";
import { NONE, hourAndMinute, timeOfDay } from "./format.js";
import { decades, nearest, ticks, timeTicks } from "./scale.js";

const HEIGHT = 150;
const LEFT = 46;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;
/** Number of steps between two samples above which the line has a gap. */
const GAP = 2.5;

/**
 * `lines` are `{ name, style, area }`, `style` being a class that CSS gives a colour and a dash; with `stacked` each stands on those
 * before it. `ceiling` is where the axis ends; without it, it ends above the highest value. A `logarithmic` one shows no zeros.
 */
export class Chart {
  constructor({ title, unit, lines, format, ceiling = null, stacked = false, logarithmic = false }) {
    Object.assign(this, { title, unit, lines, format, ceiling, stacked, logarithmic });
    this.width = 0;
    this.data = null;
    this.cursor = null;
    this.values = lines.map(() => make("b", {}, NONE));
    const legend = lines.map((line, i) => make("li", {}, swatch(line), `${line.name} `, this.values[i]));
    this.when = make("span", { class: "when" }, "");
    this.svg = makeSvg("svg", { height: HEIGHT, role: "img", tabindex: "0", onkeydown: (event) => this.#key(event) });
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => this.#moveTo(null));
    this.svg.addEventListener("blur", () => this.#moveTo(null));
    this.element = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, make("h3", {}, title, " ", make("small", {}, unit)), make("ul", { class: "legend" }, legend), this.when),
      this.svg,
    );
    new ResizeObserver(() => this.#resize()).observe(this.element);
  }

  /** `columns` has a list of numbers (or null, for no value) for each line. */
  show({ times, stepSeconds, from, to, columns }) {
    const at = this.cursor === null ? null : this.data.times[this.cursor];
    this.data = { times, stepSeconds, from, to, columns: this.stacked ? piledUp(columns) : columns, values: columns };
    this.cursor = at === null || !times.length ? null : nearest(times, at);
    this.#draw();
  }

  #resize() {
    const width = Math.floor(this.element.clientWidth);
    if (width === this.width) return;
    this.width = width;
    if (this.data) this.#draw();
  }

  #draw() {
    if (this.width < LEFT + RIGHT + 20) return;
    const { from, to, columns } = this.data;
    const levels = this.#levels(columns.flat().filter((value) => value !== null));
    const place = this.logarithmic ? Math.log10 : (value) => value;
    const [bottom, top] = [place(levels[0]), place(levels.at(-1))];
    this.x = (time) => LEFT + ((time - from) / (to - from)) * (this.width - LEFT - RIGHT);
    this.y = (value) => TOP + (1 - (place(value) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.width);
    this.mark = makeSvg("g", { class: "cursor" });
    this.svg.replaceChildren(this.#grid(levels), this.#axis(from, to), ...this.#areas(), ...this.#paths(), this.mark);
    this.#tell();
  }

  #levels(values) {
    const highest = this.ceiling ?? values.reduce((most, value) => Math.max(most, value), 0);
    if (!this.logarithmic) return ticks(highest);
    return decades(values.reduce((least, value) => (value > 0 ? Math.min(least, value) : least), highest || 1), highest || 1);
  }

  #grid(levels) {
    const right = this.width - RIGHT;
    return makeSvg("g", { class: "grid" }, levels.map((level) => [
      makeSvg("line", { x1: LEFT, x2: right, y1: this.y(level), y2: this.y(level) }),
      makeSvg("text", { x: LEFT - 6, y: this.y(level) + 4, "text-anchor": "end" }, this.format(level)),
    ]).flat());
  }

  #axis(from, to) {
    const times = timeTicks(from, to, Math.max(2, Math.floor(this.width / 80)));
    const named = times.some((time) => time % 60) ? timeOfDay : hourAndMinute;
    return makeSvg("g", { class: "axis" }, times.map((time) => [
      makeSvg("line", { x1: this.x(time), x2: this.x(time), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }),
      makeSvg("text", { ...this.#under(this.x(time)), y: HEIGHT - 5 }, named(time)),
    ]).flat());
  }

  /** Position at which a label fits, also near the right end. */
  #under(x) {
    return x > this.width - 28 ? { x: this.width - 2, "text-anchor": "end" } : { x, "text-anchor": "middle" };
  }

  #areas() {
    return this.lines.map((line, i) => {
      if (!line.area) return null;
      const floor = this.stacked && i > 0 ? this.data.columns[i - 1] : null;
      const path = this.#runs(i).map((run) => {
        const above = run.map((k) => this.#at(k, this.data.columns[i][k])).join("L");
        const below = run.toReversed().map((k) => this.#at(k, floor ? floor[k] : 0)).join("L");
        return `M${above}L${below}Z`;
      });
      return makeSvg("path", { class: `area ${line.style}`, d: path.join("") });
    }).filter((path) => path !== null);
  }

  #paths() {
    return this.lines.map((line, i) => {
      // A single sample has no line, so it gets a short dash.
      const path = this.#runs(i).map((run) => `M${run.map((k) => this.#at(k, this.data.columns[i][k])).join("L")}${run.length > 1 ? "" : "m-1.5 0h3"}`);
      return makeSvg("path", { class: `line ${line.style}`, d: path.join("") });
    });
  }

  #at(k, value) {
    return `${this.x(this.data.times[k]).toFixed(1)} ${this.y(value).toFixed(1)}`;
  }

  /** Indices of samples without a gap between them, as lists; samples older than the axis are left out. */
  #runs(i) {
    const { times, stepSeconds, from, columns } = this.data;
    const runs = [];
    let last = -Infinity;
    columns[i].forEach((value, k) => {
      if (value === null || times[k] < from || (this.logarithmic && value <= 0)) return;
      if (last !== k - 1 || times[k] - times[last] > GAP * stepSeconds) runs.push([]);
      runs.at(-1).push(k);
      last = k;
    });
    return runs;
  }

  #point(event) {
    if (!this.data?.times.length || !this.x) return;
    const { from, to, times } = this.data;
    const along = (event.clientX - this.svg.getBoundingClientRect().left - LEFT) / (this.width - LEFT - RIGHT);
    this.#moveTo(nearest(times, from + along * (to - from)));
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -Infinity, End: Infinity }[event.key];
    const last = (this.data?.times.length ?? 0) - 1;
    if (step === undefined || last < 0) return;
    event.preventDefault();
    this.#moveTo(Math.min(last, Math.max(0, (this.cursor ?? last) + step)));
  }

  #moveTo(cursor) {
    this.cursor = cursor;
    if (this.data) this.#tell();
  }

  /** The values at the cursor, or the latest. */
  #tell() {
    const { times, values, from } = this.data;
    const at = this.cursor ?? times.length - 1;
    this.values.forEach((element, i) => setText(element, this.format(values[i][at] ?? null)));
    setText(this.when, this.cursor === null ? "" : timeOfDay(times[at]));
    const said = this.lines.map((line, i) => `${line.name} ${this.format(values[i][at] ?? null)}`).join(", ");
    const when = this.cursor === null ? "now" : `at ${timeOfDay(times[at])}`;
    this.svg.setAttribute("aria-label", `${this.title}, ${this.unit}, ${when}: ${times.length ? said : "nothing yet"}.`);
    if (!this.mark) return;
    if (this.cursor === null || times[at] < from) this.mark.replaceChildren();
    else this.#drawMark(at);
  }

  #drawMark(at) {
    const x = this.x(this.data.times[at]);
    const dots = this.lines.map((line, i) => {
      const value = this.data.columns[i][at];
      return value === null ? null : makeSvg("circle", { class: line.style, cx: x, cy: this.y(value), r: 3.5 });
    });
    this.mark.replaceChildren(makeSvg("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), ...dots.filter((dot) => dot !== null));
  }
}

function piledUp(columns) {
  const sums = columns[0].map(() => 0);
  return columns.map((column) => column.map((value, k) => (sums[k] += value ?? 0)));
}

function swatch(line) {
  return makeSvg("svg", { class: "swatch", width: 18, height: 10, "aria-hidden": "true" },
    line.area ? makeSvg("path", { class: `area ${line.style}`, d: "M0 1H18V9H0Z" }) : null,
    makeSvg("path", { class: `line ${line.style}`, d: line.area ? "M0 1H18" : "M1 5H17" }));
}
