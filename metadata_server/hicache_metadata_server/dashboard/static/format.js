// Formatting of numbers, times and sizes.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const shortClock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const date = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "long", hourCycle: "h23" });

export const NONE = "–";

export function count(number) {
  return whole.format(number);
}

/** Three significant digits, for rates and times. */
export function figure(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return NONE;
  const size = Math.abs(number);
  if (size >= 100 || size === 0) return whole.format(number);
  return number.toFixed(size >= 10 ? 1 : size >= 1 ? 2 : 3).replace(/\.?0+$/, "");
}

export function share(part, all) {
  if (!all) return NONE;
  const percent = (100 * part) / all;
  // Rounding must not turn nearly all into 100 %, or nearly none into 0 %.
  if (percent > 99.9 && part < all) return "> 99.9%";
  if (percent < 0.1 && part > 0) return "< 0.1%";
  return part === all || part === 0 ? `${percent}%` : `${percent.toFixed(1)}%`;
}

export function bytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  let size = number;
  while (size >= 1024 && i < units.length - 1) {
    size /= 1024;
    i += 1;
  }
  return `${figure(size)} ${units[i]}`;
}

export function milliseconds(seconds) {
  if (seconds === null) return NONE;
  const size = 1000 * seconds;
  return `${size >= 100 ? whole.format(size) : size.toFixed(size >= 10 ? 1 : size >= 1 ? 2 : 3)} ms`;
}

/** A time span in its two largest units. */
export function span(seconds) {
  const parts = [];
  let left = Math.max(0, Math.floor(seconds));
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    if (left >= size || (unit === "s" && !parts.length)) parts.push(`${Math.floor(left / size)} ${unit}`);
    left %= size;
  }
  return parts.slice(0, 2).join(" ");
}

export function timeOfDay(seconds) {
  return clock.format(1000 * seconds);
}

export function hourAndMinute(seconds) {
  return shortClock.format(1000 * seconds);
}

export function fullTime(seconds) {
  return date.format(1000 * seconds);
}

/** Hexadecimal digits of a checksum, which a JavaScript number cannot hold. */
export function hexadecimal(digits) {
  return `0x${BigInt(digits).toString(16).padStart(16, "0")}`;
}
