// The last steps, side by side: what each one's token budget went to, and under it, for the same steps, how long
// requests waited for their next token and for their first one.

import { h, svg } from "./dom.js";
import { count, duration, niceCeiling, plural, quantile, shortDuration } from "./format.js";

const PITCH = 6; // pixels a step
const GUTTER = 44; // for the numbers beside a plot
const HEIGHTS = { tokens: 104, itl: 52, ttft: 52 };
const PARTS = ["prefill", "decode", "draft"];
const HINT = "Point at a step, or move there with the arrow keys, to read what it did.";
const LABEL = "The last steps. Arrow keys move between them and tell what each one did.";

export class StepCharts {
  #steps = [];
  #budget = 0;
  #chosen = null; // the number of a step
  #width = 0;

  constructor() {
    this.plots = Object.fromEntries(Object.entries(HEIGHTS).map(([name, height]) => [name, new Plot(height)]));
    const { tokens, itl, ttft } = this.plots;
    tokens.picture.prepend(hatch());
    this.charts = h(
      "div",
      {
        class: "charts",
        tabindex: 0,
        role: "group",
        "aria-label": LABEL,
        onkeydown: (event) => this.#key(event),
        onblur: () => this.#choose(null),
        onpointermove: (event) => this.#point(event),
        onpointerleave: () => this.#choose(null),
      },
      tokens.figure("Tokens a step"),
      itl.figure("Inter-token latency"),
      ttft.figure("Time to first token"),
    );
    this.detail = h("p", { class: "detail", "aria-live": "polite" });
    this.about = h("p");
    this.element = h(
      "section",
      { class: "panel", "aria-label": "Steps" },
      h("header", {}, h("h2", {}, "Steps"), this.about, legend()),
      this.charts,
      this.detail,
    );
  }

