// Puts the two pages together: the playground on the left, the engine on the right.

import { apiKey, call, setApiKey } from "./api.js";
import { Playground } from "./chat.js";
import { byId, setText } from "./dom.js";
import { EngineView } from "./engine.js";

const THEME = "quire-theme";
const THEMES = ["auto", "light", "dark"];

const engine = new EngineView();
new Playground((own) => engine.measured(own));

async function showModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    setText(byId("model"), data[0]?.id ?? "no model");
  } catch (error) {
    setText(byId("model"), error.message);
  }
}

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
byId("key").addEventListener("change", () => {
  setApiKey(byId("key").value.trim());
  showModel();
  engine.reconnect();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key").blur();
});

showTheme();
showModel();
engine.follow();
