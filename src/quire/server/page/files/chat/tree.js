// A conversation as a tree: a message that was edited and an answer that was made again are branches, of which one is shown.

const ROOT = "root";

export class Conversation {
  // `isKept`: this browser has kept it once.
  constructor(data = {}, isKept = false) {
    this.isKept = isKept;
    this.id = data.id ?? crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
    this.title = data.title ?? "";
    this.updated = data.updated ?? Date.now();
    this.settings = data.settings ?? null;
    this.nodes = data.nodes ?? { [ROOT]: { id: ROOT, parent: null, children: [], chosen: null } };
    this.next = data.next ?? 1;
  }

  get data() {
    const { id, title, updated, settings, nodes, next } = this;
    return { id, title, updated, settings, nodes, next };
  }

  // What is shown, from the first message to the last.
  get path() {
    const path = [];
    for (let id = this.nodes[ROOT].chosen; id; id = this.nodes[id].chosen) path.push(this.nodes[id]);
    return path;
  }

  get last() {
    return this.path.at(-1) ?? this.nodes[ROOT];
  }

  parentOf(node) {
    return this.nodes[node.parent];
  }

  add(parent, content) {
    const node = { ...content, id: String(this.next), parent: parent.id, children: [], chosen: null };
    this.next += 1;
    this.nodes[node.id] = node;
    parent.children.push(node.id);
    parent.chosen = node.id;
    this.updated = Date.now();
    if (!this.title && node.role === "user") this.title = (node.content.trim() || node.files?.[0]?.name || "").slice(0, 60);
    return node;
  }

  // A node without children is taken out; its neighbour is shown.
  remove(node) {
    const parent = this.parentOf(node);
    parent.children = parent.children.filter((id) => id !== node.id);
    parent.chosen = parent.children.at(-1) ?? null;
    delete this.nodes[node.id];
  }

  // Show the branch so many places beside this one.
  turn(node, by) {
    const { children } = this.parentOf(node);
    const place = (children.indexOf(node.id) + by + children.length) % children.length;
    this.parentOf(node).chosen = children[place];
  }

  placeOf(node) {
    const { children } = this.parentOf(node);
    return [children.indexOf(node.id) + 1, children.length];
  }

  // What is sent to the server.
  get messages() {
    return this.path.map(({ role, content, files, tool_calls, tool_call_id }) => {
      const message = { role, content: role === "assistant" && !content && tool_calls ? null : withFiles(content, files) };
      if (tool_calls) message.tool_calls = tool_calls;
      if (tool_call_id) message.tool_call_id = tool_call_id;
      return message;
    });
  }

  // Tool calls of the last answer that have no result yet.
  get openCalls() {
    const { path } = this;
    const at = path.findLastIndex(({ role }) => role === "assistant");
    const done = new Set(path.slice(at + 1).map(({ tool_call_id }) => tool_call_id));
    return at < 0 ? [] : (path[at].tool_calls ?? []).filter(({ id }) => !done.has(id));
  }
}

function withFiles(content, files = []) {
  const parts = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
    return `File ${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

const isText = (value) => typeof value === "string";
const listOf = (check) => (value) => Array.isArray(value) && value.every(check);
// What a message may have beside its text.
const OPTIONAL = {
  files: listOf((file) => isText(file?.name) && isText(file.text)),
  tool_calls: listOf((call) => isText(call?.id) && isText(call.function?.name) && isText(call.function.arguments)),
  tool_call_id: isText,
  reasoning: isText,
  figures: isText,
  prompt: listOf(Number.isFinite),
  marks: listOf((length) => Number.isInteger(length) && length >= 0),
};

// A conversation from a file. Throws an error if it is none.
export function fromExport(data) {
  const wrong = (why) => new Error(`this is not an exported conversation: ${why}`);
  if (typeof data !== "object" || data === null || typeof data.nodes !== "object" || !data.nodes?.[ROOT]) throw wrong("it has no messages");
  const settings = data.settings ?? {};
  if (typeof settings !== "object" || !Object.values(settings).every((value) => ["string", "boolean"].includes(typeof value))) throw wrong("its settings are malformed");
  const seen = new Set();
  const open = [[ROOT, null]];
  while (open.length) {
    const [id, parent] = open.pop();
    const node = data.nodes[id];
    if (!node || seen.has(id) || node.id !== id || node.parent !== parent) throw wrong("its messages are not a tree");
    seen.add(id);
    const isMessage = id === ROOT || (/^\d{1,15}$/.test(id) && ["user", "assistant", "tool"].includes(node.role) && isText(node.content));
    const isComplete = Object.entries(OPTIONAL).every(([name, check]) => node[name] === undefined || check(node[name]));
    if (!isMessage || !isComplete || !Array.isArray(node.children) || (node.chosen !== null && !node.children.includes(node.chosen))) throw wrong(`message ${id} is malformed`);
    open.push(...node.children.map((child) => [child, id]));
  }
  const title = typeof data.title === "string" ? data.title.slice(0, 200) : "";
  return new Conversation({ nodes: data.nodes, next: Math.max(0, ...[...seen].map((id) => Number(id) || 0)) + 1, title, settings: data.settings ?? null });
}
