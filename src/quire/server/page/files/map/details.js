// The panel below the maps: what the cell under the pointer or the cursor contains, who uses it, and its tokens.

import { colour, element, keyed, setText } from "../dom.js";
import { hueOf, shown } from "./paint.js";

export class Details {
  // `choose(order)` is called when a request is chosen.
  constructor(root, choose) {
    this.choose = choose;
    this.title = element("strong");
    this.text = element("span");
    this.owners = element("ul", { class: "owners", "aria-label": "Requests that use it" });
    this.tokens = element("ol", { class: "tokens", "aria-label": "Tokens" });
    this.note = element("span", { class: "hint" });
    this.hint = [...root.childNodes];
    this.root = root;
    this.line = element("p", {}, this.title, " ", this.text);
  }

  show({ title, text, owners, tokens, note }) {
    if (this.line.parentNode !== this.root) this.root.replaceChildren(this.line, this.owners, this.tokens, this.note);
    setText(this.title, `${title}:`);
    setText(this.text, text);
    keyed(this.owners, owners, (owner) => owner.order, (owner) => this.#owner(owner), (item, { order, name }) => {
      setText(item.querySelector("span"), name);
      item.querySelector("i").style.background = order < 0 ? "none" : colour(hueOf(order));
    });
    const pieces = (tokens ?? []).map((piece, i) => ({ i, piece }));
    keyed(this.tokens, pieces, ({ i }) => i, () => element("li"), (item, { piece }) => setText(item, shown(piece)));
    this.tokens.hidden = !pieces.length;
    setText(this.note, note);
  }

  #owner({ order }) {
    const button = element("button", { type: "button", class: "quiet owner", onclick: () => order >= 0 && this.choose(order) }, element("i", { "aria-hidden": "true" }), element("span"));
    return element("li", {}, button);
  }
}
