// The left side of the page: conversations over /v1/chat/completions.

import { call, events } from "../api.js";
import { byId, setText } from "../dom.js";
import { Answer } from "./answer.js";
import { Files } from "./files.js";
import { Library } from "./library.js";
import { Settings } from "./settings.js";
import { Conversation } from "./tree.js";
import { finishTurn, makeTurn } from "./turns.js";

export class Playground {
  // `measured({ ttft, itl })` is called with the times of each answer.
  constructor(measured) {
    this.measured = measured;
    this.log = byId("log");
    this.empty = byId("empty");
    this.turns = [];
    this.settings = new Settings(() => (this.conversation.settings = this.settings.values));
    this.files = new Files((message) => this.#fail(message));
    this.library = new Library({ open: (conversation) => this.#open(conversation), fail: (message) => this.#fail(message) });
    this.act = {
      edit: (node, text) => this.#edit(node, text),
      again: (node) => this.#again(node),
      turn: (node, by) => this.#turn(node, by),
    };
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
    byId("regenerate").addEventListener("click", () => this.#again(this.conversation.last));
    byId("clear").addEventListener("click", () => {
      this.#open(new Conversation({ settings: this.settings.values }));
      byId("message").focus();
    });
    byId("settings").addEventListener("toggle", () => this.#toEnd());
    this.#open(new Conversation());
  }

  // Show a conversation. An answer that is being received for another one ends.
  #open(conversation) {
    this.aborter?.abort();
    this.conversation = conversation;
    if (conversation.settings) this.settings.show(conversation.settings);
    this.#fail("");
    this.#render();
    this.library.show(conversation);
  }

  #render() {
    const { path } = this.conversation;
    this.turns = path.map((node) => this.#make(node));
    this.log.replaceChildren(...(path.length ? this.turns.map(({ root }) => root) : [this.empty]));
    this.#toEnd();
    this.#settle();
  }

  #make(node) {
    const { conversation } = this;
    const caller = conversation.path.flatMap(({ tool_calls }) => tool_calls ?? []).find(({ id }) => id === node.tool_call_id);
    return makeTurn(node, { act: this.act, place: conversation.placeOf(node), toolName: caller?.function.name ?? "a tool", isPlain: node.isPlain });
  }

  #append(parent, content) {
    const node = this.conversation.add(parent, content);
    const turn = this.#make(node);
    this.empty.remove();
    this.turns.push(turn);
    this.log.append(turn.root);
    this.#toEnd();
    return turn;
  }

  #send() {
    const text = byId("message").value;
    if (this.aborter || (!text.trim() && !this.files.files.length)) return;
    const [open] = this.conversation.openCalls;
    const content = open ? { role: "tool", tool_call_id: open.id, content: text } : { role: "user", content: text, files: this.files.take() };
    const turn = this.#append(this.conversation.last, content);
    byId("message").value = "";
    if (this.conversation.openCalls.length) this.#settle(); // the next call needs its result too
    else this.#answer(turn);
  }

  #edit(node, text) {
    if (this.aborter) return;
    const { conversation } = this;
    conversation.add(conversation.parentOf(node), { role: node.role, content: text, files: node.files });
    this.#render();
    this.#answer(null);
  }

  #again(node) {
    if (this.aborter || node.role !== "assistant") return;
    this.conversation.parentOf(node).chosen = null;
    this.#render();
    this.#answer(null, node);
  }

  #turn(node, by) {
    if (this.aborter) return;
    this.conversation.turn(node, by);
    this.#render();
    this.library.save(this.conversation);
    const shown = this.turns.find(({ node: each }) => each.parent === node.parent);
    shown?.root.querySelector(by < 0 ? ".branches button:first-child" : ".branches button:last-child")?.focus();
  }

  // Request an answer to what is shown. If there is none, `asked` is moved back into the message box, to be corrected and sent again;
  // `before` is the answer that is shown again then.
  async #answer(asked, before = null) {
    const { conversation } = this;
    const { last: parent, messages } = conversation;
    const { signal } = (this.aborter = new AbortController());
    this.#fail("");
    this.#settle();
    let turn = null;
    let answer = null;
    try {
      const body = this.settings.body(messages);
      turn = this.#append(parent, { role: "assistant", content: "", isPlain: this.settings.isPlain, marks: body.mark_drafts ? [] : undefined });
      turn.foot.replaceChildren();
      turn.root.setAttribute("aria-busy", "true");
      answer = new Answer(turn.shown);
      const response = await call("v1/chat/completions", { body, signal, accept: "text/event-stream" });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const atEnd = this.#atEnd;
        answer.add(JSON.parse(data));
        if (atEnd) this.#toEnd();
      }
    } catch (error) {
      if (error.name !== "AbortError" && conversation === this.conversation) this.#fail(error.message);
    }
    if (this.aborter?.signal === signal) this.aborter = null;
    turn?.shown.finish();
    if (answer && !answer.isEmpty) {
      Object.assign(turn.node, answer.message);
      finishTurn(turn, { act: this.act, place: conversation.placeOf(turn.node) });
      this.measured({ ttft: answer.ttft, itl: answer.itl });
    } else this.#takeBack(conversation, turn, asked, before);
    conversation.settings = conversation === this.conversation ? this.settings.values : conversation.settings;
    if (conversation.path.length) await this.library.save(conversation);
    if (conversation !== this.conversation) return;
    if (this.#atEnd) this.#toEnd();
    this.#settle();
  }

  #takeBack(conversation, turn, asked, before) {
    if (turn) conversation.remove(turn.node);
    if (before) conversation.parentOf(before).chosen = before.id;
    if (asked) {
      conversation.remove(asked.node);
      if (conversation === this.conversation && !byId("message").value) {
        byId("message").value = asked.node.content;
        this.files.put(asked.node.files);
      }
    }
    if (conversation === this.conversation) this.#render();
  }

  get #atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 90;
  }

  #toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  #settle() {
    const busy = Boolean(this.aborter);
    const [open] = this.conversation.openCalls;
    byId("send").disabled = busy;
    byId("stop").disabled = !busy;
    byId("regenerate").disabled = busy || this.conversation.last.role !== "assistant";
    setText(byId("message-label"), open ? `Result of ${open.function.name}` : "Message");
  }

  #fail(message) {
    const box = byId("chat-error");
    box.hidden = !message;
    setText(box, message);
  }
}