  draw(steps, budget) {
    this.#width = Math.max(0, this.charts.clientWidth);
    this.#steps = steps.slice(-Math.max(1, Math.floor((this.#width - GUTTER) / PITCH)));
    this.#budget = budget;
    const { tokens, itl, ttft } = this.plots;
    const sums = this.#steps.map((step) => PARTS.reduce((sum, part) => sum + step[part], 0));
    const most = Math.max(1, ...sums);
    tokens.begin(this.#width, niceCeiling(most), count);
    const below = this.#steps.map(() => 0);
    for (const part of PARTS) {
      tokens.bars(part, this.#steps.map((step, i) => [below[i], step[part]]));
      this.#steps.forEach((step, i) => (below[i] += step[part]));
    }
    tokens.line("budget", budget <= tokens.top ? budget : null);
    tokens.say(`budget ${count(budget)}, highest here ${count(Math.max(0, ...sums))}`);
    latencies(itl, this.#steps.map((step) => step.itl_ms), this.#width, "dot");
    latencies(ttft, this.#steps.map((step) => step.ttft_ms), this.#width, "first");
    const number = count(this.#steps.length);
    this.about.textContent = this.#steps.length ? `the last ${number}, newest on the right` : "none yet";
    this.#mark();
  }

  // --- one step

  #key(event) {
    if (!this.#steps.length) return;
    const last = this.#steps.length - 1;
    const here = this.#index();
    const [left, right] = here < 0 ? [last, last] : [here - 1, here + 1];
    const to = { ArrowLeft: left, ArrowRight: right, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#choose(this.#steps[Math.max(0, Math.min(last, to))].number);
  }

  #point(event) {
    const box = this.charts.getBoundingClientRect();
    const behind = Math.floor((box.right - event.clientX) / PITCH);
    this.#choose(this.#steps.at(-1 - behind)?.number ?? null);
  }

  #choose(number) {
    if (this.#chosen === number) return;
    this.#chosen = number;
    this.#mark();
  }

  #index() {
    return this.#chosen === null ? -1 : this.#steps.findIndex(({ number }) => number === this.#chosen);
  }

  #mark() {
    const at = this.#index();
    for (const plot of Object.values(this.plots)) plot.cursor(at, this.#steps.length);
    const text = at < 0 ? HINT : told(this.#steps[at], this.#budget);
    if (this.detail.textContent !== text) this.detail.textContent = text;
  }
}

function latencies(plot, values, width, mark) {
  const all = values.flat();
  plot.begin(width, niceCeiling(Math.max(1, ...all)), (ms) => (all.length ? shortDuration(ms) : ""));
  plot.dots(mark, values);
  plot.say(all.length ? `p50 ${duration(quantile(all, 0.5))}, p95 ${duration(quantile(all, 0.95))}` : "none here");
}

function told(step, budget) {
  const tokens = PARTS.reduce((sum, part) => sum + step[part], 0);
  const parts = PARTS.filter((part) => step[part]).map((part) => `${count(step[part])} ${part}`);
  const accepted = step.draft ? `, ${count(step.accepted)} of the drafts accepted` : "";
  const gone = step.preempted ? `; ${plural(step.preempted, "request")} preempted` : "";
  return (
    `Step ${count(step.step)}: ${count(tokens)} of ${plural(budget, "token")} (${parts.join(", ")}${accepted}) in ` +
    `${duration(step.ms)}; ${count(step.running)} running, ${count(step.waiting)} waiting${gone}.`
  );
}

/** One plot; all have the same x axis, whose right end is the newest step. */
class Plot {
  top = 1;

  constructor(height) {
    this.height = height;
    this.marks = svg("g");
    this.pointer = svg("line", { class: "cursor", y1: 0, y2: height, visibility: "hidden" });
    this.picture = svg("svg", { height: height + 1, "aria-hidden": "true" }, this.marks, this.pointer);
    this.note = h("span");
  }

  figure(title) {
    return h("figure", {}, h("figcaption", {}, title, this.note), this.picture);
  }

  say(text) {
    this.note.textContent = text;
  }

  begin(width, top, label) {
    Object.assign(this, { width, top });
    this.picture.setAttribute("width", width);
    this.marks.replaceChildren(
      ...[0, 0.5, 1].map((part) => this.#rule(part)),
      svg("text", { x: GUTTER - 8, y: 8, "text-anchor": "end" }, label(top)),
      svg("text", { x: GUTTER - 8, y: this.height, "text-anchor": "end" }, "0"),
    );
  }

  #rule(part) {
    const y = Math.round(this.height * (1 - part)) + 0.5;
    return svg("line", { class: "rule", x1: GUTTER, x2: this.width, y1: y, y2: y });
  }

  #x(i, number) {
    return this.width - (number - i) * PITCH;
  }

  #y(value) {
    return this.height * (1 - value / this.top);
  }

  /** values: [from, length] a step. */
  bars(part, values) {
    const wide = PITCH - 1;
    const path = values.map(([from, length], i) => {
      if (!length) return "";
      const tall = Math.max(1, this.#y(from) - this.#y(from + length)).toFixed(1);
      return `M${this.#x(i, values.length)} ${this.#y(from).toFixed(1)}h${wide}v${-tall}h${-wide}z`;
    });
    this.marks.append(svg("path", { ...look(part), d: path.join("") }));
  }

  /** values: a list a step. */
  dots(mark, values) {
    const radius = mark === "dot" ? 1.5 : 3;
    const path = values.flatMap((list, i) =>
      list.map((value) => {
        const [x, y] = [this.#x(i, values.length) + PITCH / 2 - 0.5, this.#y(value).toFixed(1)];
        const half = `a${radius} ${radius} 0 1 0`;
        return `M${x - radius} ${y}${half} ${2 * radius} 0${half} ${-2 * radius} 0`;
      }),
    );
    this.marks.append(svg("path", { class: mark, d: path.join("") }));
  }

  line(name, value) {
    if (value === null) return;
    const y = Math.round(this.#y(value)) + 0.5;
    this.marks.append(svg("line", { class: name, x1: GUTTER, x2: this.width, y1: y, y2: y }));
  }

  cursor(i, number) {
    const x = this.#x(i, number) + PITCH / 2 - 0.5;
    this.pointer.setAttribute("x1", x);
    this.pointer.setAttribute("x2", x);
    this.pointer.setAttribute("visibility", i < 0 ? "hidden" : "visible");
  }
}

function hatch() {
  const stripe = svg("path", { class: "hatch", d: "M-1 1l2 -2M0 4l4 -4M3 5l2 -2" });
  return svg("defs", {}, svg("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse" }, stripe));
}

const look = (part) => (part === "draft" ? { fill: "url(#hatch)" } : { class: part });

function legend() {
  const mark = (part) => svg("svg", { "aria-hidden": "true" }, svg("path", { ...look(part), d: "M0 0h12v12h-12z" }));
  return h("ul", { class: "legend" }, PARTS.map((part) => h("li", {}, mark(part), part)));
}
