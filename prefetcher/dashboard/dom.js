// Elements from plain calls, and changing a page in place: what has focus, is open or is scrolled stays so when new figures come.
// Covers no figures. Nothing here takes HTML as text, so that no name of a model can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("p", {class: "x", "data-act": "open"}, "text", child, [more], null). */
export function h(tag, attributes, ...children) {
  return made(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function s(tag, attributes, ...children) {
  return made(document.createElementNS(SVG, tag), attributes, children);
}

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    // The page's policy forbids style as text, and allows it through the object model.
    if (name === "style") element.style.cssText = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Makes the children of `root` like `children`, touching only what differs. Those with `data-key` are matched by it, others by place. */
export function fill(root, ...children) {
  const wanted = children.flat(3).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
  patchChildren(root, wanted);
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
}

function patchChildren(root, wanted) {
  const keyed = new Map();
  for (const child of root.childNodes) {
    const key = keyOf(child);
    if (key !== null) keyed.set(key, child);
  }
  let place = root.firstChild;
  for (const child of wanted) {
    const key = keyOf(child);
    let old = key === null ? place : keyed.get(key) || null;
    if (key === null && old && keyOf(old) !== null) old = null;
    if (old && alike(old, child)) {
      if (old === place) place = place.nextSibling;
      else root.insertBefore(old, place);
      patch(old, child);
    } else {
      root.insertBefore(child, place);
    }
  }
  while (place) {
    const next = place.nextSibling;
    if (!wanted.includes(place)) place.remove();
    place = next;
  }
}

function alike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);
}

function patch(old, wanted) {
  if (old === wanted) return;
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name, value } of wanted.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value;
    else old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    // What a person opened stays open.
    if (!wanted.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  // A field that a person is in says what that person writes.
  if ("value" in wanted && old.nodeName !== "BUTTON" && old !== document.activeElement && old.value !== wanted.value
    && old.nodeName !== "SELECT") {
    old.value = wanted.value;
  }
  patchChildren(old, [...wanted.childNodes]);
  if (old.nodeName === "SELECT" && old !== document.activeElement && old.value !== wanted.value) old.value = wanted.value;
}

/** A table that is a list of cards where the page is narrow: heads = [name, …], rows = [{key, cells: [node or text, …]}]. */
export function table(caption, heads, rows, more = {}) {
  const about = (head) => ({ class: head.number ? "number" : "" });
  // Roles are named, because a narrow page lays the table out as cards, and a browser then forgets that it is one.
  return h("div", { class: "scroll" },
    h("table", { class: more.class || "", role: "table" },
      h("caption", { class: "unseen" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
        heads.map((head) => h("th", { scope: "col", role: "columnheader", ...about(head) }, head.name ?? head)))),
      h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { "data-key": row.key, class: row.class || "", role: "row" },
        row.cells.map((cell, i) => {
          const head = heads[i];
          return i === 0
            ? h("th", { scope: "row", role: "rowheader", "data-head": head.name ?? head, ...about(head) }, cell)
            : h("td", { role: "cell", "data-head": head.name ?? head, ...about(head), ...(cell === null ? { class: "nothing" } : {}) },
              cell);
        }))))));
}

/** A table of a chart's figures, closed until somebody opens it. */
export function figures(caption, heads, rows, key) {
  return h("details", { class: "figures", "data-key": key || caption },
    h("summary", {}, "The figures as a table"),
    table(caption, heads, rows.map((cells, i) => ({ key: String(i), cells }))));
}

/** Buttons to the pages before and after: they say `data-act="page"` with `data-to`. */
export function pager(what, offset, limit, matched) {
  if (matched <= limit && offset === 0) return null;
  const last = Math.min(offset + limit, matched);
  return h("nav", { class: "pager", "aria-label": `Pages of ${what}` },
    h("button", { type: "button", "data-act": "page", "data-to": Math.max(0, offset - limit), disabled: offset === 0 }, "Before"),
    h("span", {}, `${matched ? offset + 1 : 0} to ${last} of ${matched.toLocaleString("en")}`),
    h("button", { type: "button", "data-act": "page", "data-to": offset + limit, disabled: last >= matched }, "After"));
}

/** A sign that is not only a colour: kind is good, warn, bad, note or quiet. */
export function sign(kind, text) {
  const marks = { good: "✓", warn: "!", bad: "✕", note: "i", quiet: "·" };
  return h("span", { class: `sign ${kind}` }, h("span", { "aria-hidden": "true", class: "mark" }, marks[kind]), text);
}

/** A command with a button that copies it. */
export function command(text) {
  return h("span", { class: "command" }, h("code", {}, text),
    h("button", { type: "button", "data-act": "copy", "data-text": text, "aria-label": `Copy: ${text}` }, "Copy"));
}
