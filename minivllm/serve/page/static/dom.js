// Elements without HTML: the page makes no markup out of text, so that no text can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Attributes that begin with "on" are listeners; false and null stand for no attribute and no child. */
export function h(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function furnish(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** Tell whoever listens to the page instead of looking at it. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** Put text on the clipboard, also where the browser has no clipboard for a page (plain HTTP from another machine). */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = h("textarea", { class: "unseen" });
    const before = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    before?.focus();
  }
  announce("Copied");
}
