// What is wrong, worst first, each with the next step as a command to copy.

import { command, h, pager, sign } from "./dom.js";
import { whole } from "./format.js";

export const marks = ["findings"];
const LIMIT = 50;
const SHOWN = 3;
const HEADS = {
  health: "This process", "followed log": "The followed log", lag: "Lag", fallback: "Predictors that fell back",
    "node away": "Nodes that are silent", node: "Faults of nodes",
  memory: "Memory that is not locked", "unknown model": "Models that nobody has", job: "Jobs that failed",
    wasteful: "Models whose prefetches went unused",
  "failed load": "Loads that failed", hints: "Sources whose hints don't convert", "idle pin": "Pins that earn little",
};
const WORDS = { bad: "Fault", warn: "Warning", note: "Note" };

/** By kind, those kinds first whose worst comes first. */
function groupsOf(list) {
  const found = new Map();
  for (const one of list) found.set(one.kind, [...(found.get(one.kind) || []), one]);
  return [...found];
}

function why(model) {
  return h("a", { href: `?tab=why&model=${encodeURIComponent(model)}`, "data-act": "model", "data-model": model,
    "aria-label": `Why: ${model}` }, "Why?");
}

export function make(page) {
  const found = page.source();
  let offset = 0;

  function load() {
    found.load(`v1/findings?offset=${offset}&limit=${LIMIT}`);
  }

  function view() {
    const told = found.data;
    return h("section", { "data-key": "findings", "aria-labelledby": "wrong-head" },
      h("h2", { id: "wrong-head" }, "What is wrong, worst first, and what comes next"),
      page.standing(found, "what is wrong"),
      told && told.in_all === 0 ? h("p", { class: "empty" },
        sign("good", "Nothing is wrong, as far as nodes, controllers and schedulers tell.")) : null,
      told ? groupsOf(told.findings).map(([kind, list]) => h("section", { "data-key": kind },
        h("h3", {}, `${HEADS[kind] || kind}: ${whole(list.length)}`),
        h("ol", { class: "findings" }, list.slice(0, SHOWN).map(line)),
        list.length > SHOWN ? h("details", { "data-key": "more" }, h("summary", {}, `${whole(list.length - SHOWN)} more`),
          h("ol", { class: "findings" }, list.slice(SHOWN).map(line))) : null)) : null,
      told ? pager("findings", offset, LIMIT, told.in_all) : null,
      told && told.in_all > LIMIT ? h("p", { class: "small" }, `${whole(told.in_all)} in all; at most twenty of a kind are listed`) : null);
  }

  function line(one) {
    return h("li", { "data-key": `${one.kind}/${one.model || one.node || one.what.slice(0, 60)}`, class: one.severity },
      h("p", { class: "what" }, sign(one.severity, WORDS[one.severity]), " ", one.what, one.model ? [" ", why(one.model)] : null),
      one.detail ? h("p", { class: "small" }, one.detail) : null,
      one.command ? h("p", { class: "next" }, command(one.command), h("span", { class: "small" }, ` ${one.then || ""}`)) : null);
  }

  function act(name, element) {
    if (name !== "page") return;
    offset = +element.dataset.to;
    load();
  }

  return { load, view, act };
}
