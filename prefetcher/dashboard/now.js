// What is happening now: loads on their way, and every node's memory by tier and state, worst first, a page of nodes at a time.

import { bar, legend } from "./charts.js";
import { h, pager, sign, table } from "./dom.js";
import { ago, cause, count, moment, percent, size, span, whole } from "./format.js";

export const marks = ["nodes", "moves"];
const LIMIT = 25;
/** A report is a second old, and gone after five. */
const OLD_S = 4.5;
const MOVES = 12;
const STATES = [
  ["leased", "leased now"], ["pinned", "pinned"], ["used", "used before"], ["early", "brought ahead, not used yet"],
  ["arriving", "on its way in"], ["leaving", "on its way out"], ["kept", "kept of what made room"],
];
const SORTS = { worst: "worst first", name: "by name", full: "fullest first", busy: "busiest link first", moving: "most loads first" };
const FILTERS = { all: "all nodes", problem: "with a problem", moving: "that load", off: "off or observing" };

export function make(page) {
  const nodes = page.source();
  const moves = page.source();
  let typing = 0;

  function load() {
    const { sort, state, nodes: matches, page: offset } = page.chosen();
    const query = new URLSearchParams({ sort: SORTS[sort] ? sort : "worst", state: FILTERS[state] ? state : "all", matches,
      offset: String(+offset || 0), limit: String(LIMIT) });
    nodes.load(`v1/nodes?${query}`);
    moves.load(`v1/moves?limit=${MOVES}`);
  }

  function view() {
    return [
      h("section", { "data-key": "moves", "aria-labelledby": "moves-head" }, h("h2", { id: "moves-head" }, "On the way into memory"),
        page.standing(moves, "the loads"), moves.data ? movesView(moves.data) : null),
      h("section", { "data-key": "nodes", "aria-labelledby": "nodes-head" }, h("h2", { id: "nodes-head" }, "Nodes and their memory"),
        controls(), page.standing(nodes, "the nodes"), nodes.data ? nodesView(nodes.data) : null),
    ];
  }

  function movesView(told) {
    if (told.total === 0) {
      const moved = page.overview()?.decides?.meaning;
      return h("p", { class: "empty" }, "Nothing is being loaded at this moment.", moved ? ` What decides ${moved}.` : "");
    }
    const rows = told.moves.map((move) => ({
      key: `${move.node}/${move.model}/${move.tier}`,
      cells: [
        modelLink(move.model), move.node,
        h("span", { class: "progress" },
          h("progress", { max: Math.max(1, move.bytes), value: move.bytes_done, "aria-label": `${move.model} loaded` }),
          h("span", {},
            `${percent(move.bytes_done / Math.max(1, move.bytes))} of ${size(move.bytes)}, `,
            move.state === "moving" ? `ready in ${span(move.ready_in_s)}` : move.state)),
        h("span", {}, cause(move.cause), move.contributions.length
          ? ` (${move.contributions.slice(0, 2).map(([name, share]) => `${name} ${share.toFixed(2)}`).join(", ")})` : ""),
        move.cause === "demand" ? "waited for now" : move.expected_use_s === null ? "not told"
          : h("span", { title: moment(move.expected_use_s) }, ago(move.expected_use_s, told.now_s)),
      ],
    }));
    const more = told.total - rows.length;
    return [
      h("p", {}, `${count(told.total, "load")}, ${size(told.bytes_left)} left to read.`),
      table("Weights on their way into memory", ["Model", "Node", "Progress", "Why", "Expected use"], rows),
      more > 0 ? h("p", { class: "small" }, `and ${whole(more)} more; those that a request waits for come first`) : null,
    ];
  }

  function controls() {
    const { sort, state, nodes: matches } = page.chosen();
    const option = (names, current) => Object.entries(names).map(([name, words]) =>
      h("option", { value: name, selected: name === current }, words));
    return h("div", { class: "controls", "data-key": "controls" },
      h("label", {}, "Find a node or group ",
        h("input", { type: "search", "data-field": "nodes", value: matches, maxlength: "200", autocomplete: "off" })),
      h("label", {}, "Show ", h("select", { "data-field": "state" }, option(FILTERS, state))),
      h("label", {}, "Order ", h("select", { "data-field": "sort" }, option(SORTS, sort))));
  }

  function nodesView(told) {
    if (told.total === 0) {
      return [awayView(told),
        h("p", { class: "empty" }, told.away_in_all ? "No node reports at this moment." : "No node has reported yet. Start one: ",
        told.away_in_all ? null : h("code", {}, "prefetcher agent"))];
    }
    const offset = +page.chosen().page || 0;
    const withDevice = told.nodes.some((node) => node.tiers.device);
    const shown = STATES.filter(([name]) => told.sums.states[name] > 0).map(([kind, name]) =>
      ({ kind, name: `${name}: ${size(told.sums.states[kind])}` }));
    const free = Math.max(0, told.sums.budget_bytes - told.sums.taken_bytes);
    return [
      awayView(told),
      h("p", {}, `${told.matched === told.total ? count(told.total, "node") : `${whole(told.matched)} of ${count(told.total, "node")}`}: `,
        `${size(told.sums.taken_bytes)} of ${size(told.sums.budget_bytes)} of host memory taken, ${size(free)} free.`),
      told.matched ? bar(STATES.map(([kind, name]) => ({ kind, name, value: told.sums.states[kind] })), told.sums.budget_bytes,
        wordsOf(told.sums)) : null,
      legend([...shown, { kind: "free", name: `free: ${size(free)}` }]),
      told.matched === 0 ? h("p", { class: "empty" }, "No node is like that. ",
        h("button", { type: "button", "data-act": "all-nodes" }, "Show all")) :
        table("Nodes, their memory by tier and state, their link and their problems",
          ["Node", "Host memory", ...(withDevice ? ["Device memory"] : []), "Disk", "Link", "Problems"],
            told.nodes.map((node) => nodeRow(node, told.now_s, withDevice)), { class: "matrix" }),
      withDevice || told.matched === 0 ? null : h("p", { class: "small" }, "No node on this page reports device memory."),
      pager("nodes", offset, LIMIT, told.matched),
    ];
  }

  function nodeRow(node, now, withDevice) {
    const host = node.tiers.host;
    const device = node.tiers.device;
    const modes = { on: null, observe: sign("note", "observes"), off: sign("warn", "off") };
    return {
      key: node.node,
      class: node.problems_in_all ? "troubled" : "",
      cells: [
        h("span", {}, node.node, modes[node.mode] ? [" ", modes[node.mode]] : null,
          node.group ? h("span", { class: "small line" }, node.group) : null,
          now - node.at_s > OLD_S ? h("span", { class: "small line" }, `told ${ago(node.at_s, now)}`) : null),
        tierView(host, node.moving),
        ...(withDevice ? [device ? tierView(device, 0) : h("span", { class: "small" }, "none reported")] : []),
        h("span", {}, count(node.disk.models, "model"), h("span", { class: "small line" }, size(node.disk.bytes))),
        h("span", {}, `${percent(node.busy_ratio)}\u00a0busy`, h("span", { class: "small line" }, `${size(node.link_bytes_per_s)}/s`)),
        node.problems_in_all
          ? h("span", {}, node.problems.map((text) => h("span", { class: "line" }, sign("warn", text))),
            node.problems_in_all > node.problems.length ? ` and ${node.problems_in_all - node.problems.length} more` : "")
          : null,
      ],
    };
  }

  function tierView(tier, moving) {
    const budget = tier.budget_bytes;
    const total = budget ?? tier.taken_bytes;
    return h("div", { class: "tier" },
      bar(STATES.map(([kind, name]) => ({ kind, name, value: tier.states[kind], title: `${name}: ${size(tier.states[kind])}` })), total,
        wordsOf(tier)),
      h("span", { class: "small" }, budget ? `${size(tier.taken_bytes)} of ${size(budget)}` : size(tier.taken_bytes),
        tier.reserve_bytes ? `, ${size(tier.reserve_bytes)} reserved` : "", moving ? `, ${count(moving, "load")}` : ""));
  }

  function awayView(told) {
    if (!told.away_in_all) return null;
    const named = told.away.slice(0, 5).map((away) => `${away.node} (silent for ${span(away.silent_s)} to ${span(away.at_most_s)})`);
    return h("p", { class: "problem" },
      sign("bad",
        `${count(told.away_in_all, "node")} that reported within a day ${told.away_in_all === 1 ? "does" : "do"} not now: `
        + named.join(", ") + (told.away_in_all > 5 ? ", …" : "")));
  }

  function field(name, element, event) {
    if (event.type === "keydown") return;
    if (name === "nodes") {
      clearTimeout(typing);
      typing = setTimeout(() => page.choose({ nodes: element.value, page: "0" }, { replace: true }), 200);
    } else if (event.type === "change") page.choose({ [name]: element.value, page: "0" });
  }

  function act(name, element) {
    if (name === "page") page.choose({ page: element.dataset.to });
    else if (name === "all-nodes") page.choose({ nodes: "", state: "all", page: "0" });
  }

  return { load, view, field, act };
}

function wordsOf(tier) {
  const parts = STATES.filter(([kind]) => tier.states[kind] > 0).map(([kind, name]) => `${size(tier.states[kind])} ${name}`);
  return `${parts.join(", ") || "nothing held"}${tier.budget_bytes ? `, of ${size(tier.budget_bytes)}` : ""}`;
}

export function modelLink(model) {
  return h("a", { href: `?tab=why&model=${encodeURIComponent(model)}`, "data-act": "model", "data-model": model }, model);
}
