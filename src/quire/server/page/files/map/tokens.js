// The tokens in blocks, which the server sends only when it is asked. Where callers must not see them, it is asked once.

import { call, forModel } from "../api.js";

const MAX_ASKED = 64;
const MAX_KEPT = 2000;
const PAUSE_MS = 250;
const RETRY_MS = 5000;

export class Tokens {
  constructor(name, changed) {
    Object.assign(this, { name, changed });
    this.known = new Map(); // block -> { version, texts, ids }
    this.refused = null; // why the server shows no tokens
  }

  of(id) {
    return this.known.get(id)?.texts ?? null;
  }

  idsOf(id) {
    return this.known.get(id)?.ids ?? null;
  }

  // Ask for those of these blocks that have changed since they were read. Of a past moment nothing can be read.
  want(ids, tier, isLive) {
    if (!isLive || this.refused || this.waiting || ids.length > MAX_ASKED) return;
    const versionOf = (id) => `${tier.state[id]} ${tier.hash[id]} ${tier.filled[id]}`;
    const stale = ids.filter((id) => tier.state[id] && this.known.get(id)?.version !== versionOf(id));
    if (!stale.length) return;
    const versions = stale.map(versionOf);
    this.waiting = setTimeout(() => this.#read(stale, versions), PAUSE_MS);
  }

  async #read(ids, versions) {
    try {
      const { blocks } = await (await call(`debug/cache/blocks?tier=${this.name}&ids=${ids.join(",")}${forModel("&")}`)).json();
      if (this.known.size > MAX_KEPT) this.known.clear();
      blocks.forEach(({ id, texts, token_ids }, i) => this.known.set(id, { version: versions[i], texts, ids: token_ids }));
      this.changed();
    } catch (error) {
      this.refused = error.message;
      if (!error.message.startsWith("403")) setTimeout(() => (this.refused = null), RETRY_MS);
      this.changed();
    } finally {
      this.waiting = null;
    }
  }

  // Another key or another server: what was refused may be allowed.
  forget() {
    this.known.clear();
    this.refused = null;
  }
}
