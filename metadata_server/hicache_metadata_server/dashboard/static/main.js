// Entry point: chooses the view by the address and by the state of the server.

import { Api } from "./api.js";
import { make, setText } from "./dom.js";
import { span } from "./format.js";
import { Overview } from "./overview.js";
import { readAddress } from "./address.js";
import { ScopeView } from "./scope.js";
import { SlotView } from "./slot.js";
import { TokenForm } from "./token.js";
import { errorText } from "./errors.js";
import { Poller } from "./poller.js";

const api = new Api();
const poller = new Poller(api);
const element = Object.fromEntries(["main", "banner", "freshness", "pause", "forget", "footer"].map((id) => [id, document.getElementById(id)]));
let view = null;

function viewOf(place) {
  const [kind, , inside] = place.parts;
  if (kind === "scope" && (inside === "slot" || inside === "key") && place.parts.length === 4) return new SlotView(poller, place);
  if (kind === "scope" && place.parts.length === 2) return new ScopeView(poller, place);
  return new Overview(poller, place);
}

function open(next, focus) {
  view?.stop?.();
  view = next;
  document.title = `${view.title} – HiCache metadata`;
  element.main.replaceChildren(view.element);
  if (focus) view.element.querySelector("h1")?.focus({ preventScroll: true });
}

function update() {
  if (poller.wantsToken) {
    if (!(view instanceof TokenForm)) {
      open(new TokenForm(useToken), false);
      view.input.focus();
    }
    view.show(api.token ? poller.lastError : null);
  } else if (view === null || view instanceof TokenForm) {
    // Before the first response there is nothing to show.
    if (poller.about) open(viewOf(readAddress(location.hash)), view !== null);
  } else {
    view.show(poller);
  }
  showState();
  showFooter();
}

function showState() {
  const text = poller.wantsToken ? "" : errorText(poller);
  setText(element.banner, text);
  element.banner.hidden = !text;
  element.banner.classList.toggle("note", !poller.lastError);
  element.main.classList.toggle("old", Boolean(poller.lastError) && !poller.wantsToken);
  element.forget.hidden = !api.token;
  if (view === null && poller.lastError && !poller.wantsToken) setText(element.main, "Nothing to show yet.");
  showFreshness();
}

function showFreshness() {
  const { lastError, paused, updated } = poller;
  const age = (Date.now() - updated) / 1000;
  element.freshness.dataset.state = lastError ? "failing" : paused ? "paused" : "ready";
  setText(element.freshness, !updated ? "" : paused ? `paused ${span(age)} ago` : lastError ? `${span(age)} old` : "up to date");
}

function showFooter() {
  // No links where the server needs a token: a browser sends none when it follows a link.
  const isOpen = !api.token && !poller.wantsToken;
  const others = ["/metrics", "/openapi.json"].map((path) => (isOpen ? make("a", { href: path }, path) : make("code", {}, path)));
  if (element.footer.dataset.open === String(isOpen)) return;
  element.footer.dataset.open = String(isOpen);
  element.footer.replaceChildren("More: ", others[0], " for Prometheus, ", others[1], " describes the routes",
    isOpen ? ". " : "; both take the same token. ", make("code", {}, "hicache metadata --help"), " looks after the server.");
}

async function useToken(token) {
  api.setToken(token);
  await poller.pollAnew();
}

window.addEventListener("hashchange", () => {
  if (!(view instanceof TokenForm) && poller.about) {
    open(viewOf(readAddress(location.hash)), true);
    window.scrollTo(0, 0);
  }
});
element.pause.addEventListener("click", () => {
  poller.pause(!poller.paused);
  element.pause.setAttribute("aria-pressed", poller.paused);
  setText(element.pause, poller.paused ? "Go on" : "Pause");
  showFreshness();
});
element.forget.addEventListener("click", () => useToken(""));
poller.addEventListener("change", update);
setInterval(showFreshness, 1000);
poller.poll();
