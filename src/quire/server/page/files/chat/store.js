// Conversations in the browser's own database, so that they outlive the tab. They never leave the browser.

const NAME = "quire";
const CONVERSATIONS = "conversations";
const TITLES = "titles"; // for the list, which need not read the messages

let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
      request.result.createObjectStore(TITLES, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([CONVERSATIONS, TITLES], mode);
    const request = act(transaction.objectStore(CONVERSATIONS), transaction.objectStore(TITLES));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

// { id, title, updated } of all conversations, the newest first.
export async function titles() {
  const all = await run("readonly", (_, names) => names.getAll());
  return all.sort((a, b) => b.updated - a.updated);
}

export const read = (id) => run("readonly", (conversations) => conversations.get(id));

// Write a conversation; one that was kept before (`isKept`) only if it is still there, since any tab may have deleted it.
// Returns whether it was there.
export const write = async (data, isKept) => (await run("readwrite", (conversations, names) => {
  const found = conversations.getKey(data.id);
  found.onsuccess = () => {
    if (isKept && found.result === undefined) return;
    names.put({ id: data.id, title: data.title, updated: data.updated });
    conversations.put(data);
  };
  return found;
})) !== undefined;

export const remove = (id) => run("readwrite", (conversations, names) => {
  names.delete(id);
  return conversations.delete(id);
});
