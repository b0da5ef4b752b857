// Form for the token, if the server needs one.

import { make, setText } from "./dom.js";

/** `onToken` is called with the entered token. */
export class TokenForm {
  title = "Token";

  constructor(onToken) {
    this.said = make("p", { role: "alert" });
    this.input = make("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-note" });
    this.button = make("button", { class: "main" }, "Use it");
    const submit = async (event) => {
      event.preventDefault();
      this.button.disabled = true;
      await onToken(this.input.value.trim());
      this.button.disabled = false;
    };
    this.element = make("form", { class: "card token", onsubmit: submit },
      make("h1", { tabindex: "-1" }, "This server asks for a token"), this.said,
      make("label", { for: "token" }, "Token"), make("div", { class: "search" }, this.input, this.button),
      make("p", { class: "quiet", id: "token-note" }, "One that permits reading is enough. It stays in this tab until the tab is closed, and goes to this server only."));
  }

  /** `refused` is the error of the last token, or null. */
  show(refused) {
    setText(this.said, refused === null ? "" : refused.status === 403 ?
      `This token is known and does not permit reading: ${refused.message}.` : `The server refuses this token: ${refused.message}.`);
    this.said.hidden = refused === null;
    this.input.setAttribute("aria-invalid", refused !== null);
  }
}
