// The playground: one conversation over /v1/chat/completions.

import { call, events } from "./api.js";
import { byId, count, duration, element, plural, setText } from "./dom.js";

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "age": {"type": "integer"}
  },
  "required": ["name", "age"],
  "additionalProperties": false
}`;
const TOOLS = `[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "The weather at a place",
      "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"]
      }
    }
  }
]`;
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Playground {
  // `measured({ ttft, itl })` is called with the times of each answer.
  constructor(measured) {
    this.measured = measured;
    this.messages = []; // as they are sent, without the system prompt
    this.log = byId("log");
    byId("schema").value = SCHEMA;
    byId("tools").value = TOOLS;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    byId("stop").addEventListener("click", () => this.aborter?.abort());
    byId("regenerate").addEventListener("click", () => this.#regenerate());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("settings").addEventListener("toggle", () => (this.log.scrollTop = this.log.scrollHeight));
    for (const radio of document.querySelectorAll("input[name=mode]")) {
      radio.addEventListener("change", () => this.#showMode());
    }
    this.#showMode();
  }

  get #mode() {
    return document.querySelector("input[name=mode]:checked").value;
  }

  #showMode() {
    byId("schema-box").hidden = this.#mode !== "schema";
    byId("tools-box").hidden = this.#mode !== "tools";
  }

  #send() {
    const text = byId("message").value;
    if (this.aborter || !text.trim()) return;
    const call = this.#openCalls()[0];
    const message = call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
    const turn = this.#addTurn(message.role, call ? `Result of ${call.function.name}` : "You");
    turn.text.textContent = text;
    this.messages.push(message);
    byId("message").value = "";
    if (this.#openCalls().length) this.#settle(); // the next call needs its result too
    else this.#answer({ message, turn, text });
  }

  // Tool calls of the last answer that have no result yet.
  #openCalls() {
    const last = this.messages.findLastIndex((message) => message.role === "assistant");
    const calls = last < 0 ? [] : this.messages[last].tool_calls ?? [];
    const done = new Set(this.messages.slice(last + 1).map((message) => message.tool_call_id));
    return calls.filter((each) => !done.has(each.id));
  }

  #regenerate() {
    if (this.aborter || this.messages.at(-1)?.role !== "assistant") return;
    this.messages.pop();
    this.log.lastElementChild.remove();
    this.#answer(null);
  }

  #clear() {
    this.aborter?.abort();
    this.messages = [];
    this.log.replaceChildren(byId("empty") ?? this.empty);
    this.#fail("");
    this.#settle();
    byId("message").focus();
  }

  // The body of the request. Throws an error if a field that must be JSON is not.
  #body() {
    const body = { messages: [...this.messages], stream: true, stream_options: { include_usage: true } };
    const system = byId("system").value.trim();
    if (system) body.messages.unshift({ role: "system", content: system });
    for (const name of NUMBERS) {
      const field = byId(name);
      if (field.validity.badInput) throw new Error(`${name} must be a number`);
      if (field.value !== "") body[name] = Number(field.value);
    }
    const stop = byId("stop_text").value.split("|").filter(Boolean);
    if (stop.length) body.stop = stop;
    if (this.#mode === "json") body.response_format = { type: "json_object" };
    if (this.#mode === "schema") {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("schema", "The JSON schema"), strict: true } };
    }
    if (this.#mode === "tools") {
      body.tools = parsed("tools", "The list of tools");
      body.tool_choice = byId("tool_choice").value;
    }
    return body;
  }

  // Request an answer. If there is none, `asked` is moved back into the message box, to be corrected and sent again.
  async #answer(asked) {
    const conversation = this.messages;
    this.aborter = new AbortController();
    const { signal } = this.aborter;
    this.#fail("");
    this.#settle();
    let answer = null;
    try {
      const body = this.#body();
      const turn = this.#addTurn("assistant", "Answer");
      answer = new Answer(turn);
      const response = await call("v1/chat/completions", { body, signal, accept: "text/event-stream" });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        answer.add(JSON.parse(data));
        if (this.#atEnd) this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#fail(error.message);
    }
    this.aborter = null;
    if (conversation !== this.messages) return; // a new one has begun
    if (answer?.isEmpty) answer.turn.root.remove();
    if (answer && !answer.isEmpty) {
      answer.finish();
      this.messages.push(answer.message);
      this.measured({ ttft: answer.ttft, itl: answer.itl });
    } else if (asked) {
      this.messages.splice(this.messages.indexOf(asked.message), 1);
      asked.turn.root.remove();
      if (!byId("message").value) byId("message").value = asked.text;
    }
    this.#settle();
  }

  get #atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 90;
  }

  #settle() {
    const busy = Boolean(this.aborter);
    const open = this.#openCalls()[0];
    byId("send").disabled = busy;
    byId("stop").disabled = !busy;
    byId("regenerate").disabled = busy || this.messages.at(-1)?.role !== "assistant";
    setText(byId("message-label"), open ? `Result of ${open.function.name}` : "Message");
    if (!this.messages.length && !this.log.children.length) this.log.append(this.empty);
  }

  #fail(message) {
    const box = byId("chat-error");
    box.hidden = !message;
    setText(box, message);
  }

  #addTurn(role, title) {
    if (byId("empty")) {
      this.empty = byId("empty");
      this.empty.remove();
    }
    const text = element("div", { class: "text" });
    const foot = element("div", { class: "turn-foot" });
    const root = element("article", { class: `turn ${role}`, "aria-label": title }, element("h3", {}, title), text, foot);
    if (role !== "assistant") foot.remove();
    this.log.append(root);
    this.log.scrollTop = this.log.scrollHeight;
    return { root, text, foot };
  }
}

function parsed(id, what) {
  try {
    return JSON.parse(byId(id).value);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

// One answer while it is received.
class Answer {
  constructor(turn) {
    this.turn = turn;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.usage = null;
    this.decodeS = null; // as the server measured it: a short answer arrives here in one piece
    this.reason = null;
    this.start = performance.now();
    this.first = null;
    turn.root.setAttribute("aria-busy", "true");
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length && !this.reason;
  }

  get ttft() {
    return this.first === null ? undefined : (this.first - this.start) / 1000;
  }

  get itl() {
    const more = (this.usage?.completion_tokens ?? 0) - 1;
    return more > 0 && this.decodeS > 0 ? this.decodeS / more : undefined;
  }

  get message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timings) this.decodeS = chunk.timings.decode_s;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.content || thought || delta.tool_calls) {
      this.first ??= performance.now();
    }
    this.#append("content", delta.content ?? "");
    if (thought) this.#think(thought);
    for (const each of delta.tool_calls ?? []) this.#call(each);
    if (choice.finish_reason) this.reason = choice.finish_reason;
  }

  #append(name, text) {
    if (!text) return;
    this[name] += text;
    this.node ??= this.turn.text.appendChild(document.createTextNode(""));
    this.node.appendData(text);
  }

  #think(text) {
    this.reasoning += text;
    if (!this.reasoningNode) {
      this.reasoningNode = element("p");
      this.turn.text.before(element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.reasoningNode));
    }
    this.reasoningNode.append(text);
  }

  #call(delta) {
    const place = delta.index ?? 0;
    const known = (this.calls[place] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= delta.id ?? "";
    known.function.name += delta.function?.name ?? "";
    known.function.arguments += delta.function?.arguments ?? "";
    this.boxes ??= [];
    this.boxes[place] ??= this.turn.foot.parentNode.insertBefore(element("pre"), this.turn.foot);
    this.boxes[place].textContent = `${known.function.name}(${known.function.arguments})`;
  }

  // The answer is complete: show its figures.
  finish() {
    this.calls = this.calls.filter(Boolean);
    this.turn.root.removeAttribute("aria-busy");
    const said = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens !== undefined) said.push(plural(tokens, "token"));
    if (this.itl) said.push(`${(1 / this.itl).toFixed(1)} tokens/s`);
    if (this.ttft !== undefined) said.push(`first token after ${duration(this.ttft)}`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached !== undefined) said.push(`${count(cached)} of ${count(this.usage.prompt_tokens)} prompt tokens from the cache`);
    said.push(this.reason === null ? "stopped" : this.reason === "length" ? "ended at the token limit" : "");
    const copy = element("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(this.content || this.calls.map((each) => each.function.arguments).join("\n"));
        copy.textContent = "Copied";
      } catch {
        copy.textContent = "The browser does not allow copying";
      }
    });
    this.turn.foot.replaceChildren(element("span", {}, said.filter(Boolean).join(" · ")), copy);
  }
}
