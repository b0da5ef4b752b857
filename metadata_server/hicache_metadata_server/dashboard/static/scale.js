// Positions of a chart's grid lines.

/** About `wanted` round values from 0 to at least `most`. */
export function ticks(most, wanted = 4) {
  const rough = (most || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const count = Math.max(1, Math.ceil((most || 1) / step - 1e-9));
  return Array.from({ length: count + 1 }, (_, i) => i * step);
}

/** Powers of ten that enclose the values; the least value must be above 0. */
export function decades(least, most) {
  const [first, last] = [Math.floor(Math.log10(least)), Math.max(Math.ceil(Math.log10(most)), Math.floor(Math.log10(least)) + 1)];
  return Array.from({ length: last - first + 1 }, (_, i) => 10 ** (first + i));
}

const STEPS = [10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600];

/** Round times of the local clock within a range, in seconds since 1970. */
export function timeTicks(from, to, most) {
  const step = STEPS.find((size) => (to - from) / size <= most) ?? 43200;
  const shift = 60 * new Date(1000 * to).getTimezoneOffset();
  const found = [];
  for (let time = Math.ceil((from - shift) / step) * step + shift; time <= to; time += step) found.push(time);
  return found;
}

/** Index of the sample nearest to a time. */
export function nearest(times, time) {
  let low = 0;
  let high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low > 0 && time - times[low - 1] < times[low] - time ? low - 1 : low;
}
