// Shows openapi.json as a list of endpoints. Text from the server is only ever set as text.
import { apiKey, call, setApiKey } from "../page/api.js";

const byId = (id) => document.getElementById(id);

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

const refName = (schema) => schema?.$ref?.split("/").pop();

// A type in a few words, such as "string | null" or "array of ChatMessage".
function typeOf(schema) {
  if (schema === undefined || Object.keys(schema).length === 0) return "any";
  if (schema.$ref) return refName(schema);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${typeOf(schema.items)}`;
  return schema.type ?? "any";
}

function table(caption, headings, rows) {
  const head = element("tr", "", ...headings.map((text) => {
    const cell = element("th", text);
    cell.scope = "col";
    return cell;
  }));
  const body = rows.map((row) => element("tr", "", ...row.map((text) => element("td", text))));
  const title = element("caption", caption);
  title.className = "visually-hidden";
  return element("table", "", title, element("thead", "", head), element("tbody", "", ...body));
}

// The fields of a struct and, below, of the structs that it names.
function fields(schema, schemas, title) {
  const shown = [];
  const seen = new Set();
  const queue = [[title, schema]];
  while (queue.length) {
    const [name, next] = queue.shift();
    const found = schemas[refName(next)] ?? next ?? {};
    const properties = Object.entries(found.properties ?? {});
    if (properties.length) {
      const required = new Set(found.required ?? []);
      const rows = properties.map(([key, value]) => [key, typeOf(value), required.has(key) ? "required" : ""]);
      shown.push(element("h3", name), table(name, ["field", "type", ""], rows));
    }
    for (const found of JSON.stringify(properties).matchAll(/"#\/components\/schemas\/(\w+)"/g)) {
      if (!seen.has(found[1])) queue.push([found[1], { $ref: found[0].slice(1, -1) }]);
      seen.add(found[1]);
    }
  }
  return shown;
}

function endpoint(method, path, operation, schemas) {
  const title = element("summary", "", element("code", `${method.toUpperCase()} ${path}`), ` ${operation.summary}`);
  const shown = element("details", "", title);
  // Filled in when it is opened for the first time: there are hundreds of fields.
  shown.addEventListener("toggle", () => {
    if (shown.childElementCount > 1) return;
    const request = operation.requestBody?.content["application/json"]?.schema;
    if (request) shown.append(...fields(request, schemas, "Request"));
    const response = operation.responses["200"]?.content?.["application/json"]?.schema;
    if (response) shown.append(...fields(response, schemas, "Response"));
    const statuses = Object.entries(operation.responses).map(([status, { description, content }]) =>
      [status, Object.keys(content ?? {}).join(", "), description]);
    shown.append(element("h3", "Statuses"), table("Statuses", ["status", "content", "meaning"], statuses));
  });
  return shown;
}

async function load() {
  byId("status").textContent = "Loading";
  try {
    const { paths, components } = await (await call("openapi.json")).json();
    const rows = Object.entries(paths)
      .filter(([path]) => !path.startsWith("/page/") && !path.startsWith("/docs/"))
      .flatMap(([path, methods]) =>
        Object.entries(methods).map(([method, operation]) => endpoint(method, path, operation, components.schemas)));
    byId("endpoints").replaceChildren(...rows);
    filter();
  } catch (error) {
    byId("status").textContent = error.message;
  }
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  let count = 0;
  for (const row of byId("endpoints").children) {
    row.hidden = !row.firstElementChild.textContent.toLowerCase().includes(wanted);
    count += !row.hidden;
  }
  byId("status").textContent = `${count} endpoints`;
}

byId("key").value = apiKey();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key").value.trim());
  load();
});
byId("filter").addEventListener("input", filter);
load();
