// What is known of one cell of a map, in words.

import { FREE, OWNED, PINNED, STATES } from "../engine/mirror.js";
import { count, plural } from "../dom.js";

const MAX_NAMES = 12;

// { title, text, owners: [{ order, name }], tokens, note } of the cell under the cursor.
export function describe(map) {
  const cell = map.pyramid.cell(map.cursor.level, map.cursor.number);
  return cell.size === 1 ? describeBlock(map, map.pyramid.blockAt(cell.first)) : describeCell(map, cell);
}

function describeBlock(map, id) {
  const { tier, mirror } = map;
  const state = tier.state[id];
  const said = [state === OWNED && tier.refs[id] > 1 ? `owned · ${plural(tier.refs[id], "reference")}` : STATES[state]];
  const details = { title: `${map.name === "host" ? "Host block" : "Block"} ${id}`, owners: [], tokens: null, note: "" };
  if (state !== FREE) {
    if (state === PINNED || (state === OWNED && tier.refs[id] === 1)) said.push(plural(tier.refs[id], "reference"));
    said.push(`depth ${tier.depth[id]}`, `${tier.filled[id]} of ${mirror.setup.block_size} tokens`);
    said.push(tier.hash[id] || tier.parent[id] ? plural(tier.hits[id], "hit") : "not in the prefix tree");
    details.owners = named(mirror, tier.owners(id));
    map.tokens.want([id], tier, mirror.isLive);
    details.tokens = map.tokens.of(id);
    details.note = map.tokens.refused ?? (mirror.isLive ? "" : "Tokens can be read only live, not of a past moment.");
  }
  if (tier.evicted[id] && mirror.time - tier.evicted[id] < 60) said.push(`content evicted ${Math.max(0, mirror.time - tier.evicted[id]).toFixed(0)} s ago`);
  return { ...details, text: said.join(" · ") };
}

function describeCell(map, cell) {
  const { tier, pyramid, mirror } = map;
  const owners = new Map();
  for (let at = cell.first; at < cell.first + cell.size; at += 1) {
    for (const owner of tier.owners(pyramid.blockAt(at))) owners.set(owner, (owners.get(owner) ?? 0) + 1);
  }
  const free = cell.size - cell.shared - cell.owned - cell.pinned - cell.cached;
  const said = [];
  if (cell.shared) said.push(`${count(cell.shared)} shared by up to ${count(cell.refs)}`);
  if (cell.owned) said.push(`${count(cell.owned)} used by one request`);
  if (cell.pinned) said.push(`${count(cell.pinned)} pinned`);
  if (cell.cached) said.push(`${count(cell.cached)} cached`);
  if (free) said.push(`${count(free)} free`);
  if (cell.partial) said.push(`${count(cell.partial)} being written`);
  const sorted = [...owners].sort((a, b) => b[1] - a[1]).map(([order]) => order);
  const title = map.plans.order ? `${count(cell.size)} blocks, ${map.groupName(map.groupAt(cell.first))}` : `Blocks ${count(cell.first)} to ${count(cell.first + cell.size - 1)}`;
  return { title, text: said.join(" · "), owners: named(mirror, sorted), tokens: null, note: "" };
}

function named(mirror, orders) {
  const rows = orders.slice(0, MAX_NAMES).map((order) => ({ order, name: mirror.requests.get(order)?.name ?? `request ${order}` }));
  if (orders.length > MAX_NAMES) rows.push({ order: -1, name: `and ${count(orders.length - MAX_NAMES)} more` });
  return rows;
}
