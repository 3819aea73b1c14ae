// The list of the conversations that are kept in this browser: open, rename, delete, export, import.

import { byId, element, setText } from "../dom.js";
import * as store from "./store.js";
import { Conversation, fromExport } from "./tree.js";

const MAX_IMPORT_BYTES = 32 * 1024 * 1024;

export class Library {
  // `open(conversation)` shows one; `fail(message)` says what went wrong.
  constructor({ open, fail }) {
    Object.assign(this, { open, fail, current: null });
    byId("export").addEventListener("click", () => this.#export());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", () => this.#import(byId("import-file").files[0]));
  }

  // Show which conversation is open, and read the list anew.
  async show(conversation) {
    this.current = conversation;
    let titles = [];
    try {
      titles = await store.titles();
    } catch (error) {
      this.fail(`this browser keeps no conversations: ${error.message}`);
    }
    setText(byId("library-title"), `Conversations (${titles.length})`);
    byId("export").disabled = !conversation.path.length;
    byId("conversations").replaceChildren(...titles.map((each) => this.#row(each)));
    byId("library-note").hidden = titles.length > 0;
  }

  async save(conversation) {
    try {
      const wasThere = await store.write(conversation.data, conversation.isKept);
      if (conversation.isKept && !wasThere && conversation === this.current) this.fail("this conversation was deleted in another tab and is not kept any more");
      conversation.isKept = true;
    } catch (error) {
      this.fail(`the conversation could not be kept: ${error.message}`);
      return;
    }
    await this.show(this.current);
  }

  #row({ id, title, updated }) {
    const name = title || "without a title";
    const button = (label, what, act) => element("button", { type: "button", class: "quiet", "aria-label": `${what} ${name}`, title: what, onclick: act }, label);
    const isOpen = id === this.current.id;
    const opener = element("button", { type: "button", class: "quiet title", "aria-current": isOpen ? "true" : null, onclick: () => this.#open(id) }, name,
      element("time", {}, new Date(updated).toLocaleString([], { dateStyle: "short", timeStyle: "short" })));
    const row = element("li", {}, opener, button("✎", "Rename", () => this.#rename(row, id, title)), button("✕", "Delete", () => this.#ask(row, id, name)));
    return row;
  }

  async #open(id) {
    const data = await store.read(id);
    if (data) this.open(new Conversation(data, true));
    else await this.show(this.current); // another tab has deleted it
  }

  #rename(row, id, title) {
    const field = element("input", { type: "text", value: title, maxlength: "200", "aria-label": "Title" });
    const form = element("form", {}, field, element("button", { type: "submit" }, "Rename"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const conversation = id === this.current.id ? this.current : new Conversation({ ...(await store.read(id)), id }, true);
      conversation.title = field.value.trim();
      await this.save(conversation);
    });
    form.addEventListener("keydown", (event) => event.key === "Escape" && this.show(this.current));
    row.replaceChildren(form);
    field.select();
  }

  #ask(row, id, name) {
    const yes = element("button", { type: "button", class: "primary", onclick: () => this.#remove(id) }, "Delete");
    row.replaceChildren(element("span", { class: "title" }, `Delete ${name}?`), yes,
      element("button", { type: "button", onclick: () => this.show(this.current) }, "Keep"));
    yes.focus();
  }

  async #remove(id) {
    await store.remove(id);
    if (id === this.current.id) this.open(new Conversation());
    else await this.show(this.current);
    byId("clear").focus();
  }

  #export() {
    const blob = new Blob([JSON.stringify(this.current.data, null, 1)], { type: "application/json" });
    const link = element("a", { href: URL.createObjectURL(blob), download: `${(this.current.title || "conversation").replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async #import(file) {
    byId("import-file").value = "";
    if (!file) return;
    try {
      if (file.size > MAX_IMPORT_BYTES) throw new Error("it is larger than 32 MiB");
      const conversation = fromExport(JSON.parse(await file.text()));
      this.open(conversation);
      await this.save(conversation);
    } catch (error) {
      this.fail(`${file.name} was not imported: ${error.message}`);
    }
  }
}
