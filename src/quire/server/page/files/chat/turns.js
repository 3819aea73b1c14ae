// One message of the conversation on the page, with what can be done with it.

import { count, element, setText } from "../dom.js";
import { copied, Markdown } from "./markdown.js";

const TITLES = { user: "You", assistant: "Answer" };

// `act`: { edit(node, text), again(node), turn(node, by) }; `isPlain`: an answer that is JSON and not Markdown.
export function makeTurn(node, { act, place, toolName, isPlain }) {
  const title = node.role === "tool" ? `Result of ${toolName}` : TITLES[node.role];
  const text = element("div", { class: "text" });
  const foot = element("div", { class: "turn-foot" });
  const root = element("article", { class: `turn ${node.role}`, "aria-label": title, "data-node": node.id }, element("h2", {}, title), text, foot);
  const shown = node.role === "assistant" ? new Shown(root, text, { isPlain, isMarked: Array.isArray(node.marks) }) : null;
  const turn = { root, text, foot, shown, node };
  if (shown) {
    if (node.reasoning) shown.think(node.reasoning);
    if (node.content) shown.rewrite(node.content, node.marks);
    (node.tool_calls ?? []).forEach((call, i) => shown.call(i, call));
    shown.finish();
  } else {
    text.append(node.content);
    for (const { name, text: content } of node.files ?? []) {
      text.append(element("details", { class: "file" }, element("summary", {}, `${name}, ${count(content.length)} characters`), element("pre", { tabindex: "0" }, content)));
    }
  }
  finishTurn(turn, { act, place });
  return turn;
}

// The line below a message: figures, branches, actions.
export function finishTurn({ root, text, foot, node }, { act, place: [number, of] }) {
  root.removeAttribute("aria-busy");
  const button = (label, run, attributes = {}) => element("button", { type: "button", class: "quiet", onclick: run, ...attributes }, label);
  const parts = [];
  if (of > 1) {
    const go = (by, label, what) => button(label, () => act.turn(node, by), { "aria-label": what });
    parts.push(element("span", { class: "branches", role: "group", "aria-label": "Versions" }, go(-1, "‹", "Previous version"), `${number}/${of}`, go(1, "›", "Next version")));
  }
  if (node.prompt) parts.push(sharedBar(node.prompt));
  parts.push(element("span", { class: "figures-line" }, node.figures ?? ""));
  if (node.role === "user") parts.push(button("Edit", () => startEdit(root, text, node, act)));
  if (node.role === "assistant") {
    const copy = button("Copy", () => copied(copy, node.content || (node.tool_calls ?? []).map((each) => each.function.arguments).join("\n")));
    parts.push(button("Try again", () => act.again(node)), copy);
  }
  foot.replaceChildren(...parts);
}

// How much of the prompt was in the cache already, as a bar; the line beside it says the numbers.
function sharedBar([cached, all]) {
  const bar = element("span", { class: "shared-bar", "aria-hidden": "true" }, element("i"));
  bar.firstChild.style.width = `${all ? (100 * cached) / all : 0}%`;
  return bar;
}

function startEdit(root, text, node, act) {
  const field = element("textarea", { rows: "4", "aria-label": "Edit the message" });
  field.value = node.content;
  const end = () => {
    form.remove();
    text.hidden = false;
  };
  const form = element("form", { class: "edit" }, field, element("div", { class: "row" },
    element("span", { class: "hint" }, "The old version is kept beside the new one."),
    element("button", { type: "button", class: "quiet", onclick: end }, "Cancel"), element("button", { type: "submit", class: "primary" }, "Send as a branch")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) act.edit(node, field.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") end();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  text.hidden = true;
  text.after(form);
  field.focus();
}

// The text, the reasoning and the tool calls of an answer.
class Shown {
  // `isPlain`: JSON. `isMarked`: the text as the model wrote it, with what comes from accepted drafts marked.
  constructor(root, text, { isPlain, isMarked }) {
    Object.assign(this, { root, text, isPlain, isMarked });
    this.boxes = [];
  }

  // A whole text, with the lengths of its parts as `Answer` keeps them.
  rewrite(text, marks) {
    let start = 0;
    (this.isMarked ? marks : []).forEach((length, i) => {
      this.write(text.slice(start, start + length), i % 2 === 1);
      start += length;
    });
    if (start < text.length) this.write(text.slice(start));
  }

  write(text, drafted = false) {
    if (this.isMarked) {
      this.text.classList.add("marked");
      this.text.append(drafted ? element("mark", { title: "accepted drafts" }, text) : text);
      return;
    }
    if (this.isPlain) {
      this.plain ??= this.text.appendChild(element("pre", { tabindex: "0", "aria-label": "JSON" }));
      this.plain.append(text);
      return;
    }
    this.markdown ??= new Markdown(this.text);
    this.markdown.write(text);
  }

  think(text) {
    if (!this.thought) {
      this.thought = element("p");
      this.text.before(element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.thought));
    }
    this.thought.append(text);
  }

  call(place, { function: { name, arguments: given } }) {
    this.boxes[place] ??= this.root.insertBefore(element("pre", { class: "call", tabindex: "0", "aria-label": "Tool call" }), this.root.lastElementChild);
    setText(this.boxes[place], `${name}(${given})`);
  }

  finish() {
    this.markdown?.finish();
  }
}

