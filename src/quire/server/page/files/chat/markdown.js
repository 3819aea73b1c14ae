// Markdown as elements. A library splits the text into tokens; the elements are made here, one kind at a time, and text enters them as
// text. So nothing that a model writes can become markup of its own: HTML is shown as it was written, and images are links.

import { Lexer } from "../vendor/marked/marked.esm.js";
import { element } from "../dom.js";

const SAFE = new Set(["http", "https", "mailto"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–", copy: "©" };
const WORK_SHARE = 0.1; // of the time that may be spent on text that is still growing
const MIN_WAIT_MS = 30;

const plain = (text) => text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/gi, (all, decimal, hex, name) => {
  const code = decimal ? Number(decimal) : hex ? parseInt(hex, 16) : 0;
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : ENTITIES[name] ?? all;
});

function tokensOf(text) {
  try {
    return new Lexer({ gfm: true }).lex(text);
  } catch {
    return [{ type: "text", raw: text, text }]; // nested too deeply, for example: the text as it is
  }
}

function link(href, children) {
  let url = null;
  try {
    url = new URL(href, "relative:/");
  } catch {
    // not an address: the text stands alone
  }
  if (!url || !SAFE.has(url.protocol.slice(0, -1))) return element("span", {}, ...children);
  return element("a", { href: url.href, target: "_blank", rel: "noreferrer noopener nofollow" }, ...children);
}

const INLINE = {
  strong: (token) => element("strong", {}, ...inline(token.tokens)),
  em: (token) => element("em", {}, ...inline(token.tokens)),
  del: (token) => element("del", {}, ...inline(token.tokens)),
  codespan: (token) => element("code", {}, token.text),
  br: () => element("br"),
  link: (token) => link(token.href, inline(token.tokens)),
  image: (token) => link(token.href, [`[image: ${plain(token.text)}]`]),
  checkbox: (token) => element("span", {}, token.checked ? "☑ " : "☐ "),
};

function inline(tokens = []) {
  return tokens.map((token) => {
    if (INLINE[token.type]) return INLINE[token.type](token);
    if (token.tokens) return element("span", {}, ...inline(token.tokens));
    return token.type === "html" || token.type === "escape" ? token.text : plain(token.text ?? token.raw);
  });
}

const BLOCKS = {
  space: () => [],
  heading: (token) => [element(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens))],
  paragraph: (token) => [element("p", {}, ...inline(token.tokens))],
  text: (token) => (token.tokens ? inline(token.tokens) : [plain(token.text)]),
  html: (token) => [element("p", { class: "raw" }, token.text)],
  hr: () => [element("hr")],
  blockquote: (token) => [element("blockquote", {}, ...blocks(token.tokens))],
  code: (token) => [codeBlock(token.text, token.lang)],
  list: (token) => [
    element(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null }, ...token.items.map(item)),
  ],
  table: (token) => [
    element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, element("table", {},
      element("thead", {}, element("tr", {}, ...token.header.map((cell) => element("th", {}, ...inline(cell.tokens))))),
      element("tbody", {}, ...token.rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, ...inline(cell.tokens)))))))),
  ],
};

const item = (each) => element("li", {}, ...(each.task ? [each.checked ? "☑ " : "☐ "] : []), ...blocks(each.tokens.filter(({ type }) => type !== "checkbox")));

function blocks(tokens) {
  return tokens.flatMap((token) => (BLOCKS[token.type] ? BLOCKS[token.type](token) : [plain(token.raw ?? "")]));
}

export function codeBlock(text, language = "") {
  const code = element("code", {}, text);
  const copy = element("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", () => copied(copy, code.textContent));
  const name = (language ?? "").split(/\s/)[0].slice(0, 30);
  return element("div", { class: "code-block" }, element("div", { class: "code-head" }, element("span", {}, name || "code"), copy),
    element("pre", { tabindex: "0", "aria-label": name ? `Code in ${name}` : "Code" }, code));
}

// Copy a text, and say on the button whether that worked.
export async function copied(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed to copy";
  }
  setTimeout(() => (button.textContent = before), 2000);
}

// Text that grows. What is before the last block does not change any more and is not read again; the last block is made anew now and
// then, so seldom that even one endless block takes a small share of the time. An open block of code only gets its new text.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.rest = ""; // from the last block on
    this.live = []; // the nodes of the last block
    this.fence = null; // { close, code, from } of a block of code that is still open
    this.due = 0;
  }

  write(text) {
    this.rest += text.replace(/\r\n?/g, "\n");
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.#render();
    }, Math.max(MIN_WAIT_MS, this.due - performance.now()));
  }

  finish() {
    clearTimeout(this.timer);
    this.timer = null;
    this.fence = null;
    this.#render();
  }

  #render() {
    const start = performance.now();
    if (this.fence && this.#growCode()) return;
    const tokens = tokensOf(this.rest);
    while (tokens.at(-1)?.type === "space") tokens.pop();
    for (const node of this.live) node.remove();
    tokens.slice(0, -1).forEach((token) => {
      this.root.append(...blocks([token]));
      this.rest = this.rest.slice(token.raw.length);
    });
    const nodes = blocks(tokens.slice(-1)).map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
    this.live = nodes;
    this.root.append(...nodes);
    this.#openFence();
    const now = performance.now();
    this.due = now + (now - start) / WORK_SHARE;
  }

  #openFence() {
    const found = this.rest.match(/^ {0,3}(`{3,}|~{3,})[^\n]*\n/);
    const code = this.live[0]?.querySelector?.("pre code");
    if (!found || !code) return;
    const close = new RegExp(`^ {0,3}\\${found[1][0]}{${found[1].length},}[ \\t]*$`, "m");
    if (close.test(this.rest.slice(found[0].length))) return;
    code.textContent = this.rest.slice(found[0].length);
    this.fence = { close, code, from: this.rest.length };
  }

  // False if the block has ended.
  #growCode() {
    const { close, code, from } = this.fence;
    const lineStart = this.rest.lastIndexOf("\n", from - 1) + 1;
    if (close.test(this.rest.slice(lineStart))) {
      this.fence = null;
      return false;
    }
    code.append(this.rest.slice(from));
    this.fence.from = this.rest.length;
    return true;
  }
}
