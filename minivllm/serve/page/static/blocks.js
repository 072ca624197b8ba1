// The KV block pool as a map: a square a block, in the pool's order, row by row. In a pool of more blocks than squares
// fit, a square is several blocks and shows the busiest of them.

import { h, svg } from "./dom.js";
import { count, plural } from "./format.js";

const STATES = ["free", "cached", "used", "shared"]; // from idle to busy
const MEANS = { free: "free", cached: "cached: free, holds a prefix", used: "used", shared: "shared by requests" };
const PITCHES = [16, 14, 12, 10, 9, 8, 7, 6]; // pixels from square to square, the largest that fits
const MAX_HEIGHT = 220;

export class BlockMap {
  total = 0;
  inUse = 0;

  constructor() {
    this.paths = Object.fromEntries(STATES.map((state) => [state, svg("path", { class: state })]));
    this.mine = svg("path", { class: "mine" });
    this.picture = svg("svg", { class: "pool", role: "img" }, Object.values(this.paths), this.mine);
    this.about = h("p");
    this.detail = h("p", { class: "detail" });
    this.element = h(
      "section",
      { class: "panel", "aria-label": "Block pool" },
      h("header", {}, h("h2", {}, "Block pool"), this.about, legend()),
      this.picture,
      this.detail,
    );
  }

  /** highlight: {name, blocks: [[first, number]], ended} of a request, or null. */
  draw({ blocks, block_size: blockSize }, highlight) {
    const { states, numbers } = parse(blocks);
    this.total = states.length;
    this.inUse = numbers.used + numbers.shared;
    const grid = layout(states.length, this.element.clientWidth - 42);
    const cells = busiest(states, grid.each);
    for (const [i, name] of STATES.entries()) set(this.paths[name], "d", squares(cells, i, grid, name));
    set(this.mine, "d", highlight ? outlines(highlight.blocks, grid) : "");
    set(this.picture, "height", grid.height);
    const said = STATES.map((name) => `${count(numbers[name])} ${name}`).join(", ");
    set(this.picture, "aria-label", `${plural(this.total, "block")}: ${said}`);
    const square = grid.each > 1 ? `; a square is ${grid.each} of them, and shows the busiest` : "";
    this.about.textContent = `${plural(this.total, "block")} of ${plural(blockSize, "token")}${square}`;
    this.detail.textContent = `${said}.${highlight ? ` ${tell(highlight)}` : " Choose a request to see its blocks."}`;
  }
}

function tell({ name, blocks, ended }) {
  const number = plural(blocks.reduce((n, [, length]) => n + length, 0), "block");
  return `Request ${name} ${ended ? "has ended; it had" : "has"} the ${number} with an outline.`;
}

/** "f3u2" as {states: [0, 0, 0, 2, 2], numbers: {free: 3, cached: 0, used: 2, shared: 0}}. */
function parse(text) {
  const found = [...text.matchAll(/([fcus])(\d+)/g)];
  const runs = found.map(([, letter, length]) => ["fcus".indexOf(letter), Number(length)]);
  const states = new Uint8Array(runs.reduce((sum, [, length]) => sum + length, 0));
  const numbers = Object.fromEntries(STATES.map((name) => [name, 0]));
  let at = 0;
  for (const [state, length] of runs) {
    states.fill(state, at, at + length);
    numbers[STATES[state]] += length;
    at += length;
  }
  return { states, numbers };
}

function layout(number, width) {
  for (const pitch of PITCHES) {
    const columns = Math.max(1, Math.floor(width / pitch));
    const height = Math.ceil(number / columns) * pitch;
    if (height <= MAX_HEIGHT) return { pitch, columns, height, each: 1 };
  }
  const pitch = PITCHES.at(-1);
  const columns = Math.max(1, Math.floor(width / pitch));
  const each = Math.ceil(number / (columns * Math.floor(MAX_HEIGHT / pitch)));
  return { pitch, columns, each, height: Math.ceil(number / each / columns) * pitch };
}

function busiest(states, each) {
  if (each === 1) return states;
  const cells = [];
  for (let i = 0; i < states.length; i += each) cells.push(Math.max(...states.slice(i, i + each)));
  return cells;
}

function squares(cells, wanted, grid, name) {
  const size = grid.pitch - 2;
  const inset = { free: size / 2 - 1, cached: 0.5 }[name] ?? 0;
  const side = size - 2 * inset;
  let path = "";
  cells.forEach((state, i) => {
    if (state === wanted) path += box(i, grid, inset, side);
  });
  return path;
}

/** Around neighbours in a row together. */
function outlines(runs, { each, columns, pitch }) {
  const cells = new Set();
  for (const [first, length] of runs) for (let i = first; i < first + length; i += 1) cells.add(Math.floor(i / each));
  let path = "";
  for (const cell of cells) {
    const begins = cell % columns === 0 || !cells.has(cell - 1);
    if (!begins) continue;
    let end = cell + 1;
    while (cells.has(end) && end % columns) end += 1;
    const [x, y, long] = [(cell % columns) * pitch - 1, Math.floor(cell / columns) * pitch - 1, (end - cell) * pitch];
    path += `M${x} ${y}h${long}v${pitch}h${-long}z`;
  }
  return path;
}

function box(i, { columns, pitch }, inset, side) {
  return `M${(i % columns) * pitch + inset} ${Math.floor(i / columns) * pitch + inset}h${side}v${side}h${-side}z`;
}

function set(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function legend() {
  const grid = { columns: 1, pitch: 14 };
  const mark = (name, i) =>
    svg("svg", { "aria-hidden": "true" }, svg("path", { class: name, d: squares([i], i, grid, name) }));
  return h("ul", { class: "legend" }, STATES.map((name, i) => h("li", {}, mark(name, i), MEANS[name])));
}
