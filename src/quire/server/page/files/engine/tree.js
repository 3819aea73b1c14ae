// The prefix tree as a list of runs of blocks, to be folded and unfolded.

import { count, keyed, element, plural, setAttribute, setText } from "../dom.js";

const MAX_ROWS = 150;

export class PrefixTree {
  constructor(list, note) {
    this.list = list;
    this.note = note;
    this.forest = null; // as arrange.js makes it
    this.folded = new Set();
    this.focused = null; // id of the row that Tab reaches
    list.addEventListener("keydown", (event) => this.#key(event));
  }

  // `turn`: as in `keyed`.
  render(turn) {
    const { forest } = this;
    if (!forest) return;
    const rows = [];
    const open = forest.roots.map((node) => [node, 1]).reverse();
    while (open.length) {
      const [node, depth] = open.pop();
      if (rows.length < MAX_ROWS) rows.push({ ...node, depth });
      if (!this.folded.has(node.id)) open.push(...node.children.map((child) => [child, depth + 1]).reverse());
    }
    const most = Math.max(1, ...rows.map((row) => row.hits));
    if (!rows.some((row) => row.id === this.focused)) this.focused = rows.length ? rows[0].id : null;
    // Of all rows, also those whose turn it is not: one of them must be reached by Tab, or the list cannot be scrolled by keys.
    for (const item of this.list.children) this.#setReach(item, Number(item.dataset.key));
    keyed(this.list, rows, (row) => row.id, () => this.#make(), (item, row) => this.#update(item, row, most), turn);
    setText(this.note, rows.length === 0 ? "The cache is empty." : forest.numRuns > rows.length ? `and ${count(forest.numRuns - rows.length)} more runs, folded or further down` : "");
  }

  #make() {
    const part = (name) => element("span", { class: name });
    const twist = element("span", { class: "twist", "aria-hidden": "true" });
    const item = element("li", { role: "treeitem" }, twist, part("run"), part("weight"), part("hits"));
    item.addEventListener("click", () => this.#fold(item, item.getAttribute("aria-expanded") === "true"));
    item.addEventListener("focus", () => (this.focused = Number(item.dataset.key)));
    return item;
  }

  #update(item, row, most) {
    const [twist, run, weight, hits] = item.children;
    const folded = this.folded.has(row.id);
    item.style.paddingLeft = `${Math.min(row.depth - 1, 12) * 14 + 4}px`;
    setText(twist, row.children.length ? (folded ? "▸" : "▾") : "·");
    const shared = row.refs > 1 ? `, ${row.refs} references` : row.refs === 1 ? ", in use" : "";
    setText(run, `${plural(row.size, "block")} from ${row.id}, ${plural(row.tokens, "token")}${shared}`);
    setText(hits, plural(row.hits, "hit"));
    weight.style.backgroundSize = `${((100 * row.hits) / most).toFixed(0)}% 100%`;
    setAttribute(item, "aria-level", row.depth);
    this.#setReach(item, row.id);
    if (row.children.length) setAttribute(item, "aria-expanded", !folded);
    else item.removeAttribute("aria-expanded");
  }

  #setReach(item, id) {
    setAttribute(item, "tabindex", id === this.focused ? 0 : -1);
  }

  #fold(item, fold) {
    if (!item.hasAttribute("aria-expanded")) return;
    if (fold) this.folded.add(Number(item.dataset.key));
    else this.folded.delete(Number(item.dataset.key));
    this.render(null);
  }

  #key(event) {
    const item = event.target.closest("li");
    if (!item) return;
    const to = {
      ArrowDown: item.nextElementSibling,
      ArrowUp: item.previousElementSibling,
      Home: this.list.firstElementChild,
      End: this.list.lastElementChild,
    };
    if (event.key in to) to[event.key]?.focus();
    else if (event.key === "ArrowRight") this.#fold(item, false);
    else if (event.key === "ArrowLeft") this.#fold(item, true);
    else if (event.key === "Enter" || event.key === " ") this.#fold(item, item.getAttribute("aria-expanded") === "true");
    else return;
    event.preventDefault();
  }
}
