// The blocks ordered by who uses them, and the tree of cached prefixes. Both need the whole cache, so worker.js computes them.

import { CACHED, FREE, OWNED, PINNED } from "../engine/mirror.js";

const MAX_RUNS = 2000; // of the prefix tree that are returned

// For each block the block before it in its prefix, -1 if the cache does not know it; and the number of blocks after it.
function links(tier) {
  const byHash = new Map();
  const parents = new Int32Array(tier.numBlocks).fill(-1);
  const children = new Uint32Array(tier.numBlocks);
  for (let id = 0; id < tier.numBlocks; id += 1) {
    if (tier.state[id] !== FREE && tier.hash[id]) byHash.set(tier.hash[id], id);
  }
  for (let id = 0; id < tier.numBlocks; id += 1) {
    if (tier.state[id] === FREE || !tier.parent[id]) continue;
    const parent = byHash.get(tier.parent[id]);
    if (parent === undefined || parent === id) continue;
    parents[id] = parent;
    children[parent] += 1;
  }
  return { parents, children };
}

// The first block of the run without forks that a block belongs to, and the first block of its whole tree.
function heads(tier, { parents, children }) {
  const run = new Int32Array(tier.numBlocks).fill(-1);
  const root = new Int32Array(tier.numBlocks).fill(-1);
  const path = [];
  for (let start = 0; start < tier.numBlocks; start += 1) {
    let id = start;
    while (root[id] < 0 && parents[id] >= 0 && path.length < tier.numBlocks) {
      path.push(id);
      id = parents[id];
    }
    if (root[id] < 0) run[id] = root[id] = id;
    while (path.length) {
      const child = path.pop();
      root[child] = root[parents[child]];
      run[child] = children[parents[child]] === 1 ? run[parents[child]] : child;
    }
  }
  return { run, root };
}

const SHARED_PART = 0;
const OWN_PART = 1;
const CACHED_PART = 2;

// The order of the blocks in which a family (all that begins in the same way) lies together: first what its requests share, most shared
// first, then what each request has alone, then what is only cached. Free blocks come last. `groups` are the stretches of it.
export function arrange(tier) {
  const { run, root } = heads(tier, links(tier));
  const home = new Map(); // request -> the family it belongs to
  const at = new Map(); // request -> depth of the block that decided this
  const ownersOf = (id) => tier.sharers.get(id) ?? (tier.owner[id] < 0 ? [] : [tier.owner[id]]);
  for (let id = 0; id < tier.numBlocks; id += 1) {
    if (tier.state[id] < OWNED) continue;
    for (const owner of ownersOf(id)) {
      if (tier.depth[id] < (at.get(owner) ?? Infinity)) {
        at.set(owner, tier.depth[id]);
        home.set(owner, root[id]);
      }
    }
  }
  const sizes = new Map();
  const oldest = new Map(); // family -> its oldest request, which decides its place
  for (const [owner, family] of home) oldest.set(family, Math.min(owner, oldest.get(family) ?? Infinity));
  const family = new Int32Array(tier.numBlocks);
  const part = new Uint8Array(tier.numBlocks);
  const used = [];
  const free = [];
  for (let id = 0; id < tier.numBlocks; id += 1) {
    if (tier.state[id] === FREE) {
      free.push(id);
      continue;
    }
    used.push(id);
    family[id] = tier.owner[id] >= 0 ? home.get(tier.owner[id]) : root[id];
    part[id] = tier.state[id] === CACHED ? CACHED_PART : tier.refs[id] > 1 || tier.state[id] === PINNED ? SHARED_PART : OWN_PART;
    sizes.set(family[id], (sizes.get(family[id]) ?? 0) + 1);
  }
  const rank = new Map([...sizes.keys()].sort((a, b) => (oldest.get(a) ?? Infinity) - (oldest.get(b) ?? Infinity) || sizes.get(b) - sizes.get(a) || a - b)
    .map((each, i) => [each, i]));
  const place = (id) => (part[id] === SHARED_PART ? -tier.refs[id] : part[id] === OWN_PART ? tier.owner[id] : run[id]);
  const key = Float64Array.from(used, (id) => rank.get(family[id]) * 4 + part[id]);
  const sorted = Uint32Array.from(used, (_, i) => i).sort((i, j) => {
    const [a, b] = [used[i], used[j]];
    return key[i] - key[j] || place(a) - place(b) || tier.depth[a] - tier.depth[b] || a - b;
  });
  const order = new Int32Array(tier.numBlocks);
  const groups = [];
  sorted.forEach((i, position) => {
    const id = used[i];
    order[position] = id;
    const last = groups.at(-1);
    if (last && last.family === family[id] && last.part === part[id] && last.place === place(id)) last.size += 1;
    else groups.push({ start: position, size: 1, family: family[id], part: part[id], place: place(id), id, owners: ownersOf(id) });
  });
  free.forEach((id, i) => (order[used.length + i] = id));
  if (free.length) groups.push({ start: used.length, size: free.length, part: -1, owners: [] });
  const named = groups.map(({ start, size, part: kind, owners, id }) => ({
    start, size, owners, kind: ["free", "shared", "owned", "cached"][kind + 1], refs: kind === SHARED_PART ? tier.refs[id] : 0,
  }));
  return { order, groups: named };
}

// What lookups can find, by runs of blocks between forks: { id, size, tokens, hits, refs, children }, the most used first.
export function prefixForest(tier) {
  const linked = links(tier);
  const { run } = heads(tier, linked);
  const runs = new Map();
  for (let id = 0; id < tier.numBlocks; id += 1) {
    if (tier.state[id] === FREE || !tier.parent[id]) continue;
    let node = runs.get(run[id]);
    if (!node) runs.set(run[id], (node = { id: run[id], size: 0, tokens: 0, hits: 0, refs: 0, children: [] }));
    node.size += 1;
    node.tokens += tier.filled[id];
    node.hits = Math.max(node.hits, tier.hits[id]);
    node.refs = Math.max(node.refs, tier.refs[id]);
  }
  const roots = [];
  for (const node of runs.values()) {
    const parent = linked.parents[node.id];
    if (parent < 0) roots.push(node);
    else runs.get(run[parent]).children.push(node);
  }
  const heavier = (a, b) => b.hits - a.hits || b.size - a.size || a.id - b.id;
  const kept = roots.sort(heavier).slice(0, MAX_RUNS);
  let left = MAX_RUNS;
  for (let i = 0; i < kept.length; i += 1) {
    const children = kept[i].children.sort(heavier);
    kept[i].children = children.slice(0, Math.max(0, left));
    left -= kept[i].children.length;
    kept.push(...kept[i].children);
  }
  return { roots: roots.slice(0, MAX_RUNS), numRuns: runs.size };
}
