// The engine's cache as described by the frames of /debug/cache/events, now and in the last minutes. See docs/live-view.md.

export const FREE = 0;
export const CACHED = 1;
export const OWNED = 2;
export const PINNED = 3;
export const STATES = ["free", "cached", "owned", "pinned"];

const REQUEST_FIELDS = [
  "order", "id", "queue", "stage", "tenant", "priority", "numSeqs", "promptTokens", "cachedTokens", "computedTokens",
  "generatedTokens", "maxTokens", "numBlocks", "preemptions",
];

class Tier {
  constructor(numBlocks) {
    this.numBlocks = numBlocks;
    this.state = new Uint8Array(numBlocks);
    this.refs = new Uint32Array(numBlocks);
    this.filled = new Uint16Array(numBlocks);
    this.depth = new Uint32Array(numBlocks);
    this.hits = new Uint32Array(numBlocks);
    this.hash = new Float64Array(numBlocks);
    this.parent = new Float64Array(numBlocks);
    this.owners = new Map(); // block -> orders of requests
  }

  apply(columns) {
    columns.ids.forEach((id, i) => {
      this.state[id] = columns.states[i];
      this.refs[id] = columns.refs[i];
      this.filled[id] = columns.filled[i];
      this.depth[id] = columns.depths[i];
      this.hits[id] = columns.hits[i];
      this.hash[id] = columns.hashes[i];
      this.parent[id] = columns.parents[i];
      if (columns.owners[i].length) this.owners.set(id, columns.owners[i]);
      else this.owners.delete(id);
    });
  }

  clone() {
    const copy = Object.create(Tier.prototype);
    copy.numBlocks = this.numBlocks;
    for (const name of ["state", "refs", "filled", "depth", "hits", "hash", "parent"]) copy[name] = this[name].slice();
    copy.owners = new Map(this.owners); // its lists are never changed, only replaced
    return copy;
  }

  counts() {
    const counts = [0, 0, 0, 0];
    for (const state of this.state) counts[state] += 1;
    return counts;
  }
}

export class Mirror {
  constructor(setup) {
    this.setup = setup;
    this.time = 0;
    this.device = new Tier(setup.num_blocks);
    this.host = new Tier(setup.num_host_blocks);
    this.requests = new Map(); // order -> request
    this.counters = {};
  }

  apply(frame) {
    this.time = frame.time_s;
    if (frame.device) this.device.apply(frame.device);
    if (frame.host) this.host.apply(frame.host);
    for (const row of frame.requests ?? []) {
      this.requests.set(row[0], Object.fromEntries(REQUEST_FIELDS.map((name, i) => [name, row[i]])));
    }
    for (const order of frame.gone ?? []) this.requests.delete(order);
    Object.assign(this.counters, frame.counters ?? {});
  }

  clone() {
    const copy = Object.create(Mirror.prototype);
    Object.assign(copy, this, { device: this.device.clone(), host: this.host.clone() });
    copy.requests = new Map(this.requests); // its values are never changed, only replaced
    copy.counters = { ...this.counters };
    return copy;
  }
}

const SEGMENT_S = 20;
const MAX_SEGMENTS = 15; // five minutes
const MAX_BYTES = 96e6; // of cloned tiers, as far as that can be known
const MAX_FRAMES = 400; // in a segment
const MAX_EVENTS = 4000;
const BYTES_PER_BLOCK = 40;

// The present, and the past within a limit of memory: segments of a snapshot and the frames after it.
export class History {
  constructor() {
    this.live = null;
    this.segments = [];
    this.happenings = []; // { time, event }
    this.speeds = []; // { time, generated, prompt }: the counters, once a frame
    this.ends = []; // { time, ttft, itl, e2e }
  }

  get start() {
    return this.segments.length ? this.segments[0].time : 0;
  }

  // False if the frame cannot be used: the first one must be whole.
  push(frame) {
    if (frame.setup) {
      if (this.live && (frame.time_s < this.live.time || !sameSetup(this.live.setup, frame.setup))) this.forget();
      this.live = new Mirror(frame.setup);
      this.#begin(frame);
    } else if (!this.live) return false;
    const last = this.segments.at(-1);
    if (frame.setup === undefined && (frame.time_s - last.time > SEGMENT_S || last.frames.length >= MAX_FRAMES)) this.#begin(frame);
    this.segments.at(-1).frames.push(frame);
    this.live.apply(frame);
    this.#note(frame);
    return true;
  }

