// The engine's cache as described by the frames of /debug/cache/events, now and in the last minutes. See docs/live-view.md.

export const FREE = 0;
export const CACHED = 1;
export const OWNED = 2;
export const PINNED = 3;
export const STATES = ["free", "cached", "owned", "pinned"];

const REQUEST_FIELDS = [
  "order", "id", "queue", "stage", "tenant", "priority", "numSeqs", "promptTokens", "cachedTokens", "computedTokens",
  "generatedTokens", "maxTokens", "numBlocks", "preemptions", "adapter",
  "drafts", "acceptedDrafts",
];

const COLUMNS = { state: Uint8Array, refs: Uint32Array, filled: Uint16Array, depth: Uint32Array, hits: Uint32Array, hash: Float64Array,
  parent: Float64Array, owner: Int32Array, evicted: Float64Array };

// What a client chose, or else the kind of request and its number: the ids that the server draws say nothing.
function nameOf({ id, order }) {
  const [, kind, chosen] = id.match(/^(chatcmpl|cmpl|msg|resp)[-_](.+)-\d+-[0-9a-f]{8}$/) ?? [];
  if (kind && !/^[0-9a-f]{16,}$/.test(chosen)) return chosen;
  return kind ? `${{ chatcmpl: "chat", cmpl: "completion", msg: "message", resp: "response" }[kind]} ${order}` : id;
}

class Tier {
  constructor(numBlocks) {
    this.numBlocks = numBlocks;
    for (const [name, Column] of Object.entries(COLUMNS)) this[name] = new Column(numBlocks);
    this.owner.fill(-1); // order of the first request that uses the block
    this.sharers = new Map(); // block -> orders of requests, where there are several
    this.journal = null; // blocks that have changed, for a map that draws only those
    // evicted: the time at which content was lost that lookups could find, 0 if never
  }

  apply(columns, time) {
    columns.ids.forEach((id, i) => {
      const owners = columns.owners[i];
      if (this.hash[id] && this.hash[id] !== columns.hashes[i]) this.evicted[id] = time;
      this.state[id] = columns.states[i];
      this.refs[id] = columns.refs[i];
      this.filled[id] = columns.filled[i];
      this.depth[id] = columns.depths[i];
      this.hits[id] = columns.hits[i];
      this.hash[id] = columns.hashes[i];
      this.parent[id] = columns.parents[i];
      this.owner[id] = owners.length ? owners[0] : -1;
      if (owners.length > 1) this.sharers.set(id, owners);
      else this.sharers.delete(id);
      if (this.journal && this.journal.length <= this.numBlocks) this.journal.push(id);
    });
  }

  // The orders of the requests that use a block.
  owners(id) {
    return this.sharers.get(id) ?? (this.owner[id] < 0 ? [] : [this.owner[id]]);
  }

  clone() {
    const copy = Object.create(Tier.prototype);
    copy.numBlocks = this.numBlocks;
    for (const name of Object.keys(COLUMNS)) copy[name] = this[name].slice();
    copy.sharers = new Map(this.sharers); // its lists are never changed, only replaced
    copy.journal = null;
    return copy;
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
    this.isLive = true;
  }

  apply(frame) {
    this.time = frame.time_s;
    if (frame.device) this.device.apply(frame.device, this.time);
    if (frame.host) this.host.apply(frame.host, this.time);
    for (const row of frame.requests ?? []) {
      const request = Object.fromEntries(REQUEST_FIELDS.map((name, i) => [name, row[i]]));
      request.name = nameOf(request);
      this.requests.set(row[0], request);
    }
    for (const order of frame.gone ?? []) this.requests.delete(order);
    Object.assign(this.counters, frame.counters ?? {});
  }

  clone() {
    const copy = Object.create(Mirror.prototype);
    Object.assign(copy, this, { device: this.device.clone(), host: this.host.clone() });
    copy.requests = new Map(this.requests); // its values are never changed, only replaced
    copy.counters = { ...this.counters };
    copy.isLive = false;
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
    this.live = null; // what follows the old snapshot cannot be used: the next frame must be whole
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
