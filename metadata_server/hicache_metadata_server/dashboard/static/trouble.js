// What went wrong, in words.

import { Unreachable } from "./api.js";
import { timeOfDay } from "./format.js";

/** A sentence or two about why the page is not up to date; "" if it is. */
export function troubleText(watch) {
  const { trouble, updated, everyMs } = watch;
  if (!trouble) return restartText(watch);
  const old = updated ? ` What is shown is from ${timeOfDay(updated / 1000)}.` : "";
  const again = ` It is asked again every ${everyMs / 1000} s.`;
  if (trouble instanceof Unreachable) {
    return `The server has not answered since ${timeOfDay(watch.troubled / 1000)}: ${trouble.message}.${old}${again}`;
  }
  const said = `${trouble.message}${trouble.message.endsWith(".") ? "" : "."}`;
  switch (trouble.status) {
    case 429:
      return `The server says that it is asked too often: ${said}${old}${again}`;
    case 503:
      return `The server cannot answer now: ${said}${old}${again}`;
    default:
      return `The server answered ${trouble.status} ${trouble.code}: ${said}${old}${again}`;
  }
}

const RESTART_SHOWN_MS = 120_000;

function restartText({ restarted }) {
  const isShown = restarted && Date.now() - restarted < RESTART_SHOWN_MS;
  return isShown ? "The server has started anew, and its counters begin at 0." : "";
}
