// The right side of the page: the engine, live or at an earlier moment.

import { call, events, forModel } from "../api.js";
import { byId, count, duration, element, forgetColours, keyed, plural, setAttribute, setText } from "../dom.js";
import { BlockMap } from "../map/blockmap.js";
import { Details } from "../map/details.js";
import { fillLegend, forgetPaint } from "../map/paint.js";
import { histogram, quantile, sparkline } from "./charts.js";
import { History, rates } from "./mirror.js";
import { Queues } from "./queues.js";
import { PrefixTree } from "./tree.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const PART_MS = 300; // between two updates of the parts that are not the map; of lists, of a quarter of their rows
const CHART_MS = 1200; // the same for charts
const UNSEEN_MS = 2000; // the same for parts that are scrolled out of view
const SPEED_S = 120;
const MAX_EVENTS_SHOWN = 100;
const PRESSURE = new Set(["preempted", "swapped out", "swapped in", "evicted", "spilled"]);
const ARRANGEMENT = "quire-arrangement";

export class EngineView {
  constructor() {
    this.history = new History();
    this.shownAt = null; // a moment of the engine's time; null: live
    this.selected = null; // a request's order
    this.own = {}; // times that the playground measured: ttft and itl
    this.arrival = 0;
    this.needs = false;
    this.tree = new PrefixTree(byId("tree"), byId("tree-note"));
    this.details = new Details(byId("block-note"), (order) => this.#choose(order));
    const say = (details) => this.details.show(details);
    this.maps = [
      new BlockMap("device", "Cache", { say, planned: (forest) => (this.tree.forest = forest) }),
      new BlockMap("host", "Host tier", { say }),
    ];
    byId("map").append(...this.maps.map((map) => map.root));
    this.queues = new Queues(byId("queues"), (order) => this.#choose(order));
    this.parts = [
      ["scrub", () => this.#renderTime()],
      ["map", () => this.maps.forEach((map) => map.renderText())],
      ["queues", (mirror, now, turn) => this.queues.render(mirror, this.selected, turn)],
      ["tree", (mirror, now, turn) => this.tree.render(turn)],
      ["figures", (mirror) => this.#renderFigures(mirror)],
      ["speed", (mirror) => this.#renderSpeed(mirror), CHART_MS],
      ["ttft", (mirror, now) => this.#renderLatency(now), CHART_MS],
      ["events", (mirror, now, turn) => this.#renderEvents(now, turn)],
    ].map(([id, render, every = PART_MS]) => ({ id, render, every, due: 0, turn: 0, isStale: true, isSeen: true }));
    const seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.parts.find(({ id }) => id === target.id).isSeen = isIntersecting;
    });
    for (const { id } of this.parts) seen.observe(byId(id));
    fillLegend(byId("legend"));
    byId("pause").addEventListener("click", () => this.#pause(this.shownAt === null));
    byId("scrub").addEventListener("input", () => this.#scrub());
    byId("only-pressure").addEventListener("change", () => this.refresh());
    const arrangement = localStorage.getItem(ARRANGEMENT) === "place" ? "place" : "owner";
    for (const radio of document.querySelectorAll("input[name=arrangement]")) {
      radio.checked = radio.value === arrangement;
      radio.addEventListener("change", () => {
        localStorage.setItem(ARRANGEMENT, radio.value);
        this.refresh();
      });
    }
    new ResizeObserver(() => this.repaint()).observe(byId("map"));
    setInterval(() => this.refresh(), 1000); // the times shown change even if nothing happens
    const draw = () => {
      requestAnimationFrame(draw);
      if (!document.hidden) this.#render();
    };
    requestAnimationFrame(draw);
  }

  // Follow the engine for as long as the page is open.
  async follow() {
    for (let failures = 0; ; ) {
      this.aborter = new AbortController();
      try {
        const response = await call(`debug/cache/events${forModel("?")}`, { signal: this.aborter.signal, accept: "text/event-stream" });
        for await (const data of events(response)) {
          failures = 0;
          const frame = JSON.parse(data);
          if (frame.error) throw new Error(frame.error.message);
          if (this.history.push(frame)) this.#arrived();
        }
        this.#say("lost", "connection closed; reconnecting");
      } catch (error) {
        this.#say("lost", error.name === "AbortError" ? "reconnecting" : `not connected: ${error.message}`);
      }
      const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
      failures += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  // Begin anew, with another key or another model.
  reconnect() {
    this.#pause(false);
    if (this.history.live) this.#renderTime(); // nothing is drawn until the next snapshot
    this.history.forget();
    for (const map of this.maps) map.tokens.forget();
    this.aborter?.abort();
  }

  refresh() {
    this.needs = true;
  }

  // What the user has just asked for is not delayed.
  #refreshAll() {
    for (const part of this.parts) part.due = 0;
    this.refresh();
  }

  repaint() {
    forgetColours();
    forgetPaint();
    fillLegend(byId("legend"));
    for (const map of this.maps) map.repaint();
    this.refresh();
  }

  measured(own) {
    this.own = own;
    this.refresh();
  }

  #arrived() {
    this.arrival = performance.now();
    this.#say("live", "live");
    this.refresh();
  }

  #say(state, text) {
    this.link = { state, text };
    this.#renderLink();
  }

  #renderLink() {
    const { state, text } = this.link;
    byId("link").dataset.state = state;
    setText(byId("link"), state === "live" && this.shownAt !== null ? "paused; the engine continues" : text);
  }

  #choose(order) {
    this.selected = this.selected === order ? null : order;
    this.#refreshAll();
  }

  #pause(stop) {
    if (stop && !this.history.live) return;
    this.shownAt = stop ? this.history.live.time : null;
    this.past = null;
    this.#refreshAll();
  }

  #scrub() {
    if (!this.history.live) return;
    const back = -Number(byId("scrub").value);
    this.shownAt = back < 0.05 ? null : Math.max(this.history.start, this.history.live.time - back);
    this.past = null;
    this.#refreshAll();
  }

  // The state that is shown: the present, or a past one, which is computed once for each moment.
  get #shown() {
    if (this.shownAt === null) return this.history.live;
    this.past ??= this.history.at(this.shownAt);
    return this.past;
  }

  // The engine's time now, estimated: it sends nothing while nothing happens.
  get #now() {
    if (this.shownAt !== null) return this.shownAt;
    return this.history.live.time + Math.max(0, (performance.now() - this.arrival) / 1000 - 0.2);
  }

