// Messages about errors.

import { ConnectionError } from "./api.js";
import { timeOfDay } from "./format.js";

/** Reason why the page is not up to date; "" if it is. */
export function errorText(poller) {
  const { lastError, updated, everyMs } = poller;
  if (!lastError) return restartText(poller);
  const old = updated ? ` What is shown is from ${timeOfDay(updated / 1000)}.` : "";
  const again = ` It is asked again every ${everyMs / 1000} s.`;
  if (lastError instanceof ConnectionError) {
    return `The server has not answered since ${timeOfDay(poller.failedSince / 1000)}: ${lastError.message}.${old}${again}`;
  }
  const said = `${lastError.message}${lastError.message.endsWith(".") ? "" : "."}`;
  switch (lastError.status) {
    case 429:
      return `The server says that it is asked too often: ${said}${old}${again}`;
    case 503:
      return `The server cannot answer now: ${said}${old}${again}`;
    default:
      return `The server answered ${lastError.status} ${lastError.code}: ${said}${old}${again}`;
  }
}

const RESTART_SHOWN_MS = 120_000;

function restartText({ restarted }) {
  const isShown = restarted && Date.now() - restarted < RESTART_SHOWN_MS;
  return isShown ? "The server has started anew, and its counters begin at 0." : "";
}
