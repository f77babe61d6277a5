// What is wrong, worst first, each with the next step as a command to copy.

import { command, h, pager, sign } from "./dom.js";
import { whole } from "./format.js";
import { modelLink } from "./now.js";

export const marks = ["findings"];
const LIMIT = 50;
const WORDS = { bad: "Fault", warn: "Warning", note: "Note" };

export function make(page) {
  const found = page.source();
  let offset = 0;

  function load() {
    found.load(`v1/findings?offset=${offset}&limit=${LIMIT}`);
  }

  function view() {
    const told = found.data;
    return h("section", { "data-key": "findings", "aria-labelledby": "wrong-head" },
      h("h2", { id: "wrong-head" }, "What is wrong, worst first"),
      page.standing(found, "what is wrong"),
      told && told.in_all === 0 ? h("p", { class: "empty" }, sign("good", "Nothing is wrong, as far as nodes, controllers and schedulers tell.")) : null,
      told && told.in_all ? h("ol", { class: "findings" }, told.findings.map((one) =>
        h("li", { "data-key": `${one.kind}/${one.what.slice(0, 40)}/${one.model || ""}${one.node || ""}`, class: one.severity },
          h("p", { class: "what" }, sign(one.severity, WORDS[one.severity]), " ", h("span", { class: "kind" }, one.kind), " ", one.what),
          one.detail ? h("p", { class: "small" }, one.detail) : null,
          one.command || one.model ? h("p", { class: "next" }, one.command ? [command(one.command), h("span", { class: "small" }, ` ${one.then || ""}`)] : null,
            one.model ? [" ", modelLink(one.model)] : null) : null))) : null,
      told ? pager("findings", offset, LIMIT, told.in_all) : null,
      told && told.in_all > LIMIT ? h("p", { class: "small" }, `${whole(told.in_all)} in all; at most twenty of a kind are listed`) : null);
  }

  function act(name, element) {
    if (name !== "page") return;
    offset = +element.dataset.to;
    load();
  }

  return { load, view, act };
}
