// Address of a view: the fragment of the URL, so that links to a view can be shared.

/** `#/scope/0:kv/key/abc?state=live` as `{ parts: ["scope", "0:kv", "key", "abc"], options }`. */
export function readAddress(fragment) {
  const [path, query = ""] = fragment.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { parts: path.split("/").filter(Boolean).map(readable), options: new URLSearchParams(query) };
}

export function scopeLink(scope, options = {}) {
  return link(["scope", scope], options);
}

export function slotLink(scope, slot) {
  return link(["scope", scope, "slot", String(slot)]);
}

export function keyLink(scope, key) {
  return link(["scope", scope, "key", key]);
}

/** Make a fragment; empty options are left out. */
export function link(parts, options = {}) {
  const given = new URLSearchParams(Object.entries(options).filter(([, value]) => (value ?? "") !== ""));
  const path = parts.map((part) => encodeURIComponent(part).replaceAll("%3A", ":")).join("/");
  return `#/${path}${given.size ? `?${given}` : ""}`;
}

/** Change the options of the address without a new entry in the browser's history. */
export function keepOptions(parts, options) {
  history.replaceState(null, "", link(parts, options));
}

function readable(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
