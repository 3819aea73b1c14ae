// The right side of the page: the engine, live or at an earlier moment.

import { call, events } from "./api.js";
import { BlockMap, fillLegend } from "./blockmap.js";
import { histogram, quantile, sparkline } from "./charts.js";
import { byId, count, duration, element, forgetColours, keyed, plural, setText } from "./dom.js";
import { History, rates } from "./mirror.js";
import { Queues } from "./queues.js";
import { PrefixTree } from "./tree.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const TREE_MS = 700;
const SPEED_S = 120;
const MAX_EVENTS_SHOWN = 200;
const PRESSURE = new Set(["preempted", "swapped out", "swapped in", "evicted", "spilled"]);

export class EngineView {
  constructor() {
    this.history = new History();
    this.shownAt = null; // a moment of the engine's time; null: live
    this.selected = null; // a request's order
    this.own = {}; // times that the playground measured: ttft and itl
    this.arrival = 0;
    this.needs = false;
    this.treeAt = 0;
    this.maps = [
      new BlockMap("device", "Cache", (text) => setText(byId("block-note"), text)),
      new BlockMap("host", "Host tier", (text) => setText(byId("block-note"), text)),
    ];
    byId("map").append(...this.maps.map((map) => map.root));
    this.queues = new Queues(byId("queues"), (order) => this.#choose(order));
    this.tree = new PrefixTree(byId("tree"), byId("tree-note"));
    fillLegend(byId("legend"));
    byId("pause").addEventListener("click", () => this.#pause(this.shownAt === null));
    byId("scrub").addEventListener("input", () => this.#scrub());
    byId("only-pressure").addEventListener("change", () => this.refresh());
    new ResizeObserver(() => this.repaint()).observe(byId("map"));
    setInterval(() => this.refresh(), 1000); // the times shown change even if nothing happens
    const draw = () => {
      if (this.needs && !document.hidden) this.#render();
      requestAnimationFrame(draw);
    };
    requestAnimationFrame(draw);
  }

  // Follow the engine for as long as the page is open.
  async follow() {
    for (let failures = 0; ; ) {
      this.aborter = new AbortController();
      try {
        const response = await call("debug/cache/events", { signal: this.aborter.signal, accept: "text/event-stream" });
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

  reconnect() {
    this.aborter?.abort();
  }

  refresh() {
    this.needs = true;
  }

  repaint() {
    forgetColours();
    fillLegend(byId("legend"));
    for (const map of this.maps) map.repaint();
    this.treeAt = 0;
    this.refresh();
  }

  measured(own) {
    this.own = own;
    this.refresh();
  }

  #arrived() {
    this.arrival = performance.now();
    if (this.shownAt === null) this.#say("live", "live");
    this.refresh();
  }

  #say(state, text) {
    byId("link").dataset.state = state;
    setText(byId("link"), text);
  }

  #choose(order) {
    this.selected = this.selected === order ? null : order;
    this.refresh();
  }

  #pause(stop) {
    if (stop && !this.history.live) return;
    this.shownAt = stop ? this.history.live.time : null;
    this.past = null;
    this.treeAt = 0;
    this.refresh();
  }

  #scrub() {
    if (!this.history.live) return;
    const back = -Number(byId("scrub").value);
    this.shownAt = back < 0.05 ? null : Math.max(this.history.start, this.history.live.time - back);
    this.past = null;
    this.treeAt = 0;
    this.refresh();
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

  #render() {
    this.needs = false;
    if (!this.history.live) return;
    const mirror = this.#shown;
    const now = this.#now;
    if (this.selected !== null && !mirror.requests.has(this.selected)) this.selected = null;
    this.#renderTime();
    for (const map of this.maps) map.render(mirror, this.selected);
    this.queues.render(mirror, this.selected);
    this.#renderFigures(mirror, now);
    this.#renderLatency(now);
    this.#renderEvents(now);
    if (performance.now() - this.treeAt > TREE_MS) {
      this.treeAt = performance.now();
      this.tree.render(mirror);
    }
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
    if (paused && byId("link").dataset.state === "live") setText(byId("link"), "paused; the engine continues");
  }

  #renderFigures(mirror, now) {
    const { counters } = mirror;
    const speeds = this.history.speeds;
    const generated = rates(speeds, "generated", now, SPEED_S);
    const prompt = rates(speeds, "prompt", now, SPEED_S);
    const speed = generated.at(this.shownAt === null ? -2 : -1); // live, the last second is not over
    const hitRate = counters.prefix_queried ? counters.prefix_hit / counters.prefix_queried : 0;
    const figures = [
      ["Tokens/s", count(Math.round(speed)), ""],
      ["Running", count(counters.running), `of ${mirror.setup.max_num_seqs}`],
      ["Waiting", count(counters.waiting), counters.swapped ? `+ ${counters.swapped} swapped` : ""],
      ["Cache in use", `${((100 * counters.used_blocks) / mirror.setup.num_blocks).toFixed(1)} %`, ""],
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
    sparkline(byId("speed"), [
      { values: generated, name: "rubric", unit: "generated/s" },
      { values: prompt, name: "cached", unit: "prompt/s", dashed: true },
    ]);
    const misses = ["never_seen", "evicted", "other_key", "not_computed"]
      .filter((reason) => counters[`prefix_missed_${reason}`])
      .map((reason) => `${count(counters[`prefix_missed_${reason}`])} ${reason.replace("_", " ")}`);
    setText(byId("speed-note"), `Solid: ${count(counters.generated_tokens)} generated tokens in total. Dashed, with its own scale: ${count(counters.prompt_tokens)} prompt tokens. `
      + (misses.length ? `Prompt tokens not found in the cache: ${misses.join(", ")}.` : ""));
  }

  #renderLatency(now) {
    const ends = this.history.ends.filter((end) => end.time <= now);
    for (const [id, name, what] of [["ttft", "ttft", "Time to first token"], ["itl", "itl", "Time between tokens"]]) {
      const values = ends.map((end) => end[name]).filter((value) => value > 0);
      const own = this.own[name];
      histogram(byId(id), values, own);
      const ofAll = values.length
        ? `median ${duration(quantile(values, 0.5))}, 95 % within ${duration(quantile(values, 0.95))}, ${plural(values.length, "request")}`
        : "no request has finished yet";
      setText(byId(`${id}-note`), `${what}: ${ofAll}${own > 0 ? `; the playground's last answer (vertical line): ${duration(own)}` : ""}`);
    }
  }

  #renderEvents(now) {
    const only = byId("only-pressure").checked;
    const wanted = this.history.happenings.filter(({ time, event }) => time <= now && (!only || PRESSURE.has(event.kind)));
    const shown = wanted.slice(-MAX_EVENTS_SHOWN).reverse();
    this.numbers ??= new WeakMap(); // a key for each event, so that its line stays
    const keyOf = (happening) => {
      if (!this.numbers.has(happening)) this.numbers.set(happening, (this.lastNumber = (this.lastNumber ?? 0) + 1));
      return this.numbers.get(happening);
    };
    keyed(byId("events"), shown, keyOf, makeEvent, (item, { time }) => setText(item.firstElementChild, ago(now - time)));
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