  // In each frame the map and, of the other parts, one whose turn it is, so that no frame takes long.
  #render() {
    if (!this.history.live) return;
    if (this.needs) {
      this.needs = false;
      for (const part of this.parts) part.isStale = true;
      this.#renderMap();
    }
    const time = performance.now();
    const part = this.parts.filter((each) => each.isStale && each.due <= time).sort((a, b) => a.due - b.due)[0];
    if (!part) return;
    part.isStale = false;
    const turn = part.due === 0 ? null : (part.turn += 1);
    part.due = time + (part.isSeen ? part.every : UNSEEN_MS);
    part.render(this.#shown, this.#now, turn);
  }

  #renderMap() {
    const mirror = this.#shown;
    if (this.selected !== null && !mirror.requests.has(this.selected)) this.selected = null;
    const arrangement = document.querySelector("input[name=arrangement]:checked").value;
    for (const map of this.maps) map.render(mirror, this.selected, arrangement);
  }

  #renderTime() {
    const { live, start } = this.history;
    const scrub = byId("scrub");
    const paused = this.shownAt !== null;
    scrub.min = String(-Math.max(0, live.time - start).toFixed(1));
    scrub.disabled = live.time - start < 0.1;
    const back = paused ? live.time - this.shownAt : 0;
    if (document.activeElement !== scrub || !paused) scrub.value = String(-back);
    const text = paused ? `${back.toFixed(1)} s ago` : "live";
    setText(byId("moment"), text);
    scrub.setAttribute("aria-valuetext", text);
    byId("pause").setAttribute("aria-pressed", String(paused));
    setText(byId("pause"), paused ? "Go live" : "Pause");
    this.#renderLink();
  }

  // The tokens of the last whole second and of those before it. Live, the present second is not over; of a past moment, it is.
  #speeds(name) {
    const seconds = rates(this.history.speeds, name, this.#now, SPEED_S + 1);
    return this.shownAt === null ? seconds.slice(0, -1) : seconds.slice(1);
  }

  #renderFigures(mirror) {
    const { counters } = mirror;
    const hitRate = counters.prefix_queried ? counters.prefix_hit / counters.prefix_queried : 0;
    const figures = [
      ["Tokens/s", count(this.#speeds("generated").at(-1)), ""],
      ["Running", count(counters.running), `of ${mirror.setup.max_num_seqs}`],
      ["Waiting", count(counters.waiting), counters.swapped ? `+ ${counters.swapped} swapped` : ""],
      ["Cache in use", `${((100 * counters.used_blocks) / Math.max(1, mirror.setup.num_blocks)).toFixed(1)} %`, ""],
      ["Prefix hits", `${(100 * hitRate).toFixed(0)} %`, ""],
      ["Preemptions", count(counters.preemptions), counters.preemptions_by_swap ? `${counters.preemptions_by_swap} by swap` : ""],
      ["Evicted", count(counters.prefix_evicted), "tokens"],
    ];
    const make = ([name]) => element("div", {}, element("dt", {}, name), element("dd", {}, element("span"), " ", element("small")));
    keyed(byId("figures"), figures, ([name]) => name, make, (item, [, value, unit]) => {
      const [number, small] = item.lastElementChild.children;
      setText(number, value);
      setText(small, unit);
    });
  }

  #renderSpeed({ counters }) {
    const generated = this.#speeds("generated");
    setAttribute(byId("speed"), "aria-label", `Tokens per second in the last ${SPEED_S} s; in the last whole second ${count(generated.at(-1))}`);
    sparkline(byId("speed"), [
      { values: generated, name: "rubric", unit: "generated/s" },
      { values: this.#speeds("prompt"), name: "cached-line", unit: "prompt/s", dashed: true },
    ]);
    const misses = ["never_seen", "evicted", "other_key", "not_computed"]
      .filter((reason) => counters[`prefix_missed_${reason}`])
      .map((reason) => `${count(counters[`prefix_missed_${reason}`])} ${reason.replace("_", " ")}`);
    setText(byId("speed-note"), `Solid: ${count(counters.generated_tokens)} generated tokens in total. Dashed, with its own scale: ${count(counters.prompt_tokens)} prompt tokens. `
      + (counters.drafts ? `Of ${plural(counters.drafts, "draft")}, ${count(counters.accepted_drafts)} were accepted${byDrafter(counters)}. ` : "")
      + (misses.length ? `Prompt tokens not found in the cache: ${misses.join(", ")}.` : ""));
  }

  #renderLatency(now) {
    const ends = this.history.ends.filter((end) => end.time <= now);
    for (const [name, what, least] of [["ttft", "Time to first token", "first"], ["itl", "Time between tokens", "second"]]) {
      const values = ends.map((end) => end[name]).filter((value) => value > 0);
      const own = this.own[name];
      histogram(byId(name), values, own);
      const ofAll = values.length
        ? `median ${duration(quantile(values, 0.5))}, 95 % within ${duration(quantile(values, 0.95))}, ${plural(values.length, "request")}`
        : `no request ${ends.length ? `had a ${least} token` : "has finished yet"}`;
      setText(byId(`${name}-note`), `${what}: ${ofAll}${own > 0 ? `; the playground's last answer (vertical line): ${duration(own)}` : ""}`);
    }
  }

  #renderEvents(now, turn) {
    const only = byId("only-pressure").checked;
    const wanted = this.history.happenings.filter(({ time, event }) => time <= now && (!only || PRESSURE.has(event.kind)));
    const shown = wanted.slice(-MAX_EVENTS_SHOWN).reverse();
    this.numbers ??= new WeakMap(); // a key for each event, so that its line stays
    const keyOf = (happening) => {
      if (!this.numbers.has(happening)) this.numbers.set(happening, (this.lastNumber = (this.lastNumber ?? 0) + 1));
      return this.numbers.get(happening);
    };
    keyed(byId("events"), shown, keyOf, makeEvent, (item, { time }) => setText(item.firstElementChild, ago(now - time)), turn);
  }
}

