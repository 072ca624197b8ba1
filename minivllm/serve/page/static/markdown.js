// The little Markdown that models write: paragraphs, headings, lists, code, bold and italic. Anything else stays text;
// links do too, so that an answer cannot lead the browser anywhere.

import { h } from "./dom.js";

const FENCE = /^\s*(```|~~~)\s*([\w+-]*)/;
const HEADING = /^#{1,6}\s+(.*)/;
const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)/;
const INLINE = /(`+)([\s\S]+?)\1|\*\*(?=\S)([\s\S]+?\S)\*\*|\*(?=[^\s*])([^*]*[^\s*])\*/g;

/** Elements for a text, which may be incomplete. */
export function markdown(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at += 1;
    else if (FENCE.test(line)) at = fenced(lines, at, found);
    else if (HEADING.test(line)) {
      found.push(h("h3", {}, inline(HEADING.exec(line)[1])));
      at += 1;
    } else if (ITEM.test(line)) at = list(lines, at, found);
    else at = paragraph(lines, at, found);
  }
  return found;
}

function fenced(lines, at, found) {
  const [, fence] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence)) end += 1;
  found.push(h("pre", { tabindex: 0 }, h("code", {}, lines.slice(at + 1, end).join("\n"))));
  return end + 1;
}

function list(lines, at, found) {
  const [, bullet, number] = ITEM.exec(lines[at]);
  const items = [];
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (match && Boolean(match[1]) === Boolean(bullet)) items.push([match[3]]);
    else if (/^\s+\S/.test(lines[at])) items.at(-1).push(lines[at].trim());
    else if (lines[at].trim() || !ITEM.test(lines[at + 1] ?? "")) break;
    at += 1;
  }
  const made = items.map((item) => h("li", {}, inline(item.join("\n"))));
  found.push(bullet ? h("ul", {}, made) : h("ol", { start: number }, made));
  return at;
}

function paragraph(lines, at, found) {
  let end = at + 1;
  const goesOn = (line) => line?.trim() && ![FENCE, HEADING, ITEM].some((kind) => kind.test(line));
  while (goesOn(lines[end])) end += 1;
  found.push(h("p", {}, inline(lines.slice(at, end).join("\n"))));
  return end;
}

function inline(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    found.push(...broken(text.slice(from, match.index)));
    const [, , code, bold, italic] = match;
    if (code !== undefined) found.push(h("code", {}, code));
    else found.push(bold === undefined ? h("em", {}, italic) : h("strong", {}, inline(bold)));
    from = match.index + match[0].length;
  }
  return [...found, ...broken(text.slice(from))];
}

/** A line break in the text is one on the page. */
function broken(text) {
  return text.split("\n").flatMap((line, i) => (i ? [h("br"), line] : [line])).filter((part) => part !== "");
}
