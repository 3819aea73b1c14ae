// Calls to the server this page came from. The key stays in this tab.

const KEY = "quire-api-key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

let model = "";
let engine = 0;

// The model that is chosen, where the server has several; "" where it has one.
export const chooseModel = (name) => (model = name);
// The engine that is watched, where the model has several.
export const chooseEngine = (number) => (engine = number);

export function forModel(sign) {
  const query = new URLSearchParams();
  if (model) query.set("model", model);
  if (engine) query.set("engine", engine);
  return query.size ? sign + query : "";
}

export async function call(path, { body, signal, accept = "application/json" } = {}) {
  const headers = { Accept: accept };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  let said = text.slice(0, 1000);
  try {
    const { error } = JSON.parse(text);
    said = error.param ? `${error.message} (${error.param})` : error.message;
  } catch {
    // not the JSON of an error: show the text itself
  }
  const hint = response.status === 401 ? ". Enter an API key at the top of the page" : "";
  return `${response.status}: ${said || response.statusText}${hint}`;
}

// The data of server-sent events, as they come. (EventSource can neither post nor send a key.)
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // the stream failed already: nothing is left to cancel
  }
}
