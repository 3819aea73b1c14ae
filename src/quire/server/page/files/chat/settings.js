// The fields below the message box: system prompt, parameters, format of the answer, tools.

import { byId } from "../dom.js";

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
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty"];
const FIELDS = [...NUMBERS, "system", "stop_text", "schema", "tools", "tool_choice"];

export class Settings {
  constructor(changed) {
    byId("schema").value = SCHEMA;
    byId("tools").value = TOOLS;
    this.defaults = this.values;
    byId("settings").addEventListener("change", () => {
      this.#showMode();
      changed();
    });
    this.#showMode();
  }

  get mode() {
    return document.querySelector("input[name=mode]:checked").value;
  }

  // Whether answers are JSON, and not Markdown.
  get isPlain() {
    return this.mode === "json" || this.mode === "schema";
  }

  get values() {
    return { mode: this.mode, mark_drafts: byId("mark_drafts").checked, ...Object.fromEntries(FIELDS.map((name) => [name, byId(name).value])) };
  }

  // Fill the fields with what a conversation was held with.
  show(values) {
    const all = { ...this.defaults, ...(values ?? {}) };
    for (const name of FIELDS) byId(name).value = String(all[name]);
    const radio = [...document.querySelectorAll("input[name=mode]")].find(({ value }) => value === all.mode);
    if (radio) radio.checked = true;
    byId("mark_drafts").checked = all.mark_drafts === true;
    this.#showMode();
  }

  #showMode() {
    byId("schema-box").hidden = this.mode !== "schema";
    byId("tools-box").hidden = this.mode !== "tools";
  }

  // The body of a request with these messages. Throws an error if a field is not what it must be.
  body(messages) {
    const body = { messages: [...messages], stream: true, stream_options: { include_usage: true } };
    if (byId("model").value) body.model = byId("model").value;
    const system = byId("system").value.trim();
    if (system) body.messages.unshift({ role: "system", content: system });
    for (const name of NUMBERS) {
      const field = byId(name);
      if (field.validity.badInput) throw new Error(`${name} must be a number`);
      if (field.value !== "") body[name] = Number(field.value);
    }
    const stop = byId("stop_text").value.split("|").filter(Boolean);
    if (stop.length) body.stop = stop;
    if (byId("mark_drafts").checked) body.mark_drafts = true;
    if (this.mode === "json") body.response_format = { type: "json_object" };
    if (this.mode === "schema") {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("schema", "The JSON schema"), strict: true } };
    }
    if (this.mode === "tools") {
      body.tools = parsed("tools", "The list of tools");
      body.tool_choice = byId("tool_choice").value;
    }
    return body;
  }
}

function parsed(id, what) {
  try {
    return JSON.parse(byId(id).value);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}
