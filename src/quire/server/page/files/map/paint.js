// How a cell looks. Lightness shows how many requests share a block, hue which request owns it, and each state has a shape of its own
// as well: an outline is free, hatched is cached, a folded corner is shared, a dot is pinned, a frame is just evicted.

import { colour, element } from "../dom.js";

const PATTERN_CELL = 7; // smaller cells are plain
export const NUMBER_CELL = 15; // larger ones show the number of references
const LEVELS = 5; // of darkness: 2, 3 to 4, 5 to 8, 9 to 16, more references
export const NUM_HUES = 8;

export const hueOf = (order) => (order < 0 ? "cached" : `owner-${order % NUM_HUES}`);
export const levelOf = (refs) => Math.min(LEVELS - 1, Math.max(0, Math.ceil(Math.log2(Math.max(1, refs))) - 1));

const mixtures = new Map();
let hatching = null;
let patterns = new WeakMap();

export function forgetPaint() {
  mixtures.clear();
  hatching = null;
  patterns = new WeakMap();
}

// The colour of blocks with so many references.
export function sharedColour(refs) {
  const level = levelOf(refs);
  if (!mixtures.has(level)) {
    const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const [a, b] = [parse(colour("shared")), parse(colour("shared-strong"))];
    mixtures.set(level, `rgb(${a.map((value, i) => Math.round(value + ((b[i] - value) * level) / (LEVELS - 1))).join(" ")})`);
  }
  return mixtures.get(level);
}

function hatch(context) {
  if (!hatching) {
    const tile = element("canvas", { width: 10, height: 10 });
    const brush = tile.getContext("2d");
    brush.fillStyle = colour("cached");
    brush.fillRect(0, 0, 10, 10);
    brush.strokeStyle = colour("cached-line");
    brush.lineWidth = 2;
    brush.beginPath();
    for (const shift of [-10, 0, 10]) {
      brush.moveTo(shift - 2, 12);
      brush.lineTo(shift + 12, -2);
    }
    brush.stroke();
    hatching = tile;
  }
  if (!patterns.has(context)) {
    const pattern = context.createPattern(hatching, "repeat");
    pattern.setTransform(new DOMMatrix().scale(0.5));
    patterns.set(context, pattern);
  }
  return patterns.get(context);
}

// One cell of the pyramid. `fresh`: content was evicted from it a moment ago; `dim`: another request is selected; `isClear`: nothing was
// drawn there before.
export function drawCell(context, x, y, size, cell, { fresh = false, dim = false, isClear = false } = {}) {
  const inner = size >= 4 ? size - 1 : size;
  const used = cell.shared + cell.owned + cell.pinned + cell.cached;
  if (!isClear) {
    context.fillStyle = colour("leaf");
    context.fillRect(x, y, size, size);
  }
  if (dim) context.globalAlpha = 0.22;
  if (used < cell.size || (cell.size === 1 && cell.filled < 1)) {
    context.fillStyle = colour("free");
    context.fillRect(x, y, inner, inner);
  }
  if (used === 0) {
    if (inner >= PATTERN_CELL) {
      context.fillStyle = colour("free-fill");
      context.fillRect(x + 1, y + 1, inner - 2, inner - 2);
    }
  } else if (cell.size > 1) drawShares(context, x, y, inner, cell);
  else drawBlock(context, x, y, inner, cell);
  if (dim) context.globalAlpha = 1;
  if (fresh) {
    context.strokeStyle = colour("evicted");
    context.lineWidth = inner >= 24 ? 2 : 1;
    const half = context.lineWidth / 2;
    context.strokeRect(x + half, y + half, inner - 2 * half, inner - 2 * half);
  }
}

// Several blocks: their states as layers, as high as they are frequent.
function drawShares(context, x, y, size, cell) {
  let floor = y + size;
  const layer = (number, paint) => {
    if (!number) return;
    const height = Math.max(1, (size * number) / cell.size);
    context.fillStyle = paint;
    context.fillRect(x, Math.max(y, floor - height), size, Math.min(height, floor - y));
    floor -= height;
  };
  layer(cell.pinned, colour("pinned"));
  layer(cell.shared, sharedColour(cell.refs));
  layer(cell.owned, colour(hueOf(cell.lead)));
  layer(cell.cached, size >= PATTERN_CELL ? hatch(context) : colour("cached"));
  if (cell.shared * 2 > cell.size && size >= PATTERN_CELL) fold(context, x, y, size);
}

