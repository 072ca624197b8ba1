// The page's frame: which view is shown, which model is asked, light or dark.

import { ask } from "./api.js";
import "./chat.js";
import { announce, h } from "./dom.js";
import "./engine.js";

const VIEWS = { "#chat": "mv-chat", "#engine": "mv-engine" };
const THEMES = ["system", "light", "dark"];

function show() {
  const asked = location.hash in VIEWS ? location.hash : document.querySelector("nav [aria-current]")?.hash ?? "#chat";
  for (const [hash, name] of Object.entries(VIEWS)) {
    document.querySelector(name).hidden = hash !== asked;
    const link = document.querySelector(`nav a[href="${hash}"]`);
    if (hash === asked) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = asked === "#engine" ? "Engine – minivllm" : "minivllm";
}

function setTheme(theme) {
  const chosen = THEMES.includes(theme) ? theme : "system";
  document.documentElement.dataset.theme = chosen;
  localStorage.setItem("minivllm.theme", chosen);
  document.getElementById("theme").replaceChildren(h("span", { class: "lead" }, "Theme: "), chosen);
}

async function listModels() {
  const select = document.getElementById("model");
  try {
    const { data } = await (await ask("v1/models")).json();
    const before = select.value;
    select.replaceChildren(...data.map(({ id }) => h("option", { value: id }, id)));
    if (data.some(({ id }) => id === before)) select.value = before;
    select.disabled = false;
  } catch (error) {
    select.replaceChildren(h("option", { value: "" }, error.status === 401 ? "needs an API key" : "no answer"));
    select.disabled = true;
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(next);
  announce(`Theme: ${next}`);
});
addEventListener("hashchange", show);
addEventListener("key", listModels);
setTheme(localStorage.getItem("minivllm.theme"));
show();
listModels();
