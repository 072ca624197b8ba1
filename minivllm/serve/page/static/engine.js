// The engine as it runs: its replicas where there are several, and all that can be seen of the chosen one. It listens
// to /debug/live only while it is looked at: nobody else costs the engine anything.

import { ask, events } from "./api.js";
import { BlockMap } from "./blocks.js";
import { announce, h } from "./dom.js";
import { count, duration, quantile } from "./format.js";
import { ReplicaTable } from "./replicas.js";
import { RequestTable } from "./requests.js";
import { StepCharts } from "./steps.js";

const MAX_STEPS = 1000;
const RETRY_MS = 2000;
const CALM_MS = 1000; // between two pictures, for who asked for less motion
const FIGURES = ["Running", "Waiting", "Tokens in a step", "Blocks in use", "TTFT, median", "ITL, median"];
const DOWN = "This replica does not run. The others go on.";
const UNHEARD = "This replica has not answered yet: it may be in a long step.";
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** What has been heard of one replica. */
class Replica {
  runs = null; // until it is known
  look = null;
  steps = [];

  /** look: null if it does not run. */
  take(look) {
    if (!this.runs || (look && look.next < this.look.next)) this.steps = []; // the core has started anew
    this.runs = look !== null;
    if (!look) return;
    this.look = look;
    this.steps = [...this.steps, ...look.steps].slice(-MAX_STEPS);
  }
}

class Engine extends HTMLElement {
  static observedAttributes = ["hidden"];
  #abort = null;
  #paused = false;
  #replicas = [];
  #chosen = 0;
  #drawing = false;

  connectedCallback() {
    this.state = h("p", { class: "state" }, "Connecting");
    this.place = h("p", { class: "place", hidden: true });
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.#pause() }, "Pause");
    this.again = h("button", { type: "button", hidden: true, onclick: () => this.#restart() }, "Try again");
    this.lanes = new ReplicaTable((number) => this.#choose(number));
    this.whose = h("h2", { class: "whose", hidden: true });
    this.silent = h("p", { class: "empty", hidden: true });
    this.figures = FIGURES.map(() => h("dd", {}, "–"));
    this.charts = new StepCharts();
    this.table = new RequestTable((id) => this.#select(id));
    this.pool = new BlockMap();
    this.parts = h(
      "div",
      { class: "page" },
      h("dl", { class: "figures" }, FIGURES.map((name, i) => h("div", {}, h("dt", {}, name), this.figures[i]))),
      h("div", { class: "two" }, this.charts.element, this.table.element),
      this.pool.element,
    );
    this.append(
      h(
        "div",
        { class: "page" },
        h("div", { class: "head" }, h("h2", {}, "Engine"), this.state, this.place, this.again, this.pause),
        this.lanes.element,
        this.whose,
        this.silent,
        this.parts,
      ),
    );
    new ResizeObserver(() => this.#draw()).observe(this);
    document.addEventListener("visibilitychange", () => this.#listen());
    addEventListener("key", () => this.#restart());
    addEventListener("show-request", ({ detail }) => {
      this.#select(detail);
      location.hash = "#engine";
    });
    this.#listen();
  }

  attributeChangedCallback() {
    if (this.state) this.#listen();
  }

  // --- the connection

  get #wanted() {
    return !this.#paused && !this.hidden && !document.hidden;
  }

  #listen() {
    if (!this.#wanted) {
      this.#abort?.abort();
      this.#abort = null;
    } else if (!this.#abort) {
      this.#abort = new AbortController();
      this.#watch(this.#abort.signal);
    }
  }

  #restart() {
    this.#abort?.abort();
    this.#abort = null;
    this.#listen();
  }

  #pause() {
    this.#paused = !this.#paused;
    this.pause.setAttribute("aria-pressed", String(this.#paused));
    this.pause.textContent = this.#paused ? "Go on" : "Pause";
    this.#say(this.#paused ? "Paused" : "Connecting");
    this.#listen();
  }

  async #watch(signal) {
    this.#say("Connecting");
    while (!signal.aborted) {
      try {
        const response = await ask("debug/live", { signal });
        this.#replicas = [];
        for await (const event of events(response)) this.#take(event);
      } catch (error) {
        if (error.name === "AbortError") return;
        this.#say(error.message, true);
        if (error.status && error.status < 500) {
          this.again.hidden = false;
          return;
        }
        await new Promise((done) => setTimeout(done, RETRY_MS));
      }
    }
  }

  #say(text, isError = false) {
    if (this.state.textContent === text) return;
    this.state.textContent = text;
    this.state.classList.toggle("error", isError);
    this.again.hidden = true;
    if (isError) announce(text);
  }

  #take({ server, servers, replica: number, replicas, look }) {
    this.#say("Live");
    this.place.hidden = servers < 2;
    this.place.textContent = `told by server ${server} (of 0 to ${servers - 1})`;
    if (this.#chosen >= replicas) this.#chosen = 0;
    while (this.#replicas.length < replicas) this.#replicas.push(new Replica());
    const replica = this.#replicas[number];
    if (!look && replica.runs) announce(`Replica ${number} does not run any more`);
    replica.take(look);
    if (this.#drawing) return;
    this.#drawing = true;
    setTimeout(() => requestAnimationFrame(() => this.#draw()), calm.matches ? CALM_MS : 0);
  }

  // --- the picture

  #choose(number) {
    if (this.#chosen === number) return;
    this.#chosen = number;
    this.#select(""); // it is no request of this replica
  }

  #select(id) {
    this.table.selected = id;
    this.#draw();
  }

  #draw() {
    this.#drawing = false;
    const replica = this.#replicas[this.#chosen];
    if (!replica || this.hidden) return;
    this.lanes.draw(this.#replicas, this.#chosen);
    this.whose.hidden = this.#replicas.length < 2;
    this.whose.textContent = `Replica ${this.#chosen}`;
    this.parts.hidden = !replica.runs;
    this.silent.hidden = Boolean(replica.runs);
    this.silent.textContent = replica.runs === false ? DOWN : UNHEARD;
    if (!replica.runs) return;
    const { look, steps } = replica;
    this.charts.draw(steps, look.budget);
    this.table.draw(look);
    this.pool.draw(look, this.table.highlight);
    this.#count(look, steps);
  }

  #count(look, steps) {
    const last = steps.at(-1);
    const itl = steps.flatMap((step) => step.itl_ms);
    const ttft = steps.flatMap((step) => step.ttft_ms);
    const tokens = last ? last.prefill + last.decode + last.draft : 0;
    const shown = [
      [count(look.running), `of ${count(look.places)}`],
      [count(look.waiting)],
      [count(tokens), `of ${count(look.budget)}`],
      [count(this.pool.inUse), `of ${count(this.pool.total)}`],
      [duration(quantile(ttft, 0.5))],
      [duration(quantile(itl, 0.5)), itl.length > 0 && `p95 ${duration(quantile(itl, 0.95))}`],
    ];
    shown.forEach(([value, rest], i) => {
      this.figures[i].replaceChildren(value, ...(rest ? [" ", h("small", {}, rest)] : []));
    });
  }
}

customElements.define("mv-engine", Engine);
