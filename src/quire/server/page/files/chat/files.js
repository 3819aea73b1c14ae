// Text files that are sent with the next message.

import { byId, count, element } from "../dom.js";

const MAX_FILES = 8;
const MAX_BYTES = 256 * 1024; // of one file

export class Files {
  // `fail(message)` is called with what is wrong with a file.
  constructor(fail) {
    this.fail = fail;
    this.files = [];
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => {
      this.#add(byId("file").files);
      byId("file").value = "";
    });
    const zone = byId("composer");
    zone.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      zone.classList.add("dropping");
    });
    for (const name of ["dragleave", "drop"]) zone.addEventListener(name, () => zone.classList.remove("dropping"));
    zone.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.#add(event.dataTransfer.files);
    });
  }

  async #add(list) {
    this.fail("");
    for (const file of list) {
      if (this.files.length >= MAX_FILES) return this.fail(`${file.name} was not attached: at most ${MAX_FILES} files go with a message`);
      if (file.size > MAX_BYTES) {
        this.fail(`${file.name} has ${count(file.size)} bytes: at most ${count(MAX_BYTES)} are allowed`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("it contains zero bytes");
        this.files.push({ name: file.name.slice(0, 200), text });
      } catch {
        this.fail(`${file.name} is not a text file in UTF-8`);
      }
    }
    this.#render();
  }

  // The files, which are then no longer here.
  take() {
    const { files } = this;
    this.files = [];
    this.#render();
    return files.length ? files : undefined;
  }

  put(files = []) {
    this.files = files;
    this.#render();
  }

  #render() {
    byId("files").replaceChildren(...this.files.map((file, i) => element("li", {}, `${file.name} `, element("button", {
      type: "button", class: "quiet", "aria-label": `Remove ${file.name}`,
      onclick: () => {
        this.files.splice(i, 1);
        this.#render();
        byId("attach").focus();
      },
    }, "✕"))));
  }
}
