// Puts the two pages together: the playground on the left, the engine on the right.

import { apiKey, call, chooseEngine, chooseModel, setApiKey } from "./api.js";
import { Playground } from "./chat/playground.js";
import { byId, element, setText } from "./dom.js";
import { EngineView } from "./engine/view.js";

const THEME = "quire-theme";
const THEMES = ["auto", "light", "dark"];

const engine = new EngineView();
new Playground((own) => engine.measured(own));

let numEngines = new Map();

// The choice among the engines of the model, where it has several.
function showEngines() {
  const choice = byId("engine");
  const number = numEngines.get(byId("model").value) ?? 1;
  if (choice.options.length !== number) {
    const engines = Array.from({ length: number }, (_, i) => element("option", { value: i }, `engine ${i}`));
    choice.replaceChildren(...engines);
  }
  choice.hidden = number < 2;
  chooseEngine(Number(choice.value));
}

async function showModels() {
  const choice = byId("model");
  try {
    const { data } = await (await call("v1/models")).json();
    const names = data.map(({ id }) => id);
    const before = choice.value;
    choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(before)) choice.value = before;
    choice.disabled = names.length < 2;
    chooseModel(names.length > 1 ? choice.value : "");
    numEngines = new Map(data.map((card) => [card.id, card.num_engines]));
    showEngines();
  } catch (error) {
    choice.replaceChildren(element("option", { value: "" }, error.message));
    choice.disabled = true;
  }
}

byId("model").addEventListener("change", () => {
  chooseModel(byId("model").value);
  showEngines();
  engine.reconnect();
});

byId("engine").addEventListener("change", () => {
  showEngines();
  engine.reconnect();
});

function showTheme() {
  const theme = localStorage.getItem(THEME) ?? "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
  engine.repaint();
}

byId("theme").addEventListener("click", () => {
  const theme = localStorage.getItem(THEME) ?? "auto";
  localStorage.setItem(THEME, THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.repaint());

byId("key").value = apiKey();
byId("key").addEventListener("change", async () => {
  setApiKey(byId("key").value.trim());
  await showModels();
  engine.reconnect();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key").blur();
});

showTheme();
await showModels();
engine.follow();
