// The map of one tier's blocks. How much a cell stands for depends on the zoom: from thousands of blocks to one block with its tokens.

import { count, element, prepared, setAttribute, setText, widthOf } from "../dom.js";
import { Arranger } from "./arranger.js";
import { Camera } from "./camera.js";
import { layOut, numberAt, spot } from "./curve.js";
import { describe } from "./describe.js";
import { controls } from "./gestures.js";
import { drawLabels } from "./labels.js";
import { drawCell, drawSlots } from "./paint.js";
import { Pyramid } from "./pyramid.js";
import { Tokens } from "./tokens.js";

const HEIGHT = { device: 420, host: 140 };
const MIN_CELL = 10; // smaller cells are drawn together, four at a time
const MAX_FIRST_CELL = 22; // cells of small caches are not larger than this in the whole view
const SLOTS_CELL = 56;
const FRESH_S = 2.5;

export class BlockMap {
  // `say(details)` is called with what is known of the cell under the pointer or the cursor, null for none; `planned(forest)` with the
  // prefix tree, whenever it was computed.
  constructor(name, title, { say, planned = () => {} }) {
    Object.assign(this, { name, title, say, planned });
    this.arrangement = "owner";
    this.plans = { order: null, groups: [] };
    this.cursor = null; // { level, number } of the cell that is described
    this.selected = null;
    this.tokens = new Tokens(name, () => this.#refresh());
    this.camera = new Camera(() => this.#refresh());
    this.arranger = new Arranger((answer, tier) => this.#arranged(answer, tier));
    this.heading = element("h3");
    this.trail = element("nav", { class: "trail", "aria-label": `Part of the ${title.toLowerCase()} shown` });
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "map of blocks", "aria-label": title, "aria-describedby": "map-keys block-note" });
    this.overlay = element("canvas", { class: "overlay", "aria-hidden": "true" });
    const button = (sign, what, act) => element("button", { type: "button", "aria-label": `${what} the ${title.toLowerCase()}`, title: what, onclick: act }, sign);
    this.buttons = [button("−", "Zoom out of", () => this.zoomBy(1 / 2)), button("+", "Zoom into", () => this.zoomBy(2))];
    const head = element("div", { class: "map-head" }, this.heading, this.trail, element("div", { class: "zoom" }, ...this.buttons));
    this.root = element("div", { class: "map-tier" }, head, element("div", { class: "stack" }, this.canvas, this.overlay));
    controls(this);
  }

  // All of it has to be drawn anew, for example in other colours.
  repaint() {
    this.drawn = null;
  }

  #refresh() {
    this.repaint();
    this.animate();
  }