const ago = (seconds) => (seconds < 60 ? `${Math.max(0, seconds).toFixed(0)} s ago` : `${Math.floor(seconds / 60)} min ago`);

const short = (id) => (id.length > 24 ? `${id.slice(0, 14)}…${id.slice(-8)}` : id);

function makeEvent({ event }) {
  const times = event.count > 1 ? ` × ${count(event.count)}` : "";
  const parts = [short(event.request_id ?? "")];
  if (event.reason) parts.push(event.reason);
  if (event.ttft_s !== undefined) parts.push(`first token ${duration(event.ttft_s)}`);
  if (event.e2e_s !== undefined) parts.push(`total ${duration(event.e2e_s)}`);
  const blocks = event.block_ids ?? [];
  if (blocks.length) parts.push(`blocks ${blocks.slice(0, 12).join(", ")}${event.count > 12 ? ", …" : ""}`);
  const text = parts.filter(Boolean).join(" · ");
  return element(
    "li",
    {},
    element("time"),
    element("span", { class: PRESSURE.has(event.kind) ? "pressure" : "" }, event.kind + times),
    element("span", { title: `${event.request_id ?? ""} ${text}` }, text),
  );
}

// Of several drafters, how much of each one's drafts was accepted.
function byDrafter(counters) {
  const parts = Object.keys(counters)
    .filter((name) => name.startsWith("drafts_") && counters[name])
    .map((name) => `${name.slice(7)} ${count(counters[`accepted_${name}`])} of ${count(counters[name])}`);
  return parts.length > 1 ? ` (${parts.join(", ")})` : "";
}
