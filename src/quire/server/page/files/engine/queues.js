// The three queues, each request with its progress. Choosing one marks its blocks on the map.

import { count, element, keyed, plural, setAttribute, setText } from "../dom.js";

const MAX_SHOWN = 60;
const QUEUES = [
  ["running", "Running", "No request is running."],
  ["waiting", "Waiting", "No request is waiting."],
  ["swapped", "Swapped out", "No request is swapped out."],
];

export class Queues {
  constructor(root, choose) {
    this.choose = choose;
    this.parts = QUEUES.map(([name, title, none]) => {
      const number = element("span");
      const list = element("ul", { "aria-label": title });
      const note = element("p", { class: "note" });
      root.append(element("section", { class: "queue" }, element("h3", {}, `${title} `, number), list, note));
      return { name, none, number, list, note };
    });
  }

  render(mirror, selected, turn) {
    for (const { name, none, number, list, note } of this.parts) {
      const rows = [...mirror.requests.values()].filter((row) => row.queue === name).sort((a, b) => a.order - b.order);
      const total = mirror.counters[name] ?? rows.length;
      setText(number, count(total));
      keyed(list, rows.slice(0, MAX_SHOWN), (row) => row.order, (row) => this.#make(row), (item, row) => update(item, row, selected), turn);
      const hidden = total - Math.min(rows.length, MAX_SHOWN);
      setText(note, total === 0 ? none : hidden > 0 ? `and ${count(hidden)} more` : "");
    }
  }

  #make(row) {
    const bar = (...names) => element("span", { class: "bar" }, ...names.map((name) => element("i", { class: name })));
    const head = element("span", { class: "request-head" }, element("span"), element("span"));
    const bars = element("span", { class: "bars", "aria-hidden": "true" }, bar("from-cache", "computed"), bar("drafted", "generated"));
    const button = element("button", { type: "button", class: "request", onclick: () => this.choose(row.order) }, head, bars);
    return element("li", {}, button);
  }
}

function update(item, row, selected) {
  const button = item.firstElementChild;
  const [head, bars] = button.children;
  const computed = Math.min(row.computedTokens, row.promptTokens);
  const cached = Math.min(row.cachedTokens, computed);
  setText(head.children[0], row.name);
  const limit = row.maxTokens ? `/${count(row.maxTokens)}` : "";
  const stage = row.stage === "grammar" ? "compiling grammar" : row.stage === "prefill" && row.queue === "running" ? `${count(computed)}/${count(row.promptTokens)} prompt` : "";
  setText(head.children[1], stage || `${count(row.generatedTokens)}${limit}`);
  const [prompt, output] = bars.children;
  prompt.children[0].style.width = share(cached, row.promptTokens);
  prompt.children[1].style.width = share(computed - cached, row.promptTokens);
  const accepted = Math.min(row.acceptedDrafts, row.generatedTokens);
  const most = row.maxTokens || row.generatedTokens + 100;
  output.children[0].style.width = share(accepted, most);
  output.children[1].style.width = share(row.generatedTokens - accepted, most);
  setAttribute(button, "aria-pressed", row.order === selected);
  const said = [
    `Request ${row.id}`,
    row.tenant && `of ${row.tenant}`,
    row.priority ? `priority ${row.priority}` : "",
    `${count(computed)} of ${count(row.promptTokens)} prompt tokens computed`,
    cached ? `${count(cached)} of them from the cache` : "",
    `${count(row.generatedTokens)}${row.maxTokens ? ` of at most ${count(row.maxTokens)}` : ""} tokens generated`,
    row.drafts ? `${count(row.acceptedDrafts)} of ${plural(row.drafts, "draft")} accepted` : "",
    row.numSeqs > 1 ? plural(row.numSeqs, "sequence") : "",
    plural(row.numBlocks, "block"),
    row.preemptions ? `preempted ${row.preemptions} times` : "",
    row.adapter ? `adapter ${row.adapter}` : "",
  ].filter(Boolean).join(", ");
  setAttribute(button, "aria-label", said);
  setAttribute(button, "title", said);
}

const share = (part, whole) => `${whole > 0 ? Math.min(100, (100 * part) / whole).toFixed(1) : 0}%`;
