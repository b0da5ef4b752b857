// Puts the page together: what the server says, and where in the page one is, decide what is shown.

import { Api } from "./api.js";
import { make, setText } from "./dom.js";
import { span } from "./format.js";
import { Overview } from "./overview.js";
import { readPlace } from "./place.js";
import { ScopeView } from "./scope.js";
import { SlotView } from "./slot.js";
import { TokenForm } from "./token.js";
import { troubleText } from "./trouble.js";
import { Watch } from "./watch.js";

const api = new Api();
const watch = new Watch(api);
const element = Object.fromEntries(["main", "banner", "freshness", "pause", "forget", "footer"].map((id) => [id, document.getElementById(id)]));
let view = null;

function viewOf(place) {
  const [kind, , inside] = place.parts;
  if (kind === "scope" && (inside === "slot" || inside === "key") && place.parts.length === 4) return new SlotView(watch, place);
  if (kind === "scope" && place.parts.length === 2) return new ScopeView(watch, place);
  return new Overview(watch, place);
}

function open(next, focus) {
  view?.stop?.();
  view = next;
  document.title = `${view.title} – HiCache metadata`;
  element.main.replaceChildren(view.element);
  if (focus) view.element.querySelector("h1")?.focus({ preventScroll: true });
}

function update() {
  if (watch.wantsToken) {
    if (!(view instanceof TokenForm)) {
      open(new TokenForm(useToken), false);
      view.input.focus();
    }
    view.show(api.token ? watch.trouble : null);
  } else if (view === null || view instanceof TokenForm) {
    // Without a first answer there is nothing to show yet.
    if (watch.about) open(viewOf(readPlace(location.hash)), view !== null);
  } else {
    view.show(watch);
  }
  showState();
  showFooter();
}

function showState() {
  const text = watch.wantsToken ? "" : troubleText(watch);
  setText(element.banner, text);
  element.banner.hidden = !text;
  element.banner.classList.toggle("note", !watch.trouble);
  element.main.classList.toggle("old", Boolean(watch.trouble) && !watch.wantsToken);
  element.forget.hidden = !api.token;
  if (view === null && watch.trouble && !watch.wantsToken) setText(element.main, "Nothing to show yet.");
  showFreshness();
}

function showFreshness() {
  const { trouble, paused, updated } = watch;
  const age = (Date.now() - updated) / 1000;
  element.freshness.dataset.state = trouble ? "failing" : paused ? "paused" : "ready";
  setText(element.freshness, !updated ? "" : paused ? `paused ${span(age)} ago` : trouble ? `${span(age)} old` : "up to date");
}

function showFooter() {
  // A browser sends no token when it follows a link.
  const isOpen = !api.token && !watch.wantsToken;
  const others = ["/metrics", "/openapi.json"].map((path) => (isOpen ? make("a", { href: path }, path) : make("code", {}, path)));
  if (element.footer.dataset.open === String(isOpen)) return;
  element.footer.dataset.open = String(isOpen);
  element.footer.replaceChildren("More: ", others[0], " for Prometheus, ", others[1], " describes the routes",
    isOpen ? ". " : "; both take the same token. ", make("code", {}, "hicache metadata --help"), " looks after the server.");
}

async function useToken(token) {
  api.setToken(token);
  await watch.pollAnew();
}

window.addEventListener("hashchange", () => {
  if (!(view instanceof TokenForm) && watch.about) {
    open(viewOf(readPlace(location.hash)), true);
    window.scrollTo(0, 0);
  }
});
element.pause.addEventListener("click", () => {
  watch.pause(!watch.paused);
  element.pause.setAttribute("aria-pressed", watch.paused);
  setText(element.pause, watch.paused ? "Go on" : "Pause");
  showFreshness();
});
element.forget.addEventListener("click", () => useToken(""));
watch.addEventListener("change", update);
setInterval(showFreshness, 1000);
watch.poll();
