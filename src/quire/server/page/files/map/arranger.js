// Asks the worker for the arrangement of one tier and its prefix tree again and again, one question at a time.

const EVERY_S = 0.7;
const SHARE = 0.25; // of one core that the worker may take

export class Arranger {
  // `done(answer)` is called with what worker.js answers.
  constructor(done) {
    this.done = done;
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => this.#answered(data));
    this.number = 0;
    this.due = 0;
    this.asked = null;
  }

  // Ask, unless it was asked a moment ago. `anew`: at once, because another moment is shown.
  ask(tier, wants, anew) {
    const now = performance.now();
    if (this.asked !== null && !(anew && now > this.due)) {
      this.again ||= anew;
      return;
    }
    if (!anew && !this.again && now < this.due) return;
    this.again = false;
    this.number += 1;
    this.asked = tier;
    this.due = now + 1000 * EVERY_S;
    const { numBlocks, state, refs, filled, depth, hits, hash, parent, owner, sharers } = tier;
    this.worker.postMessage({ number: this.number, wants, tier: { numBlocks, state, refs, filled, depth, hits, hash, parent, owner, sharers } });
  }

  #answered(answer) {
    if (answer.number !== this.number) return;
    const tier = this.asked;
    this.asked = null;
    this.due = performance.now() + 1000 * Math.max(EVERY_S, answer.seconds / SHARE);
    this.done(answer, tier);
  }
}