function drawBlock(context, x, y, size, cell) {
  const patterned = size >= PATTERN_CELL;
  const paint = cell.cached ? (patterned ? hatch(context) : colour("cached")) : cell.pinned ? colour("pinned") : cell.shared ? sharedColour(cell.refs) : colour(hueOf(cell.lead));
  const height = patterned ? Math.max(2, Math.round(size * cell.filled)) : size;
  context.fillStyle = paint;
  context.fillRect(x, y + size - height, size, height);
  if (!patterned) return;
  if (cell.partial) {
    context.fillStyle = colour("ink"); // the line at which the block is being written
    context.fillRect(x, Math.max(y, y + size - height - 1), size, Math.max(1, size / 14));
  }
  if (cell.shared) {
    fold(context, x, y, size);
    if (size >= NUMBER_CELL && size < 60) {
      context.fillStyle = colour("shared-ink");
      context.font = `600 ${Math.round(size * 0.52)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(cell.refs, x + size * 0.46, y + size * 0.58);
      context.textBaseline = "alphabetic";
    }
  }
  if (cell.pinned && size < 60) {
    context.fillStyle = colour("leaf");
    const dot = Math.max(2, Math.round(size / 4));
    context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
  }
}

function fold(context, x, y, size) {
  const side = Math.max(3, Math.min(size * 0.36, 14));
  context.fillStyle = colour("leaf");
  context.beginPath();
  context.moveTo(x + size - side, y);
  context.lineTo(x + size, y);
  context.lineTo(x + size, y + side);
  context.fill();
}

// The slots of one large block, with the texts of its tokens where they are known and there is space.
export function drawSlots(context, x, y, size, { num, filled, texts, inked }) {
  const across = Math.ceil(Math.sqrt(num));
  const margin = Math.max(5, size * 0.05);
  const step = (size - 1 - 2 * margin) / across;
  const font = Math.min(15, step * 0.3);
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let slot = 0; slot < num; slot += 1) {
    const left = x + margin + (slot % across) * step;
    const top = y + margin + Math.floor(slot / across) * step;
    context.fillStyle = colour(slot < filled ? "slot" : "free-fill");
    context.globalAlpha = slot < filled ? 0.92 : 0.5;
    context.fillRect(left + 1, top + 1, step - 2, step - 2);
    context.globalAlpha = 1;
    if (slot >= filled || !texts?.[slot] || step < 26) continue;
    context.fillStyle = colour("ink");
    context.font = `${font.toFixed(1)}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
    context.fillText(fitted(context, shown(texts[slot]), step - 4), left + step / 2, top + step / 2);
  }
  context.textBaseline = "alphabetic";
  if (inked) context.globalAlpha = 1;
}

// White space made visible.
export const shown = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");

export function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length - 1;
  while (end > 0 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return end > 0 ? `${text.slice(0, end)}…` : "";
}

const block = { size: 1, refs: 1, lead: -1, shared: 0, owned: 0, pinned: 0, cached: 0, partial: 0, filled: 1 };
const LEGEND = [
  ["free", {}],
  ["cached, ready for reuse", { cached: 1 }],
  ["used by one request: a color for each", { owned: 1, lead: 0 }, { owned: 1, lead: 2 }, { owned: 1, lead: 6 }],
  ["being written", { owned: 1, lead: 0, partial: 1, filled: 0.45 }],
  ["shared: darker with more requests", { shared: 1, refs: 2 }, { shared: 1, refs: 8 }, { shared: 1, refs: 32 }],
  ["pinned", { pinned: 1 }],
  ["just evicted", { cached: 0, fresh: true }],
  ["several blocks", { size: 10, shared: 2, refs: 4, owned: 4, lead: 0, cached: 2 }],
];

export function fillLegend(list) {
  list.replaceChildren(...LEGEND.map(([text, ...cells]) => {
    const canvas = element("canvas", { width: 36 * cells.length, height: 36, "aria-hidden": "true" });
    canvas.style.width = `${18 * cells.length}px`;
    canvas.style.height = "18px";
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    cells.forEach((cell, i) => drawCell(context, 18 * i, 0, 18, { ...block, ...cell }, { fresh: cell.fresh }));
    return element("li", {}, canvas, text);
  }));
}
