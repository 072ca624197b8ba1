// The conversation. It lives in this page alone: nothing is stored, each request carries all of it.

import { Answer } from "./answer.js";
import { ask, events } from "./api.js";
import { announce, copy, h } from "./dom.js";
import { NUM_RIVALS } from "./tokens.js";
import "./settings.js";

const ABOUT =
  "The conversation stays in this tab, and this page talks to its own server only. " +
  "Watch the engine answer under Engine.";
const IDEAS = ["What is the capital of Japan?", "Name the three primary colors.", "Why is the sky blue?"];
const NEAR = 48; // pixels from the end that count as the end

class Chat extends HTMLElement {
  #turns = []; // {question, answer: Answer}
  #abort = null; // of the answer that comes now
  #atEnd = true; // the view follows a growing answer, until the user scrolls up

  connectedCallback() {
    this.log = h("div", { class: "log", tabindex: 0, role: "region", "aria-label": "Conversation" });
    this.log.addEventListener("drawn", () => this.#follow());
    this.log.addEventListener("scroll", () => this.#scrolled());
    this.field = h("textarea", { rows: 1, "aria-label": "Message", placeholder: "Write a message" });
    this.field.addEventListener("keydown", (event) => this.#key(event));
    this.send = h("button", { type: "submit" });
    this.send.addEventListener("click", (event) => {
      if (event.detail > 1 && this.#abort) event.preventDefault(); // a double click on "Send" is not meant to stop
    });
    this.tinted = h("input", { type: "checkbox", autocomplete: "off", onchange: () => this.#tint() });
    this.copyAll = h("button", { type: "button", onclick: () => copy(this.#transcript()) }, "Copy all");
    this.clear = h("button", { type: "button", onclick: () => this.#clear() }, "Clear");
    this.settings = h("mv-settings", { id: "settings" }, h("div", { class: "actions" }, this.copyAll, this.clear));
    this.toggle = this.#settingsButton();
    const label = h("label", {}, this.tinted, "Log-probabilities");
    const tools = h("div", { class: "tools" }, label, this.toggle, h("span", { class: "gap" }), this.send);
    const form = h("form", { class: "composer" }, h("div", { class: "field" }, this.field, tools));
    form.addEventListener("submit", (event) => this.#submit(event));
    this.append(h("div", { class: "column" }, this.log, form), this.settings);
    this.addEventListener("keydown", (event) => this.#escape(event));
    this.#clear();
  }

  /** On a phone, where the settings are folded away. */
  #settingsButton() {
    const says = { "aria-expanded": "false", "aria-controls": "settings" };
    const button = h("button", { class: "quiet settings-button", type: "button", ...says }, "Settings");
    button.addEventListener("click", () => this.#toggleSettings());
    const tell = () => button.setAttribute("aria-expanded", String("open" in this.settings.dataset));
    new MutationObserver(tell).observe(this.settings, { attributes: true, attributeFilter: ["data-open"] });
    return button;
  }

  // --- what the user does

  #submit(event) {
    event.preventDefault();
    if (this.#abort) {
      this.#abort.abort();
      return;
    }
    const question = this.field.value.trim();
    if (!question) return;
    this.field.value = "";
    if (!this.#turns.length) this.log.replaceChildren();
    const said = [h("span", { class: "who" }, "You"), h("div", { class: "text" }, question)];
    this.log.append(h("div", { class: "said question" }, said));
    this.#turns.push({ question });
    if (matchMedia("(pointer: fine)").matches) this.field.focus();
    this.#answer();
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.#abort) this.field.form.requestSubmit();
    }
  }

  #escape(event) {
    if (event.key !== "Escape") return;
    if (this.#abort) this.#abort.abort();
    else if ("open" in this.settings.dataset && this.toggle.offsetParent) {
      delete this.settings.dataset.open;
      this.toggle.focus();
    }
  }

  #toggleSettings() {
    if ("open" in this.settings.dataset) delete this.settings.dataset.open;
    else {
      this.settings.dataset.open = "";
      this.settings.form.elements.system.focus();
    }
  }

  #tint() {
    this.log.dataset.tinted = String(this.tinted.checked);
    for (const { answer } of this.#turns) answer?.draw();
  }

  #clear() {
    this.#abort?.abort();
    this.#turns = [];
    const button = (idea) => h("button", { type: "button", onclick: () => this.#try(idea) }, idea);
    const ideas = IDEAS.map((idea) => h("li", {}, button(idea)));
    this.log.replaceChildren(
      h(
        "div",
        { class: "welcome" },
        h("h2", {}, "Ask the model"),
        h("p", {}, ABOUT),
        h("ul", {}, ideas),
      ),
    );
    this.#update();
  }

  #try(idea) {
    this.field.value = idea;
    this.field.form.requestSubmit();
  }

  #regenerate() {
    this.#turns.at(-1).answer.remove();
    delete this.#turns.at(-1).answer;
    this.field.focus();
    this.#answer();
  }

  // --- an answer

  async #answer() {
    const turn = this.#turns.at(-1);
    const model = document.getElementById("model").value;
    const answer = new Answer(model || "Model", {
      Regenerate: () => this.#turns.at(-1) === turn && !this.#abort && this.#regenerate(),
      "Show its blocks": () => dispatchEvent(new CustomEvent("show-request", { detail: answer.requestId })),
    });
    const abort = (this.#abort = new AbortController());
    const body = this.#body(model);
    turn.answer = answer;
    this.#atEnd = true;
    this.log.append(answer);
    this.#follow();
    this.#update();
    announce("Answering");
    try {
      const response = await ask("v1/chat/completions", { body, signal: abort.signal });
      for await (const chunk of events(response)) answer.add(chunk);
      answer.end();
      announce(`Answer complete: ${answer.summary}`);
    } catch (error) {
      if (error.name === "AbortError") {
        answer.end("stopped");
        announce("Stopped");
      } else {
        answer.fail(error);
        this.settings.blame(error.param);
      }
    }
    if (this.#abort === abort) this.#abort = null;
    this.#update();
  }

  #body(model) {
    const messages = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    for (const { question, answer } of this.#turns) {
      if (answer && !answer.text) continue; // it failed: the model is not asked again
      messages.push({ role: "user", content: question });
      if (answer?.text) messages.push({ role: "assistant", content: answer.text });
    }
    const tokens = this.tinted.checked ? { logprobs: true, top_logprobs: NUM_RIVALS } : {};
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { ...(model && { model }), messages, ...this.settings.sampling, ...tokens, ...stream };
  }

  // --- what it looks like

  #update() {
    const answering = Boolean(this.#abort);
    this.send.textContent = answering ? "Stop" : "Send";
    this.send.classList.toggle("primary", !answering);
    this.copyAll.disabled = !this.#turns.length || answering;
    this.clear.disabled = !this.#turns.length;
    const last = answering ? null : this.#turns.at(-1)?.answer;
    for (const { answer } of this.#turns) answer?.toggleAttribute("data-last", answer === last);
  }

  #scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = this.log;
    this.#atEnd = scrollHeight - scrollTop - clientHeight < NEAR;
  }

  #follow() {
    if (this.#atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #transcript() {
    const said = this.#turns.flatMap(({ question, answer }) => [`You: ${question}`, `${answer.name}: ${answer.text}`]);
    return said.join("\n\n");
  }
}

customElements.define("mv-chat", Chat);
