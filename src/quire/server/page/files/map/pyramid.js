// What each cell of the map contains, on all levels: a cell of level n stands for 4^n blocks that follow one another in the arrangement
// shown. When blocks change, only the cells above them are computed again.

import { CACHED, OWNED, PINNED } from "../engine/mirror.js";

const COUNTS = ["shared", "saved", "owned", "pinned", "cached", "partial"]; // saved: blocks that sharing makes unnecessary

const mixed = (look, part) => Math.imul(look ^ part, 0x9e3779b1) ^ (look >>> 15);

export class Pyramid {
  // `order`: the blocks by position, null for the order of their numbers. `top`: the highest level.
  constructor(tier, blockSize, order, top) {
    Object.assign(this, { tier, blockSize, order, top });
    this.count = tier.numBlocks;
    this.rank = null;
    if (order) {
      this.rank = new Int32Array(this.count);
      for (let at = 0; at < this.count; at += 1) this.rank[order[at]] = at;
    }
    this.levels = [null]; // level 0 is the tier itself
    for (let level = 1; level <= top; level += 1) {
      const size = Math.ceil(this.count / 4 ** level);
      const cells = { refs: new Uint32Array(size), lead: new Int32Array(size).fill(-1), led: new Uint32Array(size), evicted: new Float64Array(size) };
      for (const name of COUNTS) cells[name] = new Uint32Array(size);
      this.levels.push(cells);
      for (let cell = 0; cell < size; cell += 1) this.#sum(level, cell);
    }
  }

  blockAt(position) {
    return this.order ? this.order[position] : position;
  }

  positionOf(id) {
    return this.rank ? this.rank[id] : id;
  }

  // Take over the changes of these blocks.
  update(ids) {
    let cells = ids.map((id) => this.positionOf(id));
    for (let level = 1; level <= this.top && cells.length; level += 1) {
      const above = new Set();
      for (const cell of cells) above.add(cell >> 2);
      cells = [...above];
      for (const cell of cells) this.#sum(level, cell);
    }
  }

  #sum(level, cell) {
    const into = this.levels[level];
    const from = this.levels[level - 1];
    const end = Math.min(cell * 4 + 4, from ? from.refs.length : this.count);
    let shared = 0, saved = 0, owned = 0, pinned = 0, cached = 0, partial = 0, refs = 0, evicted = 0, lead = -1, led = 0;
    for (let child = cell * 4; child < end; child += 1) {
      let leader = -1;
      let weight = 0;
      if (from) {
        shared += from.shared[child];
        saved += from.saved[child];
        owned += from.owned[child];
        pinned += from.pinned[child];
        cached += from.cached[child];
        partial += from.partial[child];
        if (from.refs[child] > refs) refs = from.refs[child];
        if (from.evicted[child] > evicted) evicted = from.evicted[child];
        leader = from.lead[child];
        weight = from.led[child];
      } else {
        const { tier } = this;
        const id = this.blockAt(child);
        const state = tier.state[id];
        if (tier.evicted[id] > evicted) evicted = tier.evicted[id];
        if (state >= OWNED) {
          if (state === PINNED) pinned += 1;
          else if (tier.refs[id] > 1) {
            shared += 1;
            saved += tier.refs[id] - 1;
          } else owned += 1;
          if (tier.filled[id] < this.blockSize) partial += 1;
          if (tier.refs[id] > refs) refs = tier.refs[id];
          leader = tier.owner[id];
          weight = 1;
        } else if (state === CACHED) cached += 1;
      }
      if (leader < 0) continue;
      if (leader === lead) led += weight;
      else if (weight > led) {
        lead = leader;
        led = weight;
      }
    }
    into.shared[cell] = shared;
    into.saved[cell] = saved;
    into.owned[cell] = owned;
    into.pinned[cell] = pinned;
    into.cached[cell] = cached;
    into.partial[cell] = partial;
    into.refs[cell] = refs;
    into.evicted[cell] = evicted;
    into.lead[cell] = lead;
    into.led[cell] = led;
  }

  // The sums over all blocks.
  get totals() {
    const sums = Object.fromEntries(COUNTS.map((name) => [name, 0]));
    const size = this.levels[this.top]?.refs.length ?? this.count;
    for (let number = 0; number < size; number += 1) {
      const cell = this.cell(this.top, number);
      for (const name of COUNTS) sums[name] += cell[name];
    }
    return { ...sums, free: this.count - sums.shared - sums.owned - sums.pinned - sums.cached };
  }

  // When content was last evicted from one cell.
  evictedAt(level, number) {
    return level > 0 ? this.levels[level].evicted[number] : this.tier.evicted[this.blockAt(number)];
  }

  // A number that differs whenever a cell looks different. It is asked for every cell in every frame, so it makes no objects.
  look(level, number) {
    if (level > 0) {
      const cells = this.levels[level];
      let look = mixed(17, cells.shared[number]);
      look = mixed(look, cells.owned[number]);
      look = mixed(look, cells.pinned[number]);
      look = mixed(look, cells.cached[number]);
      look = mixed(look, cells.refs[number]);
      return mixed(look, cells.lead[number]);
    }
    const { tier } = this;
    const id = this.blockAt(number);
    let look = mixed(tier.state[id], tier.refs[id]);
    look = mixed(look, tier.owner[id]);
    return mixed(look, tier.filled[id]);
  }

  // What one cell contains, in the same form on all levels.
  cell(level, number) {
    const first = number * 4 ** level;
    const size = Math.min(4 ** level, this.count - first);
    if (level > 0) {
      const from = this.levels[level];
      const cell = { first, size, refs: from.refs[number], lead: from.lead[number], evicted: from.evicted[number] };
      for (const name of COUNTS) cell[name] = from[name][number];
      return cell;
    }
    const id = this.blockAt(first);
    const { tier } = this;
    const state = tier.state[id];
    const isShared = state === OWNED && tier.refs[id] > 1;
    return {
      first, size, refs: tier.refs[id], lead: tier.owner[id], evicted: tier.evicted[id],
      shared: Number(isShared), saved: isShared ? tier.refs[id] - 1 : 0, owned: Number(state === OWNED && !isShared), pinned: Number(state === PINNED), cached: Number(state === CACHED),
      partial: Number(state >= OWNED && tier.filled[id] < this.blockSize), filled: tier.filled[id] / this.blockSize, id,
    };
  }
}
