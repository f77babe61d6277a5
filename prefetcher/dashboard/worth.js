// Is it worth it? Waiting that was saved beside memory that was idle and wasted, both beside the control group's own; what prefetches came to;
// how first requests were served against what was promised. Everything is the report's (`GET /v1/report`); what it lacks is said to be lacking.

import { bar, legend, overTime, waitScale } from "./charts.js";
import { figures, h, sign, table } from "./dom.js";
import { clock, count, number, percent, span, whole } from "./format.js";

export const marks = ["orders"];
/** Sums change with every second of memory held; more often than this nobody can read them. */
const SOONEST_MS = 10000;
const GB_H = 3.6e12;
const MISSING = 5;
const OUTCOMES = [
  ["hit", "hit", "ready before it was used"], ["late", "late", "used while it was still loading"],
  ["useless", "useless", "given up unused"], ["displaced", "displaced", "made room unused"],
];

export function make(page) {
  const report = page.source();
  const hours = page.source();
  let askedAt = -Infinity;
  let askedFor = "";

  function load() {
    const range = page.chosen().range;
    if (range === askedFor && performance.now() - askedAt < SOONEST_MS && report.error === null) return;
    askedAt = performance.now();
    askedFor = range;
    const since = page.rangeS() === null ? "0" : range;
    report.load(`v1/report?since=${since}&by=arm`);
    if (page.chosen().tab === "worth") hours.load(`v1/report?since=${since}&by=hour&most=1000`);
  }

  /** [answer, what stands below it] for the tab. */
  function answer() {
    if (report.data === null) return report.error ? ["Not known", report.error.message] : null;
    const told = normal(report.data);
    const { total } = told;
    if (total.requests === 0 && total.prefetches === 0) return ["Nothing to judge yet", "no request in this range"];
    const [saved, how] = savedOf(told);
    return [`${saved === null ? "–" : span(saved)} of waiting saved`, `${how}; ${number(total.idle_gb_h)} GB·h idle, ${number(total.wasted_gb_h)} wasted`];
  }

  function view() {
    const told = report.data === null ? null : normal(report.data);
    return [
      page.standing(report, "the report"),
      told ? [head(told), prefetches(told), first(told), trend(), missing(told)] : null,
    ];
  }

  function head(told) {
    const { total, effect } = told;
    const [saved, how] = savedOf(told);
    const nothing = total.requests === 0 && total.prefetches === 0;
    return h("section", { "data-key": "head", "aria-labelledby": "worth-head" },
      h("h2", { id: "worth-head" }, "Waiting saved, and what it took"),
      h("p", { class: "small" }, told.ranged
        ? `${page.rangeName() === "all time" ? "Since each node's ledger began" : `The last ${page.rangeName()}`}${told.from ? `, in whole hours from ${clock(told.from, page.now(), false)} on` : ""}.`
        : "Since each node's ledger began: this endpoint's report knows no range."),
      nothing ? h("p", { class: "empty" }, "No request came in this range. Take a longer one, or send requests: ", h("code", {}, "POST /v1/requests")) : null,
      h("div", { class: "pair" },
        h("div", { class: "figure" },
          h("h3", {}, "Cold seconds saved"),
          h("p", { class: "big" }, saved === null ? "–" : number(saved), " ", h("span", { class: "unit" }, "s")),
          h("p", {}, how),
          h("p", { class: "small" }, `${number(total.cold_s)} s were waited in ${count(total.requests, "request")}`, total.shadow_cold_s === null ? "" : `; ${number(total.shadow_cold_s)} s would have been without prefetching, by the shadow`)),
        h("div", { class: "figure" },
          h("h3", {}, "Memory idle"),
          h("p", { class: "big" }, number(total.idle_gb_h), " ", h("span", { class: "unit" }, "GB·h")),
          h("p", {}, `${number(total.wasted_gb_h)} GB·h of it wasted: brought ahead and never used`),
          h("p", { class: "small" }, `of ${number(total.held_gb_h)} GB·h held; ${number(total.moved_gb)} GB read`)),
        h("div", { class: "figure" },
          h("h3", {}, "The control group's own"), control(effect, told)),
      ));
  }

  function control(effect, told) {
    const arm = told.control;
    if (effect && effect.basis === "control" && effect.saving_ratio !== null && effect.saving_ratio !== undefined) {
      const certain = effect.low > 0 || effect.high < 0;
      return [
        h("p", { class: "big" }, signed(effect.saving_ratio), " ", h("span", { class: "unit" }, "waiting")),
        h("p", {}, effect.low === null || effect.low === undefined ? "no interval yet" : `95 % sure that it is between ${signed(effect.low)} and ${signed(effect.high)}`),
        h("p", { class: "small" }, `${sayCertain(certain, effect)} ${whole(effect.control_blocks)} of ${whole(effect.blocks)} node-hours were without prefetching; they waited ${number(effect.control_cold_s)} s in ${count(effect.control_rows, "request")}.`),
      ];
    }
    const why = effect?.why || (told.effectKnown ? "no hours of a control group lie in this range" : "");
    return [
      h("p", { class: "big" }, effect?.saving_ratio === null || effect?.saving_ratio === undefined ? "Shadow only" : [signed(effect.saving_ratio), " ", h("span", { class: "unit" }, "waiting")]),
      h("p", {}, arm && arm.requests
        ? `Hours without prefetching: ${number(arm.cold_s)} s waited in ${count(arm.requests, "request")}, ${number(arm.idle_gb_h)} GB·h idle.`
        : "There is no control group here: what is saved is a computation by the shadow, not an experiment, and has no interval."),
      h("p", { class: "small" }, why || (arm && arm.requests ? "No interval is computed by this endpoint." : "A single node has none; PREFETCHER_DECISION__CONTROL_RATIO sets its share where there are more.")),
    ];
  }

  function prefetches(told) {
    const { total } = told;
    const counts = { hit: total.hit, late: total.late, useless: total.useless, displaced: total.displaced };
    const settled = Object.values(counts).reduce((sum, each) => sum + each, 0);
    const others = Object.entries(total.outcomes).filter(([name, n]) => n > 0 && !["timely", "late", "useless", "displaced"].includes(name));
    return h("section", { "data-key": "outcomes", "aria-labelledby": "outcomes-head" },
      h("h2", { id: "outcomes-head" }, "What became of prefetches, and what requests found"),
      settled === 0 ? h("p", { class: "empty" }, "No prefetch was settled in this range.") : [
        bar(OUTCOMES.map(([kind, name]) => ({ kind, name: `${name}: ${counts[kind]}`, value: counts[kind] })), settled, OUTCOMES.map(([kind, name]) => `${counts[kind]} ${name}`).join(", ")),
        legend(OUTCOMES.map(([kind, name, words]) => ({ kind, name: `${name} ${whole(counts[kind])} (${percent(counts[kind] / settled)}): ${words}` }))),
      ],
      h("dl", { class: "facts" },
        fact("Premature", whole(total.premature), "unused ones that were asked for soon after they were given up"),
        fact("Miss", whole(total.miss ?? total.cold_starts), `requests that found nothing resident or moving, of ${whole(total.requests)}`),
        fact("Accuracy", percent(total.accuracy), "of judged prefetches that were used"),
        fact("In time", percent(total.timeliness), "of used ones that were ready before"),
        fact("Otherwise", others.length ? others.map(([name, n]) => `${whole(n)} ${name}`).join(", ") : "none", "prefetches that say nothing about guessing")));
  }

  function first(told) {
    const { slo, total } = told;
    const waits = total.first_waits;
    return h("section", { "data-key": "slo", "aria-labelledby": "slo-head" },
      h("h2", { id: "slo-head" }, "First requests against what is promised"),
      !waits ? h("p", { class: "empty" }, "Quantiles of waits are not measured by this version of the endpoint.") :
        waits.count === 0 ? h("p", { class: "empty" }, `No first request in this range: the first one after a model was not asked for ${span(told.firstGapS)}.`) : [
          h("p", {}, h("strong", {}, `p99 ${span(waits.p99_s)}`), ` of ${count(waits.count, "first request")}, promised: ${percent(slo.target_ratio, 1)} within ${span(slo.under_s)}. `,
            slo.met_ratio === null ? null : sign(slo.met_ratio >= slo.target_ratio ? "good" : "bad", `${percent(slo.met_ratio, 1)} were`)),
          waitScale([{ name: `p50 ${span(waits.p50_s)}`, value: waits.p50_s }, { name: `p95 ${span(waits.p95_s)}`, value: waits.p95_s }, { name: `p99 ${span(waits.p99_s)}`, value: waits.p99_s }],
            slo.under_s, `Waits of first requests: p50 ${span(waits.p50_s)}, p95 ${span(waits.p95_s)}, p99 ${span(waits.p99_s)}; promised within ${span(slo.under_s)}`),
          h("dl", { class: "facts" }, fact("Burn rate, 1 h", burn(slo.burn_1h), burnWords(slo.burn_1h)), fact("Burn rate, 6 h", burn(slo.burn_6h), burnWords(slo.burn_6h))),
        ]);
  }

  function trend() {
    const told = hours.data;
    if (!told || !Array.isArray(told.groups) || told.groups.length < 2) return null;
    const lines = told.groups.map((group) => ({ at: +group.name, ...group.figures })).filter((line) => line.at > 0).sort((a, b) => a.at - b.at);
    if (lines.length < 2) return null;
    const from = lines[0].at;
    const to = Math.max(page.now(), lines[lines.length - 1].at + 3600);
    const draw = (key, label, unit, value, kind) => overTime(
      { key, label, unit, width: page.width(), height: 130, from, to, now: 0, bars: lines.map((line) => ({ at: line.at, for: 3600, value: value(line), kind })) },
      (at, one) => `${clock(at, page.now(), false)}: ${number(one?.value)} ${unit}`);
    return h("section", { "data-key": "trend", "aria-labelledby": "trend-head" },
      h("h2", { id: "trend-head" }, "Hour by hour"),
      h("h3", {}, "Waited for weights, seconds an hour"), draw("cold", "Waited for weights", "s", (line) => line.cold_s, "warm"),
      h("h3", {}, "Memory idle, GB·h an hour"), draw("idle", "Memory idle", "GB·h", (line) => line.idle_gb_h, "quiet"),
      figures("Hour by hour", ["Hour", "Requests", "Waited, s", "Prefetches", "Hits", "Idle, GB·h", "Wasted, GB·h"],
        lines.map((line) => [clock(line.at, page.now(), false), whole(line.requests), number(line.cold_s), whole(line.prefetches), whole(line.hit), number(line.idle_gb_h), number(line.wasted_gb_h)]), "hours-table"));
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

function signed(ratio) {
  // A saving is less waiting.
  return `${ratio > 0 ? "−" : "+"}${percent(Math.abs(ratio))}`;
}

function sayCertain(certain, effect) {
  if (!certain) return "That may be chance.";
  return effect.saving_ratio > 0 ? "So prefetching saves waiting." : "So prefetching costs waiting.";
}

function burn(value) {
  return value === null || value === undefined ? "–" : `${number(value, 2)}×`;
}

function burnWords(value) {
  if (value === null || value === undefined) return "no first request in that time";
  if (value <= 1) return "slow ones stay within what is allowed";
  return `slow ones spend what is allowed ${number(value, 2)} times too fast`;
}

/** [seconds, how that is known]. */
function savedOf(told) {
  const { total, effect } = told;
  if (effect && effect.basis === "control" && effect.saved_s_per_h !== null && effect.saved_s_per_h !== undefined && effect.days) {
    return [effect.saved_s_per_h * 24 * effect.days, "measured against the control group"];
  }
  if (total.shadow_cold_s !== null && total.shadow_cold_s !== undefined) return [total.shadow_cold_s - total.cold_s, `${percent(total.coverage)} less than without prefetching, by the shadow`];
  return [total.saved_s, "by prefetches that were used: how long their bytes had moved before somebody came"];
}

/** The report as it is now; totals of an endpoint that knows no ranges are put into its words. */
function normal(told) {
  if (told.total) {
    const arm = (told.groups || []).find((group) => told.by === "arm" && group.name === "control");
    return {
      ranged: true, from: told.from_hour_s, total: told.total, slo: told.slo, effect: told.effect, effectKnown: told.effect !== null && told.effect !== undefined,
      missing: told.missing || [], control: arm?.figures || null, firstGapS: told.first_gap_s,
    };
  }
  const sum = told.sum || told;
  const outcomes = sum.outcomes || {};
  const part = sum.by_arm?.control;
  return {
    ranged: false, from: null, slo: null, effect: null, effectKnown: false, missing: [], firstGapS: null,
    control: part ? { requests: part.rows, cold_s: part.cold_seconds, idle_gb_h: part.idle_byte_seconds / GB_H } : null,
    total: {
      requests: sum.rows || 0, cold_starts: sum.cold_starts || 0, miss: sum.cold_starts || 0, cold_s: sum.cold_seconds || 0, first_waits: null, prefetches: sum.orders || 0,
      outcomes, hit: outcomes.timely || 0, late: outcomes.late || 0, useless: outcomes.useless || 0, displaced: outcomes.displaced || 0,
      premature: sum.premature || 0, accuracy: sum.accuracy ?? null, timeliness: sum.timeliness ?? null, shadow_cold_s: null, coverage: null, saved_s: sum.saved_seconds || 0,
      held_gb_h: (sum.held_byte_seconds || 0) / GB_H, idle_gb_h: (sum.idle_byte_seconds || 0) / GB_H, wasted_gb_h: (sum.wasted_byte_seconds || 0) / GB_H, moved_gb: (sum.moved_bytes || 0) / 1e9,
    },
  };
}
