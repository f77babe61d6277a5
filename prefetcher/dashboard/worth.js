// Is it worth it? Waiting that was saved beside memory that was idle and wasted, both beside the control group's own; what prefetches came
// to; how first requests were served against what was promised. Everything is the report's (`GET /v1/report`) and the experiment's
// (`GET /v1/effect`); what they lack is said to be lacking.

import { bar, legend, overTime, waitScale } from "./charts.js";
import { figures, h, sign, table } from "./dom.js";
import { clock, count, number, percent, span, whole } from "./format.js";

export const marks = ["orders"];
/** Sums change with every second of memory held; more often than this nobody can read them. */
const SOONEST_MS = 10000;
const MISSING = 5;
const OUTCOMES = [
  ["hit", "hit", "ready before it was used"], ["late", "late", "used while it was still loading"],
  ["useless", "useless", "given up unused"], ["displaced", "displaced", "made room unused"],
];

export function make(page) {
  const report = page.source();
  const hours = page.source();
  const effects = page.source();
  let askedAt = -Infinity;
  let askedFor = "";

  function load() {
    const { query } = page.range();
    if (query === askedFor && performance.now() - askedAt < SOONEST_MS && report.error === null) return;
    askedAt = performance.now();
    askedFor = query;
    report.load(`v1/report?${query}&by=arm`);
    effects.load("v1/effect");
    if (page.chosen().tab === "worth") hours.load(`v1/report?${query}&by=hour&most=1000`);
  }

  /** [answer, what stands below it] for the tab. */
  function answer() {
    if (report.data === null) return report.error ? ["Not known", report.error.message] : null;
    const told = report.data;
    const { total } = told;
    if (total.requests === 0 && total.prefetches === 0) return ["Nothing to judge yet", "no request in this range"];
    const [saved, how] = savedOf(total);
    return [saved < 0 ? `${span(-saved)} more waiting` : `${span(saved)} of waiting saved`,
      `${number(total.idle_gb_h)} GB·h idle, ${number(total.wasted_gb_h)} wasted; ${how}`];
  }

  function view() {
    const told = report.data;
    return [
      page.standing(report, "the report"),
      told ? [head(told), prefetches(told), first(told), trend(), missing(told)] : null,
    ];
  }

  function head(told) {
    const { total } = told;
    const [saved, how] = savedOf(total);
    const nothing = total.requests === 0 && total.prefetches === 0;
    return h("section", { "data-key": "head", "aria-labelledby": "worth-head" },
      h("h2", { id: "worth-head" }, "Waiting saved, and what it took"),
      h("p", { class: "small" },
        page.range().words, told.from_hour_s ? `, in whole hours from ${clock(told.from_hour_s, page.now(), false)} on` : "", "."),
      nothing ? h("p", { class: "empty" }, "No request came in this range. Take another one, or send requests: ",
        h("code", {}, "POST /v1/requests")) : null,
      h("div", { class: "pair" },
        h("div", { class: "figure" },
          h("h3", {}, "Cold seconds saved"),
          h("p", { class: "big" }, `${saved < 0 ? "−" : ""}${number(Math.abs(saved))}`, " ", h("span", { class: "unit" }, "s")),
          h("p", {}, how),
          h("p", { class: "small" }, `${number(total.cold_s)} s were waited in ${count(total.requests, "request")}`,
            total.shadow_cold_s === null ? "" : `; ${number(total.shadow_cold_s)} s would have been without prefetching, by the shadow`)),
        h("div", { class: "figure" },
          h("h3", {}, "Memory idle"),
          h("p", { class: "big" }, number(total.idle_gb_h), " ", h("span", { class: "unit" }, "GB·h")),
          h("p", {}, `${number(total.wasted_gb_h)} GB·h of it wasted: brought ahead and never used`),
          h("p", { class: "small" }, `of ${number(total.held_gb_h)} GB·h held; ${number(total.moved_gb)} GB read`)),
        h("div", { class: "figure" },
          h("h3", {}, "By the control group"), control(told)),
      ));
  }

  function control(told) {
    const effect = effects.data;
    const arm = told.groups.find((group) => group.name === "control")?.figures;
    const own = arm && arm.requests
      ? h("p", { class: "small" },
        `In this range its hours waited ${number(arm.cold_s)} s in ${count(arm.requests, "request")} `,
        `and held ${number(arm.idle_gb_h)} GB·h idle.`) : null;
    if (effect === null) return effects.error ? h("p", { class: "empty" }, `Not known: ${effects.error.message}`)
      : h("p", { class: "waiting" }, "Asking…");
    if (effect.basis !== "control") {
      return [
        h("p", { class: "big" }, "Shadow only"),
        h("p", {}, effect.basis === "shadow" && effect.saving_ratio !== null
          ? `${lessOrMore(effect.saving_ratio)} waiting, by a computation and not by an experiment: it has no interval.`
          : "There is no control group: what is saved is a computation by the shadow, and has no interval."),
        h("p", { class: "small" }, effect.experiment || effect.why || "A single node has none."), own,
      ];
    }
    const isWhole = effect.low !== null && effect.high !== null;
    return [
      h("p", { class: "big" }, lessOrMore(effect.saving_ratio)),
      h("p", {}, isWhole ? `waiting; 95 % sure that it is between ${lessOrMore(effect.low)} and ${lessOrMore(effect.high)}`
        : `waiting; no interval yet: ${effect.why || "too few hours of the control group"}`),
      h("p", { class: "small" },
        !isWhole || (effect.low <= 0 && effect.high >= 0) ? "It may be chance. " : "",
        `${whole(effect.control_blocks)} of ${whole(effect.blocks)} node-hours of ${span(86400 * effect.days)} were without prefetching; `,
        "all that are kept, whatever the range."),
      own,
    ];
  }

  function prefetches(told) {
    const { total } = told;
    const counts = { hit: total.hit, late: total.late, useless: total.useless, displaced: total.displaced };
    const settled = Object.values(counts).reduce((sum, each) => sum + each, 0);
    const others = Object.entries(total.outcomes).filter(([name, n]) => n > 0
      && !["timely", "late", "useless", "displaced"].includes(name));
    return h("section", { "data-key": "outcomes", "aria-labelledby": "outcomes-head" },
      h("h2", { id: "outcomes-head" }, "What became of prefetches, and what requests found"),
      settled === 0 ? h("p", { class: "empty" }, "No prefetch was settled in this range.") : [
        bar(OUTCOMES.map(([kind, name]) => ({ kind, name: `${name}: ${counts[kind]}`, value: counts[kind] })), settled,
          OUTCOMES.map(([kind, name]) => `${counts[kind]} ${name}`).join(", ")),
        legend(OUTCOMES.map(([kind, name, words]) =>
          ({ kind, name: `${name} ${whole(counts[kind])} (${percent(counts[kind] / settled)}): ${words}` }))),
      ],
      h("dl", { class: "facts" },
        fact("Premature", whole(total.premature), "unused ones that were asked for soon after they were given up"),
        fact("Miss", whole(total.miss ?? total.cold_starts), `requests that found nothing resident or moving, of ${whole(total.requests)}`),
        fact("Accuracy", percent(total.accuracy), "of judged prefetches that were used"),
        fact("In time", percent(total.timeliness), "of used ones that were ready before"),
        fact("Otherwise", others.length ? others.map(([name, n]) => `${whole(n)} ${name}`).join(", ") : "none",
          "prefetches that say nothing about guessing")));
  }

  function first(told) {
    const { slo, total } = told;
    const waits = total.first_waits;
    const quantiles = ["p50", "p95", "p99"].map((name) => ({ name, value: waits[`${name}_s`] }));
    return h("section", { "data-key": "slo", "aria-labelledby": "slo-head" },
      h("h2", { id: "slo-head" }, "First requests against what is promised"),
      waits.count === 0
        ? h("p", { class: "empty" },
          `No first request in this range: the first one after a model was not asked for ${span(told.first_gap_s)}.`) : [
          h("p", {}, h("strong", {}, `p99 ${span(waits.p99_s)}`),
            ` of ${count(waits.count, "first request")}, promised: ${percent(slo.target_ratio, 1)} within ${span(slo.under_s)}. `,
            slo.met_ratio === null ? null : sign(slo.met_ratio >= slo.target_ratio ? "good" : "bad", `${percent(slo.met_ratio, 1)} were`)),
          waitScale(quantiles, slo.under_s, `Waits of first requests; promised within ${span(slo.under_s)}`),
          h("dl", { class: "facts" }, fact("Burn rate, 1 h", burn(slo.burn_1h), burnWords(slo.burn_1h)),
            fact("Burn rate, 6 h", burn(slo.burn_6h), burnWords(slo.burn_6h))),
        ]);
  }

  function trend() {
    const told = hours.data;
    if (!told || !Array.isArray(told.groups) || told.groups.length < 2) return null;
    const lines = told.groups.map((group) => ({ at: +group.name, ...group.figures })).filter((line) => line.at > 0).sort((a, b) =>
      a.at - b.at);
    if (lines.length < 2) return null;
    const from = lines[0].at;
    const to = Math.max(page.range().until ?? page.now(), lines[lines.length - 1].at + 3600);
    const draw = (key, label, unit, value, kind) => overTime(
      { key, label, unit, width: page.width(), height: 130, from, to, now: 0,
        bars: lines.map((line) => ({ at: line.at, for: 3600, value: value(line), kind })) },
      (at, one) => `${clock(at, page.now(), false)}: ${number(one?.value)} ${unit}`);
    return h("section", { "data-key": "trend", "aria-labelledby": "trend-head" },
      h("h2", { id: "trend-head" }, "Hour by hour"),
      h("h3", {}, "Waited for weights, seconds an hour"), draw("cold", "Waited for weights", "s", (line) => line.cold_s, "warm"),
      h("h3", {}, "Memory idle, GB·h an hour"), draw("idle", "Memory idle", "GB·h", (line) => line.idle_gb_h, "quiet"),
      figures("Hour by hour", ["Hour", "Requests", "Waited, s", "Prefetches", "Hits", "Idle, GB·h", "Wasted, GB·h"],
        lines.map((line) => [clock(line.at, page.now(), false), whole(line.requests), number(line.cold_s), whole(line.prefetches),
          whole(line.hit), number(line.idle_gb_h), number(line.wasted_gb_h)]), "hours-table"));
  }

  function missing(told) {
    if (!told.missing.length) return null;
    return h("section", { "data-key": "missing", "aria-labelledby": "missing-head" },
      h("h2", { id: "missing-head" }, "Not in these figures"),
      table("Nodes that are not in these figures", ["Node", "Why", "Last heard of"], told.missing.slice(0, MISSING).map((one) =>
        ({ key: one.node, cells: [one.node, one.reason, one.seen_at_s === null ? "not known" : clock(one.seen_at_s, page.now())] }))),
      told.missing.length > MISSING ? h("p", { class: "small" }, `and ${whole(told.missing.length - MISSING)} more nodes`) : null);
  }

  return { load, view, answer };
}

function fact(name, value, words) {
  return h("div", { "data-key": name }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", { class: "small" }, words)));
}

/** A saving in words, with its own sign: 0.2 is 20 % less waiting. */
function lessOrMore(ratio) {
  return `${percent(Math.abs(ratio))} ${ratio >= 0 ? "less" : "more"}`;
}

function burn(value) {
  return value === null || value === undefined ? "–" : `${number(value, 2)}×`;
}

function burnWords(value) {
  if (value === null || value === undefined) return "no first request in that time";
  if (value <= 1) return "slow ones stay within what is allowed";
  return `slow ones spend what is allowed ${number(value, 2)} times too fast`;
}

/** [seconds, how that is known]: by the shadow over the hours that it saw whole, else by what used prefetches had moved in time. */
function savedOf(total) {
  if (total.shadow_cold_s !== null && total.coverage !== null) {
    const part = total.shadow_requests < total.requests
      ? `, known of ${whole(total.shadow_requests)} of ${count(total.requests, "request")}` : "";
    return [total.shadow_cold_s * total.coverage, `${lessOrMore(total.coverage)} than without prefetching, by the shadow${part}`];
  }
  return [total.saved_s, "by prefetches that were used: how long their bytes had moved before somebody came"];
}
