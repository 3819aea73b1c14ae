// Which part of the map is seen: the world is measured in blocks, the view in pixels. Movements take a moment, unless the user wants none.

const MOVE_MS = 180;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Camera {
  constructor(changed) {
    this.changed = changed;
    this.world = { columns: 1, rows: 1, side: 1 };
    this.size = { width: 1, height: 1 };
    this.now = this.goal = { x: 0.5, y: 0.5, scale: 1 }; // what is in the middle, and pixels for each block
    this.isWhole = true;
    this.movedAt = 0;
  }

  // The world or the view has another size.
  resize(world, width, height) {
    const same = world.side === this.world.side && world.columns === this.world.columns && world.rows === this.world.rows;
    if (same && width === this.size.width && height === this.size.height) return;
    this.world = world;
    this.size = { width, height };
    if (this.isWhole) this.now = this.goal = this.whole;
    else this.now = this.goal = this.#bounded(this.goal);
    this.changed();
  }

  get whole() {
    const { columns, rows, side } = this.world;
    const scale = Math.min(this.size.width / (columns * side), this.size.height / (rows * side));
    return { x: (columns * side) / 2, y: (rows * side) / 2, scale };
  }

  get most() {
    return 0.92 * Math.min(this.size.width, this.size.height);
  }

  #bounded({ x, y, scale }) {
    const whole = this.whole;
    const fit = Math.min(Math.max(scale, whole.scale), Math.max(this.most, whole.scale));
    const middle = (value, cells, pixels) => {
      const half = pixels / 2 / fit;
      return half * 2 >= cells ? cells / 2 : Math.min(Math.max(value, half), cells - half);
    };
    const { columns, rows, side } = this.world;
    return { x: middle(x, columns * side, this.size.width), y: middle(y, rows * side, this.size.height), scale: fit };
  }

  moveTo(goal, atOnce = false) {
    this.goal = this.#bounded(goal);
    this.movedAt = performance.now();
    this.isWhole = this.goal.scale <= this.whole.scale * 1.001;
    if (atOnce || still.matches) this.now = this.goal;
    else {
      this.from = this.now;
      this.began = performance.now();
    }
    this.changed();
  }

  // Zoom by a factor around a point of the view; what is there stays there.
  zoom(factor, px, py, atOnce = false) {
    const [x, y] = this.toWorld(px, py, this.goal);
    const scale = Math.min(Math.max(this.goal.scale * factor, this.whole.scale), this.most);
    const { width, height } = this.size;
    this.moveTo({ x: x - (px - width / 2) / scale, y: y - (py - height / 2) / scale, scale }, atOnce);
  }

  pan(dx, dy) {
    const { x, y, scale } = this.goal;
    this.moveTo({ x: x - dx / scale, y: y - dy / scale, scale }, true);
  }

  // Go on moving. False: there is nothing to move.
  step() {
    if (this.now === this.goal) return false;
    const part = Math.min(1, (performance.now() - this.began) / MOVE_MS);
    if (part >= 1) this.now = this.goal;
    else {
      const eased = 1 - (1 - part) ** 3;
      const scale = this.from.scale * (this.goal.scale / this.from.scale) ** eased;
      // the middle moves with the scale, so that the point zoomed at does not swerve
      const moved = this.from.scale === this.goal.scale ? eased : (1 / this.from.scale - 1 / scale) / (1 / this.from.scale - 1 / this.goal.scale);
      this.now = { x: this.from.x + (this.goal.x - this.from.x) * moved, y: this.from.y + (this.goal.y - this.from.y) * moved, scale };
    }
    return true;
  }

  toWorld(px, py, { x, y, scale } = this.now) {
    return [x + (px - this.size.width / 2) / scale, y + (py - this.size.height / 2) / scale];
  }

  toView(x, y, camera = this.now) {
    return [(x - camera.x) * camera.scale + this.size.width / 2, (y - camera.y) * camera.scale + this.size.height / 2];
  }
}
