// One answer: its text while it comes, its tokens, how fast it came, and what can be done with it.

import { copy, h } from "./dom.js";
import { duration, plural, rate } from "./format.js";
import { markdown } from "./markdown.js";
import { remember } from "./mine.js";
import { scale, Tokens } from "./tokens.js";

const ENDINGS = { stop: "ended by itself", length: "cut at max tokens", stopped: "stopped by you" };

class Answer extends HTMLElement {
  text = "";
  requestId = "";
  #tokens = new Tokens();
  #times = { sent: performance.now(), first: 0, last: 0 };
  #numTokens = 0;
  #ending = "";
  #frame = 0;

  /** name: of the model. actions: {label: function}. */
  constructor(name = "", actions = {}) {
    super();
    this.name = name;
    this.actions = actions;
  }

  connectedCallback() {
    if (this.body) return; // moved, not made
    this.classList.add("said", "answer");
    this.setAttribute("aria-busy", "true");
    this.body = h("div", { class: "text" });
    this.stats = h("span", { class: "stats" }, "waiting for the first token");
    this.foot = h("div", { class: "foot" }, this.stats);
    this.append(h("span", { class: "who" }, this.name), this.body, this.foot);
  }

  add(chunk) {
    const [choice] = chunk.choices;
    if (!this.requestId) remember((this.requestId = chunk.id));
    if (chunk.usage) this.#numTokens = chunk.usage.completion_tokens;
    if (!choice) return;
    const tokens = choice.logprobs?.content ?? [];
    const text = choice.delta.content ?? "";
    if (tokens.length || text) {
      this.#times.last = performance.now();
      this.#times.first ||= this.#times.last;
      this.#numTokens += tokens.length || 1; // a piece of text stands for a token, until `usage` comes
    }
    this.#tokens.add(tokens);
    this.text += text;
    if (choice.finish_reason) this.#ending = choice.finish_reason;
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  /** Show the text anew, or the tokens if they are known and `tinted` says so. */
  draw() {
    this.#frame = 0;
    const tinted = this.closest(".log")?.dataset.tinted === "true" && this.#tokens.size > 0;
    if (!tinted) this.body.replaceChildren(...markdown(this.text));
    else if (this.body.firstChild !== this.#tokens.element) this.body.replaceChildren(this.#tokens.element);
    this.stats.textContent = this.#statistics();
    this.querySelector(".scale")?.remove();
    if (tinted) this.stats.after(scale());
    this.dispatchEvent(new Event("drawn", { bubbles: true }));
  }

  /** how: "stopped", or "" for the server's own reason. */
  end(how = "") {
    if (how) this.#ending = how;
    this.#close();
  }

  fail(error) {
    this.#ending = "failed";
    this.#close();
    this.foot.before(h("p", { class: "error", role: "alert" }, error.message));
    this.stats.hidden = !this.text;
  }

  get summary() {
    return this.#statistics();
  }

  #close() {
    cancelAnimationFrame(this.#frame);
    this.removeAttribute("aria-busy");
    this.draw();
    const labels = Object.entries({ ...(this.text && { Copy: () => copy(this.text) }), ...this.actions });
    const button = ([label, act]) =>
      h("button", { class: "quiet", type: "button", "data-action": label, onclick: act }, label);
    this.foot.append(h("span", { class: "actions" }, labels.map(button)));
  }

  #statistics() {
    const { sent, first, last } = this.#times;
    if (!first) return this.#ending ? ENDINGS[this.#ending] ?? this.#ending : "waiting for the first token";
    const parts = [`TTFT ${duration(first - sent)}`];
    const seconds = (last - first) / 1000;
    if (this.#numTokens > 1 && seconds) parts.push(`${rate((this.#numTokens - 1) / seconds)} tokens/s`);
    parts.push(plural(this.#numTokens, "token"));
    if (this.#ending) parts.push(ENDINGS[this.#ending] ?? this.#ending);
    return parts.join(" · ");
  }
}

customElements.define("mv-answer", Answer);

export { Answer };
