// Where the blocks lie on the map: in square tiles, one beside the other, and in each tile along a Hilbert curve. Blocks that follow one
// another form compact areas, and the four cells of one level are exactly one cell of the next.

// The place in a tile of 2^order x 2^order cells of the cell with this number.
export function spot(order, number) {
  let x = 0;
  let y = 0;
  for (let side = 1; side < 1 << order; side *= 2) {
    const right = (number >> 1) & 1;
    const down = (number ^ right) & 1;
    if (!down) {
      if (right) [x, y] = [side - 1 - x, side - 1 - y];
      [x, y] = [y, x];
    }
    x += side * right;
    y += side * down;
    number >>= 2;
  }
  return [x, y];
}

// The number of the cell at a place: the inverse of `spot`.
export function numberAt(order, x, y) {
  let number = 0;
  for (let bit = order - 1; bit >= 0; bit -= 1) {
    const right = (x >> bit) & 1;
    const down = (y >> bit) & 1;
    number = number * 4 + ((3 * right) ^ down);
    if (!down) {
      if (right) [x, y] = [~x, ~y];
      [x, y] = [y, x];
    }
  }
  return number;
}

const WORTH = 0.93; // tiles may be larger if cells are at least this share of the largest possible size

// The order of the tiles, and the numbers of columns and rows of tiles, with which `count` blocks fill a rectangle well.
export function layOut(count, width, height) {
  let best = 0;
  const candidates = [];
  for (let order = 0; order <= 9; order += 1) {
    const side = 1 << order;
    const tiles = Math.ceil(count / (side * side));
    const middle = Math.sqrt((tiles * width) / height);
    for (const columns of new Set([Math.floor(middle), Math.ceil(middle), Math.min(tiles, Math.ceil(middle) + 1)])) {
      if (columns < 1) continue;
      const rows = Math.ceil(tiles / columns);
      const scale = Math.min(width / (columns * side), height / (rows * side));
      best = Math.max(best, scale);
      candidates.push({ order, side, columns, rows, scale });
    }
    if (tiles === 1) break;
  }
  const good = candidates.filter((each) => each.scale >= best * WORTH);
  return good.reduce((a, b) => (b.order > a.order || (b.order === a.order && b.scale > a.scale) ? b : a));
}
