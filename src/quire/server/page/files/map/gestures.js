// What pointer and keyboard do to a map: point, drag, pinch, turn the wheel, press keys.

const DRAG_PIXELS = 5;
const PINCH = 1.6;

export function controls(map) {
  const { canvas } = map;
  const pointers = new Map();
  let dragged = false;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const cellUnder = (event) => {
    if (!map.pyramid) return null;
    const number = map.cellAt(map.level, ...map.camera.toWorld(...at(event)));
    return number < 0 ? null : { level: map.level, number };
  };
  const span = () => {
    const [a, b] = [...pointers.values()];
    return { distance: Math.hypot(a[0] - b[0], a[1] - b[1]), middle: [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2] };
  };

  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, at(event));
    dragged = false;
    map.point(cellUnder(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    const here = at(event);
    if (!before) {
      map.point(cellUnder(event));
      return;
    }
    if (pointers.size === 2) {
      const old = span();
      pointers.set(event.pointerId, here);
      const { distance, middle } = span();
      map.camera.zoom((distance / Math.max(1, old.distance)) ** PINCH, ...middle, true);
      dragged = true;
    } else if (dragged || Math.hypot(here[0] - before[0], here[1] - before[1]) > DRAG_PIXELS) {
      dragged = true;
      if (!canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
      map.camera.pan(here[0] - before[0], here[1] - before[1]);
      pointers.set(event.pointerId, here);
    }
    canvas.style.touchAction = map.camera.isWhole ? "pan-y" : "none";
  });
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      if (name === "pointerleave" && document.activeElement !== canvas) map.point(null);
    });
  }
  canvas.addEventListener("dblclick", (event) => {
    const cell = cellUnder(event);
    if (cell) enter(map, cell);
  });
  // Without Ctrl the wheel scrolls the page, until the map was clicked on; a pinch on a touchpad comes with Ctrl.
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    if (map.camera.isWhole && event.deltaY > 0 && !event.ctrlKey) return;
    event.preventDefault();
    map.camera.zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) * (event.ctrlKey ? 0.012 : 0.005)), ...at(event), true);
  }, { passive: false });
  canvas.addEventListener("focus", () => {
    if (!map.cursor && map.pyramid) map.point({ level: map.level, number: 0 });
  });
  canvas.addEventListener("blur", () => map.point(null));
  canvas.addEventListener("keydown", (event) => map.pyramid && !event.altKey && !event.ctrlKey && !event.metaKey && press(map, event));
}

// One step in: from a cell of many blocks to its parts, from a block to its tokens.
function enter(map, cell) {
  map.point(cell);
  map.zoomTo(cell, cell.level === 0 ? (map.camera.goal.scale >= 28 ? 0.92 : 0.22) : 0.62);
}

function press(map, event) {
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [0, -8], PageDown: [0, 8] };
  const cursor = onLevel(map, map.cursor ?? { level: map.level, number: 0 });
  const last = Math.ceil(map.tier.numBlocks / 4 ** cursor.level) - 1;
  if (event.key in steps) step(map, cursor, steps[event.key]);
  else if (event.key === "Home") show(map, { level: cursor.level, number: 0 });
  else if (event.key === "End") show(map, { level: cursor.level, number: last });
  else if (event.key === "n" || event.key === "p") show(map, { level: cursor.level, number: Math.min(last, Math.max(0, cursor.number + (event.key === "n" ? 1 : -1))) });
  else if (event.key === "+" || event.key === "=") map.zoomBy(2);
  else if (event.key === "-") map.zoomBy(1 / 2);
  else if (event.key === "Enter" || event.key === " ") enter(map, cursor);
  else if (event.key === "Escape" && !map.camera.isWhole) map.camera.goal.scale > map.camera.whole.scale * 5 ? map.zoomBy(1 / 4) : map.reset();
  else if (event.key === "0") map.reset();
  else return;
  event.preventDefault();
}

// The cell of the present level that contains, or begins, another cell.
export function onLevel(map, { level, number }) {
  const now = map.level;
  if (now === level) return { level, number };
  return { level: now, number: now > level ? Math.floor(number / 4 ** (now - level)) : number * 4 ** (level - now) };
}

// Go across the map; at its edge, stay.
function step(map, cursor, [dx, dy]) {
  const [x, y, side] = map.squareOf(cursor);
  const number = map.cellAt(cursor.level, x + (dx + 0.5) * side, y + (dy + 0.5) * side);
  if (number >= 0) show(map, { level: cursor.level, number });
}

function show(map, cell) {
  map.point(cell);
  const [x, y] = map.middleOf(cell);
  const [px, py] = map.camera.toView(x, y, map.camera.goal);
  const { width, height } = map.camera.size;
  if (px < 0 || py < 0 || px > width || py > height) map.camera.moveTo({ ...map.camera.goal, x, y });
}
