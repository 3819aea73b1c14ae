// One answer while it is received: its text, its tool calls and its figures.

import { count, duration, plural } from "../dom.js";

export class Answer {
  // `shown`: where text and tool calls appear, see turns.js.
  constructor(shown) {
    this.shown = shown;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.usage = null;
    this.decodeS = null; // as the server measured it: a short answer arrives here in one piece
    this.drafts = [0, 0]; // tokens that were proposed and verified, and those of them that were right
    this.marks = []; // lengths of the content's parts, by turns not from drafts and from accepted ones, if these are marked
    this.reason = null;
    this.start = performance.now();
    this.first = null;
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

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timings) {
      this.decodeS = chunk.timings.decode_s;
      this.drafts = [chunk.timings.num_drafts ?? 0, chunk.timings.num_accepted_drafts ?? 0];
    }
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.content || thought || delta.tool_calls) this.first ??= performance.now();
    if (delta.content) {
      this.content += delta.content;
      this.#mark(delta.content.length, Boolean(choice.drafted));
      this.shown.write(delta.content, choice.drafted);
    }
    if (thought) {
      this.reasoning += thought;
      this.shown.think(thought);
    }
    for (const each of delta.tool_calls ?? []) this.#call(each);
    if (choice.finish_reason) this.reason = choice.finish_reason;
  }

  #mark(length, drafted) {
    if (this.marks.length === 0) this.marks.push(0);
    if ((this.marks.length % 2 === 0) === drafted) this.marks[this.marks.length - 1] += length;
    else this.marks.push(length);
  }

  #call(delta) {
    const place = delta.index ?? 0;
    const known = (this.calls[place] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= delta.id ?? "";
    known.function.name += delta.function?.name ?? "";
    known.function.arguments += delta.function?.arguments ?? "";
    this.shown.call(place, known);
  }

  // What is kept of it.
  get message() {
    const calls = this.calls.filter(Boolean);
    return {
      content: this.content, marks: this.shown.isMarked ? this.marks : undefined, reasoning: this.reasoning || undefined, tool_calls: calls.length ? calls : undefined, figures: this.figures,
      prompt: this.usage ? [this.usage.prompt_tokens_details?.cached_tokens ?? 0, this.usage.prompt_tokens] : undefined,
    };
  }

  get figures() {
    const said = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens !== undefined) said.push(plural(tokens, "token"));
    if (this.itl) said.push(`${(1 / this.itl).toFixed(1)} tokens/s`);
    if (this.ttft !== undefined) said.push(`first token after ${duration(this.ttft)}`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      said.push(`${count(cached)} of ${count(this.usage.prompt_tokens)} tokens of the prompt were shared`);
    }
    const [drafts, accepted] = this.drafts;
    if (drafts) said.push(`${count(accepted)} of ${plural(drafts, "draft")} accepted, ${count(drafts - accepted)} rejected`);
    said.push(this.reason === null ? "stopped" : this.reason === "length" ? "ended at the token limit" : "");
    return said.filter(Boolean).join(" · ");
  }
}
