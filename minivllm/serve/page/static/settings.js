// The sampling controls. What is left empty is not sent: the server has its own defaults.

import { key } from "./api.js";
import { h } from "./dom.js";

const STORED = "minivllm.settings";
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, step: 0.1, value: 0.7, empty: "1" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, value: 512, empty: "all there is room for" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.05, empty: "1" },
  { name: "top_k", label: "Top-k", min: 0, step: 1, empty: "all" },
  { name: "seed", label: "Seed", step: 1, empty: "another each time" },
];

class Settings extends HTMLElement {
  connectedCallback() {
    const system = h("textarea", { name: "system", rows: 3, placeholder: "none" });
    const secret = h("input", { name: "key", type: "password", autocomplete: "off", placeholder: "none" });
    secret.value = key.get();
    secret.addEventListener("change", () => key.set(secret.value.trim()));
    this.form = h(
      "form",
      {
        "aria-label": "Settings",
        onsubmit: (event) => event.preventDefault(),
        oninput: (event) => this.#changed(event),
      },
      h("label", {}, "System prompt", system),
      h("div", { class: "pair" }, NUMBERS.map(field)),
      h("label", {}, "API key", secret, h("small", {}, "Kept in this tab, until you close it.")),
    );
    this.prepend(this.form);
    this.#restore();
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  /** The fields of a request's body. */
  get sampling() {
    const given = NUMBERS.map(({ name }) => [name, this.form.elements[name].value]).filter(([, value]) => value !== "");
    return Object.fromEntries(given.map(([name, value]) => [name, Number(value)]));
  }

  /** Show where the server found fault; false if it was not with one of these fields. */
  blame(name) {
    const input = name && this.form.elements[name];
    if (!input) return false;
    input.setAttribute("aria-invalid", "true");
    this.dataset.open = "";
    input.focus();
    return true;
  }

  #changed({ target }) {
    target.removeAttribute("aria-invalid");
    const fields = ["system", ...NUMBERS.map(({ name }) => name)];
    const values = Object.fromEntries(fields.map((name) => [name, this.form.elements[name].value]));
    sessionStorage.setItem(STORED, JSON.stringify(values));
  }

  #restore() {
    const values = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    for (const [name, value] of Object.entries(values)) this.form.elements[name].value = value;
  }
}

function field({ name, label, empty, value = "", ...limits }) {
  const kind = { type: "number", inputmode: "decimal", placeholder: empty, value };
  return h("label", {}, label, h("input", { name, ...kind, ...limits }));
}

customElements.define("mv-settings", Settings);
