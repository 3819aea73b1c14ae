// What lies above the cells: the names of the groups, the frame of the cell that is described, and the edges of the tiles.

import { colour, prepared } from "../dom.js";
import { fitted, NUMBER_CELL } from "./paint.js";

const MAX_LABELS = 32;
const REST_MS = 150;

export function drawLabels(map) {
  if (!map.pyramid) return;
  const [context, width, height] = prepared(map.overlay, map.height);
  context.clearRect(0, 0, width, height);
  const { camera } = map;
  // while the view moves, names would only flicker
  if (camera.now.scale < 56 && performance.now() - camera.movedAt > REST_MS) drawNames(map, context, width, height);
  if (map.cursor) {
    const [x, y, side] = map.squareOf(map.cursor);
    const [left, top] = camera.toView(x, y);
    const size = side * camera.now.scale;
    for (const [line, paint] of [[4, "leaf"], [2, "ink"]]) {
      context.lineWidth = line;
      context.strokeStyle = colour(paint);
      context.strokeRect(left, top, size - 1, size - 1);
    }
  }
}

// A name on each group that is large enough for it: first what is shared, by most requests, then the largest.
function drawNames(map, context, width, height) {
  const named = [];
  const reach = Math.ceil(Math.log2(30 / map.camera.now.scale));
  for (const group of map.plans.groups) {
    if (group.kind === "free" || (group.kind === "cached" && group.size * 12 < map.tier.numBlocks)) continue;
    if (group.kind === "shared" && map.camera.now.scale > NUMBER_CELL) continue; // its blocks show the number themselves
    if (group.size * map.camera.now.scale ** 2 < 800) continue;
    const square = largestSquare(map, group, reach);
    if (square) named.push({ group, square });
    if (named.length > 4 * MAX_LABELS) break;
  }
  const weight = ({ kind, refs }) => (kind === "shared" ? refs : 0);
  named.sort((a, b) => weight(b.group) - weight(a.group) || b.square[2] - a.square[2] || b.group.size - a.group.size);
  context.font = "600 11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  const taken = [];
  for (const { group, square: [x, y, side] } of named.slice(0, MAX_LABELS)) {
    const [px, py] = map.camera.toView(x + side / 2, y + side / 2);
    if (px < 0 || py < 0 || px > width || py > height) continue;
    const text = fitted(context, map.groupName(group), Math.max(96, side * map.camera.now.scale * 1.1));
    const half = context.measureText(text).width / 2 + 5;
    const box = [Math.min(Math.max(px, half + 1), width - half - 1), Math.min(Math.max(py, 10), height - 10), half];
    if (!text || taken.some(([ox, oy, other]) => Math.abs(ox - box[0]) < half + other + 2 && Math.abs(oy - box[1]) < 19)) continue;
    taken.push(box);
    context.fillStyle = colour("leaf");
    context.globalAlpha = 0.9;
    context.beginPath();
    context.roundRect(box[0] - half, box[1] - 9, 2 * half, 18, 4);
    context.fill();
    context.globalAlpha = 1;
    context.fillStyle = colour("ink");
    context.fillText(text, box[0], box[1] + 0.5);
  }
  context.textBaseline = "alphabetic";
}

// The largest cell of any level that lies in the group: x, y and side in the world.
function largestSquare(map, { start, size }, least) {
  const most = Math.min(map.world.order, Math.floor(Math.log2(size) / 2 + 1e-9));
  for (let level = most; level >= Math.max(0, Math.min(least, most) - 2); level -= 1) {
    const number = Math.ceil(start / 4 ** level);
    if ((number + 1) * 4 ** level <= start + size) return map.squareOf({ level, number });
  }
  return null;
}
