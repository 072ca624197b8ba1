// The replicas of the engine, a lane each: how busy each of them is. The rest of the view shows the chosen one. Nothing
// is seen of this where the engine is one core.

import { h, svg } from "./dom.js";
import { count } from "./format.js";
import { isMine } from "./mine.js";

const COLUMNS = ["Running", "Waiting", "Blocks"];

export class ReplicaTable {
  #lanes = [];

  constructor(choose) {
    this.choose = choose;
    this.body = h("tbody");
    this.about = h("p");
    const heads = ["Replica", ...COLUMNS].map((name) => h("th", { scope: "col" }, name));
    this.element = h(
      "section",
      { class: "panel", "aria-label": "Replicas", hidden: true },
      h("header", {}, h("h2", {}, "Replicas"), this.about),
      h("div", { class: "lanes" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), this.body)),
    );
  }

  /** replicas: {runs, look} each, in their order; runs is null until something has been heard. */
  draw(replicas, chosen) {
    this.element.hidden = replicas.length < 2;
    if (this.element.hidden) return;
    if (this.#lanes.length !== replicas.length) {
      this.#lanes = replicas.map((_, i) => new Lane(i, () => this.choose(i)));
      this.body.replaceChildren(...this.#lanes.map(({ row }) => row));
    }
    const down = replicas.filter(({ runs }) => runs === false).length;
    const rest = down ? `; ${count(down)} of them ${down === 1 ? "does" : "do"} not run` : "";
    this.about.textContent = `${count(replicas.length)} engine cores, each with the whole model${rest}`;
    replicas.forEach((replica, i) => this.#lanes[i].draw(replica, i === chosen));
  }
}

class Lane {
  constructor(number, choose) {
    this.button = h("button", { type: "button", onclick: choose }, `Replica ${number}`);
    this.mine = h("span", { class: "tag", hidden: true }, "yours");
    this.cells = COLUMNS.map(() => h("td"));
    this.level = svg("rect", { class: "used", height: 6, width: 0 });
    this.bar = svg("svg", { class: "level", height: 6, "aria-hidden": "true" }, track(), this.level);
    this.used = h("span");
    this.total = h("span", { class: "wide" });
    this.cells.at(-1).append(this.used, this.total, this.bar);
    this.row = h("tr", {}, h("th", { scope: "row" }, this.button, this.mine), this.cells);
  }

  draw({ runs, look }, isChosen) {
    this.button.setAttribute("aria-pressed", String(isChosen));
    this.mine.hidden = !runs || !look.requests.some(({ id }) => isMine(id));
    const { running, waiting, blocks } = runs ? figures(look) : runs === false ? DOWN : UNHEARD;
    this.cells[0].textContent = running;
    this.cells[1].textContent = waiting;
    this.used.textContent = blocks.used;
    this.total.textContent = blocks.total;
    this.level.setAttribute("width", `${(100 * blocks.part).toFixed(1)}%`);
  }
}

const UNHEARD = { running: "–", waiting: "–", blocks: { used: "–", total: "", part: 0 } };
const DOWN = { ...UNHEARD, running: "does not run" };

function figures(look) {
  const sums = { f: 0, c: 0, u: 0, s: 0 };
  for (const [, letter, length] of look.blocks.matchAll(/([fcus])(\d+)/g)) sums[letter] += Number(length);
  const [used, total] = [sums.u + sums.s, sums.f + sums.c + sums.u + sums.s];
  return {
    running: `${count(look.running)} of ${count(look.places)}`,
    waiting: count(look.waiting),
    blocks: { used: `${count(used)} `, total: `of ${count(total)}`, part: total ? used / total : 0 },
  };
}

const track = () => svg("rect", { class: "track", height: 6, width: "100%" });