  // Draw in the next frames as long as something moves.
  animate() {
    if (this.frame || !this.mirror) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.camera.step()) this.animate();
      this.#draw();
    });
  }

  render(mirror, selected, arrangement) {
    const tier = mirror[this.name];
    this.root.hidden = tier.numBlocks === 0;
    if (this.root.hidden) return;
    const isAnother = tier !== this.tier;
    if (isAnother || arrangement !== this.arrangement || selected !== this.selected) this.repaint();
    Object.assign(this, { mirror, tier, selected });
    if (isAnother || arrangement !== this.arrangement) this.#arrange(arrangement);
    this.#layOut();
    if (!this.pyramid) this.#sum();
    const changes = tier.journal ?? [];
    if (tier.journal) tier.journal = [];
    if (changes.length > tier.numBlocks) this.#sum();
    else if (changes.length) this.pyramid.update([...new Set(changes)]);
    this.arranger.ask(tier, { order: arrangement === "owner", forest: this.name === "device" }, isAnother);
    if (!this.frame) this.#draw();
  }

  // What is written about the map; this is slower than drawing it.
  renderText() {
    if (this.root.hidden || !this.pyramid) return;
    this.#renderHeading();
    this.describeCursor();
    drawLabels(this);
  }

  #arrange(arrangement) {
    this.arrangement = arrangement;
    if (arrangement === "place" || this.plans.order?.length !== this.tier.numBlocks) this.plans = { order: null, groups: [] };
    if (this.mirror.isLive) this.tier.journal = [];
    this.pyramid = null;
  }

  #arranged({ order, groups, forest }, tier) {
    if (forest) this.planned(forest);
    if (!order || this.arrangement !== "owner" || order.length !== this.tier?.numBlocks) return;
    if (tier !== this.tier && !this.mirror.isLive) return; // of another moment; the next one is on its way
    const held = this.cursor && this.pyramid ? this.pyramid.blockAt(this.cursor.number * 4 ** this.cursor.level) : null;
    this.plans = { order, groups };
    this.#sum();
    if (held !== null) this.cursor.number = this.pyramid.positionOf(held) >> (2 * this.cursor.level);
    this.#refresh();
  }

  #layOut() {
    const width = Math.max(60, widthOf(this.canvas));
    const most = HEIGHT[this.name];
    if (this.laidOut?.width === width && this.laidOut.count === this.tier.numBlocks) return;
    this.laidOut = { width, count: this.tier.numBlocks };
    const world = layOut(this.tier.numBlocks, width, most);
    const scale = Math.min(MAX_FIRST_CELL, world.scale);
    this.height = Math.max(56, Math.min(most, Math.ceil(world.rows * world.side * scale)));
    if (this.world?.order !== world.order) this.pyramid = null;
    this.world = world;
    this.camera.resize(world, width, this.height);
  }

  #sum() {
    this.pyramid = new Pyramid(this.tier, this.mirror.setup.block_size, this.plans.order, this.world.order);
    this.repaint();
  }

  // The level whose cells are large enough now.
  get level() {
    const level = Math.ceil(Math.log2(MIN_CELL / this.camera.now.scale) - 1e-9);
    return Math.max(0, Math.min(this.world.order, level));
  }

  // The cell of a level at a place of the world, -1 if there is none.
  cellAt(level, x, y) {
    const { order, side, columns, rows } = this.world;
    const tileX = Math.floor(x / side);
    const tileY = Math.floor(y / side);
    if (tileX < 0 || tileY < 0 || tileX >= columns || tileY >= rows) return -1;
    const inTile = numberAt(order - level, Math.floor((x - tileX * side) / 2 ** level), Math.floor((y - tileY * side) / 2 ** level));
    const number = (tileY * columns + tileX) * 4 ** (order - level) + inTile;
    return number * 4 ** level < this.tier.numBlocks ? number : -1;
  }

  // The square that a cell takes in the world: its left and upper edge, and its side.
  squareOf({ level, number }) {
    const { order, side, columns } = this.world;
    const perTile = 4 ** (order - level);
    const tile = Math.floor(number / perTile);
    const [x, y] = spot(order - level, number % perTile);
    return [(tile % columns) * side + x * 2 ** level, Math.floor(tile / columns) * side + y * 2 ** level, 2 ** level];
  }

  #draw() {
    const isNew = !this.drawn;
    const before = this.canvas.width;
    const [context, width, height] = prepared(this.canvas, this.height);
    const { level, camera, pyramid } = this;
    const size = 2 ** level;
    const seen = this.#seen(level, width, height);
    const isClear = isNew || before !== this.canvas.width || this.drawn.length !== seen.numbers.length;
    if (isClear) {
      context.clearRect(0, 0, width, height);
      this.drawn = new Int32Array(seen.numbers.length);
    }
    const now = this.mirror.time;
    const marks = this.#marks(level);
    const hasSlots = level === 0 && camera.now.scale >= SLOTS_CELL;
    for (let at = 0; at < seen.numbers.length; at += 1) {
      const number = seen.numbers[at];
      if (number < 0) continue;
      const evicted = pyramid.evictedAt(level, number);
      const fresh = evicted > 0 && now - evicted < FRESH_S;
      const dim = marks !== null && !marks[number];
      const texts = hasSlots ? this.tokens.of(pyramid.blockAt(number)) : null;
      const look = (Math.imul(pyramid.look(level, number), 8) + (fresh ? 4 : 0) + (dim ? 2 : 0) + (texts ? 1 : 0)) | 0 || 1;
      if (this.drawn[at] === look) continue;
      this.drawn[at] = look;
      const column = seen.firstX + (at % seen.columns);
      const row = seen.firstY + Math.floor(at / seen.columns);
      const [x, y] = camera.toView(column * size, row * size).map(Math.round);
      const [endX, endY] = camera.toView((column + 1) * size, (row + 1) * size).map(Math.round);
      const side = Math.min(endX - x, endY - y);
      const cell = pyramid.cell(level, number);
      drawCell(context, x, y, side, cell, { fresh, dim, isClear });
      const num = this.mirror.setup.block_size;
      if (hasSlots && cell.owned + cell.shared + cell.cached + cell.pinned) drawSlots(context, x, y, side, { num, filled: Math.round(cell.filled * num), texts });
    }
    if (level === 0 && camera.goal.scale >= SLOTS_CELL && camera.now === camera.goal) this.#readTokens(seen.numbers);
    if (isClear) drawLabels(this);
  }

  // The cells of a level that are in the view: `numbers` by row and column, -1 where there is none.
  #seen(level, width, height) {
    const { camera, world } = this;
    const known = this.cells;
    if (known && known.camera === camera.now && known.world === world && known.width === width && known.height === height) return known;
    const size = 2 ** level;
    const [left, top] = camera.toWorld(0, 0);
    const [right, bottom] = camera.toWorld(width, height);
    const firstX = Math.max(0, Math.floor(left / size));
    const firstY = Math.max(0, Math.floor(top / size));
    const columns = Math.max(0, Math.min(Math.ceil(right / size), (world.columns * world.side) / size) - firstX);
    const rows = Math.max(0, Math.min(Math.ceil(bottom / size), (world.rows * world.side) / size) - firstY);
    const numbers = new Int32Array(columns * rows);
    for (let at = 0; at < numbers.length; at += 1) {
      numbers[at] = this.cellAt(level, (firstX + (at % columns)) * size, (firstY + Math.floor(at / columns)) * size);
    }
    this.cells = { camera: camera.now, world, width, height, firstX, firstY, columns, numbers };
    return this.cells;
  }

  // Whether the selected request has blocks in each cell; null if none is selected.
  #marks(level) {
    if (this.selected === null) return null;
    const marks = new Uint8Array(Math.ceil(this.tier.numBlocks / 4 ** level));
    const { tier, pyramid, selected } = this;
    for (let id = 0; id < tier.numBlocks; id += 1) {
      if (tier.owner[id] === selected) marks[Math.floor(pyramid.positionOf(id) / 4 ** level)] = 1;
    }
    for (const [id, owners] of tier.sharers) {
      if (owners.includes(selected)) marks[Math.floor(pyramid.positionOf(id) / 4 ** level)] = 1;
    }
    return marks;
  }

  #readTokens(numbers) {
    const ids = [...numbers].filter((number) => number >= 0).map((number) => this.pyramid.blockAt(number));
    this.tokens.want(ids, this.tier, this.mirror.isLive);
  }

  #renderHeading() {
    const { shared, saved, owned, pinned, cached, free } = this.pyramid.totals;
    const parts = [`${count(free)} free`, `${count(cached)} cached`, `${count(owned + shared)} owned`];
    if (pinned) parts.push(`${count(pinned)} pinned`);
    const more = shared ? `; ${count(shared)} shared, which saves ${count(saved)}` : "";
    const text = `${this.title}: ${parts.join(", ")} of ${count(this.tier.numBlocks)} blocks of ${this.mirror.setup.block_size} tokens${more}`;
    setText(this.heading, text);
    setAttribute(this.canvas, "aria-label", text);
    this.#renderTrail();
  }

  // Where one is: the whole, the group or region in the middle, the block.
  #renderTrail() {
    const steps = [["Whole map", () => this.reset()]];
    if (!this.camera.isWhole) {
      const { level } = this;
      const number = this.cursor?.level === level ? this.cursor.number : this.cellAt(level, this.camera.goal.x, this.camera.goal.y);
      const position = Math.max(0, number) * 4 ** level;
      const group = this.groupAt(position);
      if (group) steps.push([this.groupName(group), () => this.zoomToGroup(group)]);
      if (level === 0) steps.push([`Block ${count(this.pyramid.blockAt(position))}`, () => this.zoomTo({ level: 0, number: position }, 1)]);
      else if (!group) {
        const last = Math.min(this.tier.numBlocks, position + 4 ** level) - 1;
        steps.push([`Blocks ${count(position)} to ${count(last)}`, () => this.zoomTo({ level, number }, 1)]);
      }
    }
    this.trailSteps = steps;
    // buttons stay the same elements, so that a press that began on one ends on it
    while (this.trail.children.length > steps.length) this.trail.lastElementChild.remove();
    steps.forEach(([text], i) => {
      const button = this.trail.children[i] ?? this.trail.appendChild(element("button", { type: "button", class: "quiet", onclick: () => this.trailSteps[i]?.[1]() }));
      setText(button, text);
      if (i === steps.length - 1) setAttribute(button, "aria-current", "location");
      else button.removeAttribute("aria-current");
    });
    this.buttons[0].disabled = this.camera.isWhole;
  }

  groupAt(position) {
    const { groups } = this.plans;
    let low = 0;
    let high = groups.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (groups[middle].start <= position) low = middle;
      else high = middle - 1;
    }
    return groups[low];
  }

  groupName({ kind, owners, refs }) {
    if (kind === "owned") return this.mirror.requests.get(owners[0])?.name ?? "ended";
    return kind === "shared" ? `shared by ${count(refs)}` : kind;
  }

  reset() {
    this.camera.moveTo(this.camera.whole);
  }

  // Show one cell, so that it takes this share of the height.
  zoomTo(cell, share) {
    const [x, y, side] = this.squareOf(cell);
    this.camera.moveTo({ x: x + side / 2, y: y + side / 2, scale: (share * Math.min(this.camera.size.width, this.height)) / side });
  }

  zoomToGroup({ start, size }) {
    const level = Math.min(this.world.order, Math.max(0, Math.round(Math.log2(size) / 2)));
    this.zoomTo({ level, number: (start + (size >> 1)) >> (2 * level) }, 0.8);
  }

  // Around the cursor, or else the middle.
  zoomBy(factor) {
    const at = this.cursor ? this.camera.toView(...this.middleOf(this.cursor), this.camera.goal) : [this.camera.size.width / 2, this.height / 2];
    this.camera.zoom(factor, ...at);
  }

  middleOf(cell) {
    const [x, y, side] = this.squareOf(cell);
    return [x + side / 2, y + side / 2];
  }

  // Let the cursor be on this cell; null: nowhere.
  point(cell) {
    if (cell?.level === this.cursor?.level && cell?.number === this.cursor?.number) return;
    this.cursor = cell;
    drawLabels(this);
    this.describeCursor();
    if (this.mirror) this.#renderTrail();
  }

  describeCursor() {
    if (!this.cursor || !this.pyramid) return;
    if (this.cursor.number * 4 ** this.cursor.level >= this.tier.numBlocks) this.cursor = null;
    else this.say(describe(this));
  }
}