  forget() {
    this.segments = [];
    this.happenings = [];
    this.speeds = [];
    this.ends = [];
  }

  // The cache as it was at a time.
  at(time) {
    const segment = this.segments.findLast((each) => each.time <= time) ?? this.segments[0];
    const mirror = segment.beginning.clone();
    for (const frame of segment.frames) {
      if (frame.time_s > time && frame !== segment.frames[0]) break;
      mirror.apply(frame);
    }
    return mirror;
  }

  #begin(frame) {
    this.segments.push({ time: frame.time_s, beginning: this.live.clone(), frames: [] });
    const blocks = this.live.setup.num_blocks + this.live.setup.num_host_blocks;
    const most = Math.max(2, Math.min(MAX_SEGMENTS, Math.floor(MAX_BYTES / (blocks * BYTES_PER_BLOCK))));
    while (this.segments.length > most) this.segments.shift();
  }

  #note(frame) {
    const time = frame.time_s;
    for (const event of frame.events ?? []) {
      this.happenings.push({ time, event });
      if (event.kind === "finished") {
        this.ends.push({ time, ttft: event.ttft_s, itl: event.inter_token_s, e2e: event.e2e_s });
      }
    }
    const { generated_tokens: generated, prompt_tokens: prompt } = this.live.counters;
    this.speeds.push({ time, generated, prompt });
    for (const list of [this.happenings, this.speeds, this.ends]) {
      if (list.length > MAX_EVENTS) list.splice(0, list.length - MAX_EVENTS);
    }
  }
}

const sameSetup = (a, b) => Object.keys(a).every((name) => a[name] === b[name]);

// Tokens per second in each of the `seconds` before `end`, from counters that were noted now and then.
export function rates(speeds, name, end, seconds) {
  const buckets = new Array(seconds).fill(0);
  for (let i = 1; i < speeds.length; i += 1) {
    const tokens = speeds[i][name] - speeds[i - 1][name];
    const age = end - speeds[i].time;
    if (tokens > 0 && age >= 0 && age < seconds) buckets[seconds - 1 - Math.floor(age)] += tokens;
  }
  return buckets;
}

// The forest of what can be found in the cache, by runs of blocks between forks: { id, blocks, hits, refs, children }.
export function prefixForest(tier) {
  const byHash = new Map();
  const children = new Map();
  const heads = [];
  for (let id = 0; id < tier.numBlocks; id += 1) {
    if (tier.state[id] !== FREE && tier.hash[id]) byHash.set(tier.hash[id], id);
  }
  for (let id = 0; id < tier.numBlocks; id += 1) {
    const parent = tier.parent[id];
    if (tier.state[id] === FREE || !parent) continue;
    if (!byHash.has(parent)) heads.push(id);
    else if (children.has(parent)) children.get(parent).push(id);
    else children.set(parent, [id]);
  }
  return heads.map((id) => run(tier, children, id)).sort(heavier);
}

function run(tier, children, first) {
  const root = { id: first, blocks: [], children: [] };
  const open = [[root, first]]; // no recursion: a tree may be as deep as a context is long
  while (open.length) {
    const [node, start] = open.pop();
    let id = start;
    let next = [];
    for (;;) {
      node.blocks.push(id);
      next = tier.hash[id] ? children.get(tier.hash[id]) ?? [] : [];
      if (next.length !== 1) break;
      [id] = next;
    }
    for (const child of next) {
      const made = { id: child, blocks: [], children: [] };
      node.children.push(made);
      open.push([made, child]);
    }
    node.hits = Math.max(...node.blocks.map((block) => tier.hits[block]).slice(0, 10000));
    node.refs = Math.max(...node.blocks.map((block) => tier.refs[block]).slice(0, 10000));
    node.tokens = node.blocks.reduce((sum, block) => sum + tier.filled[block], 0);
  }
  const all = [root];
  for (const node of all) all.push(...node.children);
  for (const node of all.reverse()) node.children.sort(heavier);
  return root;
}

const heavier = (a, b) => b.hits - a.hits || b.blocks.length - a.blocks.length || a.id - b.id;
