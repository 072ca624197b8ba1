// The requests that run or wait. Choosing one outlines its blocks in the pool, also after it has ended.

import { h } from "./dom.js";
import { count, duration } from "./format.js";
import { isMine } from "./mine.js";

const COLUMNS = [
  { name: "State", of: (r) => (r.running ? (r.output ? "decode" : "prefill") : r.preempted ? "preempted" : "waiting") },
  { name: "Prompt", of: (r) => count(r.prompt) },
  { name: "Output", of: (r) => count(r.output) },
  { name: "Cached", of: (r) => count(r.cached), wide: true },
  { name: "Blocks", of: (r) => count(r.blocks.reduce((n, [, length]) => n + length, 0)) },
  { name: "Age", of: (r, now) => duration(1000 * Math.max(0, now - r.arrived)), wide: true },
];

/** "chatcmpl-0123456789..-0#2" is called "01234567#2". */
const shortName = (id) => id.replace(/^[a-z]+-/, "").slice(0, 8) + (/[#~]\d+$/.exec(id)?.[0] ?? "");

export class RequestTable {
  selected = ""; // the beginning of a request's id
  #rows = new Map();
  #last = null; // of the selected one: {name, blocks, ended}

  constructor(select) {
    this.select = select;
    this.body = h("tbody");
    this.about = h("p");
    this.empty = h("p", { class: "empty" }, "No request runs or waits. Ask something under Chat, or send one to /v1.");
    const names = [{ name: "Request" }, ...COLUMNS];
    const heads = names.map(({ name, wide }) => h("th", { scope: "col", class: wide && "wide" }, name));
    this.table = h("table", {}, h("thead", {}, h("tr", {}, heads)), this.body);
    const region = { class: "rows", tabindex: 0, role: "region", "aria-label": "Table of requests" };
    const title = h("header", {}, h("h2", {}, "Requests"), this.about);
    const panel = { class: "panel", "aria-label": "Requests" };
    this.element = h("section", panel, title, h("div", region, this.table), this.empty);
  }

  draw({ requests, running, waiting, now }) {
    const ids = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.#rows.delete(id);
    }
    requests.forEach((request, i) => {
      const row = this.#row(request, now);
      if (this.body.children[i] !== row) this.body.insertBefore(row, this.body.children[i] ?? null);
    });
    this.table.hidden = !requests.length;
    this.empty.hidden = requests.length > 0;
    const unlisted = running + waiting - requests.length;
    this.about.textContent = unlisted > 0 ? `and ${count(unlisted)} more, of other keys or behind these` : "";
    this.#remember(requests);
  }

  get highlight() {
    return this.#last;
  }

  #row(request, now) {
    const row = this.#rows.get(request.id) ?? this.#make(request.id);
    COLUMNS.forEach(({ of }, i) => {
      const text = of(request, now);
      if (row.cells[i + 1].textContent !== text) row.cells[i + 1].textContent = text;
    });
    row.querySelector("button").setAttribute("aria-pressed", String(this.#isSelected(request.id)));
    return row;
  }

  #make(id) {
    const choose = () => this.select(this.#isSelected(id) ? "" : id);
    const button = h("button", { type: "button", title: id, onclick: choose }, shortName(id));
    const name = h("th", { scope: "row" }, button, isMine(id) && h("span", { class: "tag" }, "yours"));
    const row = h("tr", {}, name, COLUMNS.map(({ wide }) => h("td", { class: wide && "wide" })));
    this.#rows.set(id, row);
    return row;
  }

  #isSelected(id) {
    return this.selected !== "" && id.startsWith(this.selected);
  }

  #remember(requests) {
    const found = requests.find(({ id }) => this.#isSelected(id));
    if (!this.selected) this.#last = null;
    else if (found) this.#last = { key: this.selected, name: shortName(found.id), blocks: found.blocks, ended: false };
    else if (this.#last?.key === this.selected) this.#last.ended = true;
    else this.#last = null;
  }
}
