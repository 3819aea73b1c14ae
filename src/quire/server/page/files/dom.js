// Making and updating elements. Whatever comes from outside enters the page as text, never as markup.

export const byId = (id) => document.getElementById(id);

// element("p", { class: "note", "aria-label": "x", onclick: f }, "text", otherElement)
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

const SLICES = 4;

// Keeps one child of `parent` for each item, in order; what is there already is updated, so focus and scrolling stay. With a
// `turn` (a number that counts up) only a quarter of what was there is updated, the next one each turn; null: all of it.
export function keyed(parent, items, keyOf, make, update, turn = null) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const keys = items.map((item) => String(keyOf(item)));
  const focused = document.activeElement;
  const wanted = new Set(keys);
  let isLost = false;
  for (const [key, child] of known) { // first of all: what follows one that is gone need not be moved then
    if (wanted.has(key)) continue;
    isLost ||= child.contains(focused);
    child.remove();
  }
  let place = parent.firstElementChild;
  for (const [i, item] of items.entries()) {
    const child = known.get(keys[i]) ?? make(item);
    const isNew = !known.has(keys[i]);
    if (isNew) child.dataset.key = keys[i];
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    if (isNew || turn === null || i % SLICES === turn % SLICES) update(child, item);
  }
  if (!isLost) return;
  // What had the focus is gone: the keyboard goes on from here, and not from the top of the page.
  const next = parent.querySelector("button, [tabindex='0']") ?? parent;
  if (next === parent) parent.tabIndex = -1;
  next.focus({ preventScroll: true });
}

const styles = new Map();

// A colour of style.css, as it is now.
export function colour(name) {
  if (!styles.has(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return styles.get(name);
}

export const forgetColours = () => styles.clear();

const widths = new WeakMap();
const watched = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) widths.set(target, contentRect.width);
});

// The width of an element as the browser last reported it: asking for it each time would make the browser lay out the page each time.
export function widthOf(node) {
  if (!widths.has(node)) {
    widths.set(node, node.clientWidth);
    watched.observe(node);
  }
  return widths.get(node);
}

// A canvas of the size it has on the page, sharp on any screen: its context, its width and its height.
export function prepared(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = widthOf(canvas);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return [context, width, height];
}

const number = new Intl.NumberFormat("en");
export const count = (value) => number.format(value);

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "none";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;
