// The blocks of the cache, a cell each. State is shown by colour and by pattern; brightness shows how many references a block has.

import { CACHED, FREE, OWNED, PINNED, STATES } from "./mirror.js";
import { colour, count, element, plural, prepared } from "./dom.js";

const MAX_HEIGHT = { device: 300, host: 120 };
const MAX_CELL = 20;
const MIN_CELL = 2;
const PATTERN_CELL = 7; // smaller cells are plain
const LEVELS = 5; // of brightness: 1, 2, 3 to 4, 5 to 8, more references

const level = (refs) => Math.min(LEVELS - 1, Math.ceil(Math.log2(Math.max(1, refs))));

function mixed(from, to, share) {
  const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [parse(from), parse(to)];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(" ")})`;
}

// One cell, as the map and its legend show it.
export function drawCell(context, x, y, size, { state, refs = 0, filled = 1, marked = false }) {
  const inner = size >= 4 ? size - 1 : size;
  context.fillStyle = colour("leaf");
  context.fillRect(x, y, size, size);
  const patterned = inner >= PATTERN_CELL;
  if (state === FREE) {
    context.fillStyle = colour("free");
    if (!patterned) context.fillRect(x, y, inner, inner);
    else {
      context.fillRect(x, y, inner, inner);
      context.fillStyle = colour("leaf");
      context.fillRect(x + 1, y + 1, inner - 2, inner - 2);
    }
  } else if (state === CACHED) {
    context.fillStyle = colour("cached");
    context.fillRect(x, y, inner, inner);
    if (patterned) hatch(context, x, y, inner);
  } else {
    const base = state === PINNED ? colour("pinned") : mixed(colour("owned"), colour("owned-strong"), level(refs) / (LEVELS - 1));
    context.fillStyle = colour("free");
    context.fillRect(x, y, inner, inner);
    context.fillStyle = base;
    const height = patterned ? Math.max(2, Math.round(inner * filled)) : inner;
    context.fillRect(x, y + inner - height, inner, height);
    if (patterned && refs > 1) corner(context, x, y, inner);
    if (patterned && state === PINNED) {
      context.fillStyle = colour("leaf");
      const dot = Math.max(2, Math.round(inner / 4));
      context.fillRect(x + (inner - dot) / 2, y + (inner - dot) / 2, dot, dot);
    }
  }
  if (marked) {
    context.strokeStyle = colour("ink");
    context.lineWidth = Math.max(1, Math.min(2, size / 6));
    const half = context.lineWidth / 2;
    context.strokeRect(x + half, y + half, inner - 2 * half, inner - 2 * half);
  }
}

function hatch(context, x, y, size) {
  context.strokeStyle = colour("leaf");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x, y + size / 2);
  context.lineTo(x + size / 2, y);
  context.moveTo(x, y + size);
  context.lineTo(x + size, y);
  context.moveTo(x + size / 2, y + size);
  context.lineTo(x + size, y + size / 2);
  context.stroke();
}

// A turned-down corner: the block has several references.
function corner(context, x, y, size) {
  const fold = Math.max(3, size * 0.42);
  context.fillStyle = colour("leaf");
  context.beginPath();
  context.moveTo(x + size - fold, y);
  context.lineTo(x + size, y);
  context.lineTo(x + size, y + fold);
  context.fill();
}

export function fillLegend(list) {
  const cells = [
    ["free", { state: FREE }],
    ["cached: kept for reuse, not in use", { state: CACHED }],
    ["owned", { state: OWNED, refs: 1 }],
    ["partly filled", { state: OWNED, refs: 1, filled: 0.4 }],
    ["shared: color strength shows the number of references", { state: OWNED, refs: 4 }],
    ["pinned", { state: PINNED, refs: 1 }],
  ];
  list.replaceChildren(
    ...cells.map(([text, cell]) => {
      const canvas = element("canvas", { width: 28, height: 28, "aria-hidden": "true" });
      canvas.style.width = canvas.style.height = "14px";
      const context = canvas.getContext("2d");
      context.scale(2, 2);
      drawCell(context, 0, 0, 15, cell);
      return element("li", {}, canvas, text);
    }),
  );
}

// One tier's cells. `describe(text)` is called with a description of the block under the pointer or the cursor.
export class BlockMap {
  constructor(name, title, describe) {
    this.name = name;
    this.title = title;
    this.describe = describe;
    this.heading = element("h3");
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "map of blocks",
      "aria-label": title,
      "aria-describedby": "block-note",
    });
    this.root = element("div", { class: "map-tier" }, this.heading, this.canvas);
    this.cursor = -1;
    this.selected = null;
    this.drawn = null; // what each cell shows, to draw only what changes
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => document.activeElement !== this.canvas && this.#move(-1));
    this.canvas.addEventListener("focus", () => this.cursor < 0 && this.#move(0));
    this.canvas.addEventListener("blur", () => this.#move(-1));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  repaint() {
    this.drawn = null;
  }

  render(mirror, selected) {
    const tier = mirror[this.name];
    this.root.hidden = tier.numBlocks === 0;
    if (this.root.hidden) return;
    this.mirror = mirror;
    this.tier = tier;
    this.selected = selected;
    this.#layOut();
    this.#draw();
    const [free, cached, owned, pinned] = tier.counts();
    const parts = [`${count(free)} free`, `${count(cached)} cached`, `${count(owned)} owned`];
    if (pinned) parts.push(`${count(pinned)} pinned`);
    const text = `${this.title}: ${parts.join(", ")} of ${plural(tier.numBlocks, "block")}`;
    if (this.heading.textContent !== text) {
      this.heading.textContent = text;
      this.canvas.setAttribute("aria-label", text);
    }
    if (this.cursor >= 0) this.#say();
  }

  #layOut() {
    const width = this.canvas.clientWidth;
    const most = MAX_HEIGHT[this.name];
    let size = MAX_CELL;
    while (size > MIN_CELL && Math.ceil(this.tier.numBlocks / Math.max(1, Math.floor(width / size))) * size > most) size -= 1;
    const columns = Math.max(1, Math.floor(width / size));
    const height = Math.ceil(this.tier.numBlocks / columns) * size;
    if (size !== this.size || columns !== this.columns || height !== this.height) this.drawn = null;
    Object.assign(this, { size, columns, height });
  }

  #draw() {
    const isNew = this.drawn === null;
    const before = this.canvas.width;
    const [context] = prepared(this.canvas, this.height);
    if (isNew || before !== this.canvas.width) {
      context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      this.drawn = new Int32Array(this.tier.numBlocks).fill(-1);
    }
    const { tier, drawn, size, columns, selected } = this;
    const blockSize = this.mirror.setup.block_size;
    const steps = size > PATTERN_CELL ? blockSize : 1;
    for (let id = 0; id < tier.numBlocks; id += 1) {
      const state = tier.state[id];
      const refs = tier.refs[id];
      const filled = state === FREE ? 0 : Math.ceil((tier.filled[id] * steps) / blockSize);
      const marked = id === this.cursor || (selected !== null && (tier.owners.get(id)?.includes(selected) ?? false));
      const shown = state | (level(refs) << 2) | ((refs > 1) << 5) | (marked << 6) | (filled << 7);
      if (drawn[id] === shown) continue;
      drawn[id] = shown;
      const x = (id % columns) * size;
      const y = Math.floor(id / columns) * size;
      drawCell(context, x, y, size, { state, refs, filled: tier.filled[id] / blockSize, marked });
    }
  }

  #point(event) {
    if (!this.tier) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const id = Math.floor((event.clientY - box.top) / this.size) * this.columns + column;
    this.#move(column < this.columns && id >= 0 && id < this.tier.numBlocks ? id : -1);
  }

  #key(event) {
    if (!this.tier) return;
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      PageUp: -10 * this.columns, PageDown: 10 * this.columns,
    };
    let to = null;
    if (event.key in steps) to = this.cursor + steps[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.tier.numBlocks - 1;
    if (to === null) return;
    event.preventDefault();
    this.#move(Math.min(Math.max(to, 0), this.tier.numBlocks - 1));
  }

  #move(id) {
    if (id === this.cursor || !this.tier) return;
    this.cursor = id;
    this.#draw();
    this.#say();
  }

  #say() {
    const { tier, cursor: id } = this;
    if (id < 0) return;
    const state = STATES[tier.state[id]];
    const said = [`${this.name === "host" ? "Host block" : "Block"} ${id}: ${state}`];
    if (tier.state[id] !== FREE) {
      const names = (tier.owners.get(id) ?? []).map((order) => this.mirror.requests.get(order)?.id ?? `request ${order}`);
      if (tier.state[id] >= OWNED) {
        said.push(plural(tier.refs[id], "reference") + (names.length ? ` (${names.slice(0, 4).join(", ")}${names.length > 4 ? ", …" : ""})` : ""));
      }
      said.push(`depth ${tier.depth[id]}`, `${tier.filled[id]} of ${this.mirror.setup.block_size} tokens`);
      said.push(tier.hash[id] || tier.parent[id] ? plural(tier.hits[id], "hit") : "not in the prefix tree");
    }
    this.describe(said.join(" · "));
  }
}
