// An answer token by token, each tinted by how unlikely the model found it, with what it might have said instead.

import { h } from "./dom.js";
import { percent } from "./format.js";

export const NUM_RIVALS = 5;
const BOUNDS = [0.9, 0.6, 0.3, 0.1]; // probabilities: a token below the n-th has tint n
const LABEL = "Tokens. Arrow keys move between them and show what else was likely.";

const tint = (logprob) => BOUNDS.filter((bound) => Math.exp(logprob) < bound).length;

export class Tokens {
  #decoder = new TextDecoder(); // a character may be several tokens: it is shown in the last of them
  #tokens = [];
  #spans = [];
  #here = -1;
  #rivals = h("div", { class: "rivals", hidden: true });
  #said = h("span", { class: "unseen", "aria-live": "polite" });

  constructor() {
    this.element = h(
      "div",
      {
        class: "tokens",
        tabindex: 0,
        role: "group",
        "aria-label": LABEL,
        onkeydown: (event) => this.#key(event),
        onfocus: () => this.element.matches(":focus-visible") && this.#go(Math.max(0, this.#here)),
        onblur: () => this.#go(-1),
        onpointerover: ({ target }) => this.#go(this.#spans.indexOf(target)),
        onpointerleave: () => this.#go(-1),
      },
      this.#rivals,
      this.#said,
    );
  }

  /** tokens: as in a chunk's logprobs.content. */
  add(tokens) {
    for (const token of tokens) {
      const text = this.#decoder.decode(new Uint8Array(token.bytes), { stream: true });
      const word = text.trimStart() || text; // the space before a word is not tinted: at a line's end it would hang
      const span = h("span", { class: `token t${tint(token.logprob)}` }, word);
      this.#rivals.before(text.slice(0, text.length - word.length));
      this.#tokens.push(token);
      this.#spans.push(span);
      this.#rivals.before(span);
    }
  }

  get size() {
    return this.#tokens.length;
  }

  #key(event) {
    const last = this.#tokens.length - 1;
    const to = { ArrowRight: this.#here + 1, ArrowLeft: this.#here - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape" && this.#here >= 0) {
      event.stopPropagation();
      this.#go(-1);
    } else if (to !== undefined) {
      event.preventDefault();
      this.#go(Math.max(0, Math.min(last, to)), true);
    }
  }

  #go(index, aloud = false) {
    this.#spans[this.#here]?.classList.remove("here");
    this.#here = this.#tokens[index] ? index : -1;
    this.#rivals.hidden = this.#here < 0;
    if (this.#here < 0) return;
    this.#spans[index].classList.add("here");
    this.#show(this.#tokens[index]);
    this.#place(this.#spans[index]);
    if (aloud) this.#said.textContent = this.#rivals.textContent;
  }

  #show(token) {
    const rivals = token.top_logprobs;
    const outsider = rivals.every(({ token: text }) => text !== token.token);
    this.#rivals.replaceChildren(
      h("p", {}, `Chosen with ${percent(Math.exp(token.logprob))}; likeliest were`),
      h("ol", {}, [...rivals, ...(outsider ? [token] : [])].map((rival) => row(rival, rival.token === token.token))),
    );
  }

  #place(span) {
    const box = this.element.getBoundingClientRect();
    const at = span.getClientRects()[0] ?? box;
    const port = this.element.closest(".log").getBoundingClientRect();
    const { width, height } = this.#rivals.getBoundingClientRect();
    const below = at.bottom + 6 + height <= port.bottom || at.top - 6 - height < port.top;
    this.#rivals.style.left = `${Math.max(0, Math.min(at.left - box.left, box.width - width))}px`;
    this.#rivals.style.top = `${(below ? at.bottom + 6 : at.top - 6 - height) - box.top}px`;
  }
}

function row({ token, logprob }, taken) {
  const p = Math.exp(logprob);
  return h(
    "li",
    { class: taken && "taken" },
    h("code", {}, visible(token)),
    h("meter", { min: 0, max: 1, value: p, "aria-hidden": "true" }),
    h("span", {}, ` ${percent(p)} `),
  );
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(nothing)";

/** What the tints mean. */
export function scale() {
  const steps = [0, 1, 2, 3, 4].map((n) => h("span", { class: `token t${n}` }));
  return h("span", { class: "scale" }, "likely", steps, "surprising");
}
