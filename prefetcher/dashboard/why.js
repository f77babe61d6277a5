// Why? For any model: what it was asked for against what was forecast, its window, its cold start by stage, and its last orders, each with
// what led to it and what became of it.

import { legend, overTime, stages } from "./charts.js";
import { command, figures, h, sign, table } from "./dom.js";
import { ago, cause, clock, count, moment, number, outcome, percent, size, span, whole, zoneName } from "./format.js";

export const marks = ["orders", "moves"];
const SPANS = { 3600: "1 hour", 10800: "3 hours", 21600: "6 hours", 86400: "24 hours" };
const FOUND = 12;
/** In the order in which a cold start goes through them. */
const STAGES = { fetch: "object store to disk", read: "disk to host memory", copy: "host to device memory",
  engine_start: "start of the engine", warm_up: "warm-up" };

export function make(page) {
  const found = page.source();
  const story = page.source();
  const cold = page.source();
  let typing = 0;
  let isOpen = false;
  let active = -1;

  function load() {
    const { model, find, span: chosenSpan } = page.chosen();
    found.load(`v1/models?${new URLSearchParams({ matches: find, limit: String(FOUND) })}`);
    if (!model) return;
    const name = encodeURIComponent(model);
    story.load(`v1/explain/${name}?span_s=${SPANS[chosenSpan] ? chosenSpan : 10800}`);
    cold.load(`v1/models/${name}/cold-start`);
  }

  function view() {
    const { model } = page.chosen();
    const mine = (source) => source.data !== null && decodeURIComponent(source.from).includes(`/${model}`);
    return [
      search(),
      !model ? suggestions() : [
        h("h2", { class: "name", "data-key": "name" }, model),
        !mine(story) && story.error === null ? h("p", { class: "waiting", "aria-busy": "true" }, `Asking for ${model}…`) : story.error
          ? page.standing(story, model) : null,
        mine(story) ? [where(story.data), requests(story.data), chances(story.data), coldStart(story.data), windowView(story.data),
          orders(story.data)] : null,
      ],
    ];
  }

  // --- finding a model ---

  function search() {
    const { find } = page.chosen();
    const list = isOpen && found.data ? found.data.models : [];
    return h("div", { class: "search", "data-key": "search" },
      h("label", { for: "find" }, "Find a model by a part of its name"),
      h("input", {
        id: "find", type: "search", "data-field": "find", value: find, autocomplete: "off", spellcheck: "false", maxlength: "200",
          role: "combobox", "aria-expanded": String(list.length > 0),
        "aria-controls": "found", "aria-autocomplete": "list",
          "aria-activedescendant": active >= 0 && list[active] ? `found-${active}` : null,
      }),
      h("ul", { id: "found", role: "listbox", "aria-label": "Models that match", hidden: list.length === 0 }, list.map((one, i) =>
        h("li", { id: `found-${i}`, "data-key": one.model, role: "option", "aria-selected": String(i === active), "data-act": "pick",
          "data-model": one.model },
          h("span", {}, one.model), h("span", { class: "small" }, placeOf(one))))),
      h("p", { class: "small", role: "status", "data-key": "matched" },
        found.data && find ? `${whole(found.data.matched)} of ${count(found.data.total, "model")} match` : ""));
  }

  function suggestions() {
    const told = found.data;
    if (!told) return page.standing(found, "the models");
    if (told.total === 0) return h("p", { class: "empty" }, "No node that reports knows a model.");
    if (told.matched === 0) return h("p", { class: "empty" }, `No model has “${page.chosen().find}” in its name.`);
    const now = page.now();
    return h("section", { "data-key": "suggested", "aria-labelledby": "suggested-head" },
      h("h2", { id: "suggested-head" }, page.chosen().find ? "Models that match" : "Used last"),
      table("Models", ["Model", "Where", "Size", "Last use"], told.models.map((one) => ({
        key: one.model,
        cells: [h("a", { href: `?tab=why&model=${encodeURIComponent(one.model)}`, "data-act": "model", "data-model": one.model },
          one.model), placeOf(one), size(one.bytes), ago(one.last_use_s, now)],
      }))));
  }

  function placeOf(one) {
    const parts = [one.ready_on ? `in memory on ${whole(one.ready_on)}` : "", one.moving_on ? `loading on ${whole(one.moving_on)}` : "",
      one.pinned ? "pinned" : ""].filter(Boolean);
    return parts.length ? `${parts.join(", ")} of ${count(one.nodes, "node")}` : `on disk of ${count(one.nodes, "node")}`;
  }

  function pick(model) {
    isOpen = false;
    active = -1;
    page.choose({ model, find: "" });
  }

  function field(name, element, event) {
    if (name === "span") {
      if (event.type === "change") page.choose({ span: element.value });
      return;
    }
    const list = isOpen && found.data ? found.data.models : [];
    if (event.type === "keydown") {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        isOpen = true;
        const step = event.key === "ArrowDown" ? 1 : -1;
        active = list.length ? (active + step + list.length) % list.length : 0;
        page.draw();
      } else if (event.key === "Enter") {
        event.preventDefault();
        const chosen = list[Math.max(0, active)];
        if (chosen) pick(chosen.model);
      } else if (event.key === "Escape") {
        isOpen = false;
        active = -1;
        page.draw();
      }
      return;
    }
    if (event.type !== "input") return;
    isOpen = true;
    active = -1;
    clearTimeout(typing);
    typing = setTimeout(() => page.choose({ find: element.value }, { replace: true }), 150);
  }

  function act(name, element) {
    if (name === "pick") pick(element.dataset.model);
  }

  // --- one model ---

  function where(told) {
    const rows = told.where.map((line) => ({
      key: `${line.node}/${line.tier}`,
      cells: [
        line.node, line.tier,
        line.state === "absent" ? h("span", {}, "not in memory", line.why_absent ? h("span", { class: "small" }, `: ${line.why_absent}`)
          : "")
          : h("span", {}, line.state === "ready" ? sign("good", "ready")
            : `${line.state} ${percent(line.bytes_done / Math.max(1, line.bytes))}`, line.pinned ? ", pinned" : "",
              line.leases ? `, open in ${count(line.leases, "program")}` : ""),
        size(line.bytes), line.cause ? cause(line.cause) : "–",
          line.last_use_s === null || line.last_use_s === undefined ? "–" : ago(line.last_use_s, told.now_s),
      ],
    }));
    return h("section", { "data-key": "where", "aria-labelledby": "where-head" }, h("h3", { id: "where-head" }, "Where it is"),
      rows.length ? table("Where it is", ["Node", "Tier", "State", "Size", "Why", "Last use"], rows)
        : h("p", { class: "empty" }, "No node that reports knows it."));
  }

  function requests(told) {
    const { bin_s: bin, from_s: from, now_s: now, forecast } = told;
    const counts = told.requests?.counts || [];
    const bars = counts.map((value, i) => ({ at: from + bin * i, for: bin, value }));
    const behind = forecast.behind || [];
    const season = forecast.season;
    const near = forecast.ahead.filter((band) => band.at_s + band.for_s <= now + 4 * bin + bin);
    // One bin is what a bar stands for, so what is ahead is put as an amount for each bin.
    const ahead = near.map((band) =>
      ({ at: Math.max(now, band.at_s), for: band.for_s - Math.max(0, now - band.at_s), mean: band.mean * bin / band.for_s,
        low: band.low * bin / band.for_s, high: band.high * bin / band.for_s }))
      .filter((band) => band.for > 1);
    const bands = (season ? season.map(put) : [...thinned(behind.map(put), bin), ...ahead]).filter((band) => band.at + band.for > from);
    const whole_s = told.requests?.whole_from_s ?? now;
    const unit = `requests in ${span(bin)}`;
    const notes = [];
    if (!told.requests) notes.push("This process can't read requests by minute.");
    else if (told.notes.includes("counted_from")) notes.push(`Requests are counted since ${clock(whole_s, now, false)}.`);
    if (!season && !behind.length) {
      notes.push("What was forecast before is not kept here: tables are made every five minutes, where the scheduler runs.");
    }
    return h("section", { "data-key": "requests", "aria-labelledby": "requests-head" },
      h("h3", { id: "requests-head" }, "Requests, against what was forecast"),
      h("div", { class: "controls", "data-key": "controls" }, h("label", {}, "Look back ", h("select", { "data-field": "span" },
        Object.entries(SPANS).map(([value, words]) => h("option", { value, selected: value === page.chosen().span }, words))))),
      h("p", { class: "small" }, forecast.season_text ? `Season: ${forecast.season_text}`
        : "Each band is what had been forecast at its beginning: eight of ten times lie in it, were requests to come one by one."),
      overTime({ key: "requests", label: `Requests for ${told.model}`, unit, width: page.width(), from, to: now + 4 * bin, now, bars,
        bands },
        (at, one, band) => sayBin(at, one, band, bin, now)),
      legend([{ kind: "column-sign", name: unit }, { kind: "band-sign", name: season ? "its season, with band" : "forecast, with band" }]),
      notes.map((note) => h("p", { class: "small" }, note)),
      figures("Requests and forecast", ["From", "Requests", "Forecast", "Band"], bars.map((one) => {
        const band = bands.find((each) => Math.abs(each.at - one.at) < bin / 2);
        return [clock(one.at, now, false), whole(one.value), band ? number(band.mean, 2) : "–",
          band ? `${number(band.low, 2)} to ${number(band.high, 2)}` : "–"];
      }), "requests-table"));
  }

  function chances(told) {
    const known = told.chances;
    if (!known) return h("section", { "data-key": "chances" }, h("h3", {}, "How likely it is used soon"),
      h("p", { class: "empty" }, "Nothing is forecast of it: it was not asked for yet, or no controller leads."));
    return h("section", { "data-key": "chances", "aria-labelledby": "chances-head" },
      h("h3", { id: "chances-head" }, "How likely it is used soon"),
      h("p", { class: "small" },
        `As of ${clock(known.at_s, told.now_s)} (${zoneName()})`,
        known.predictor ? `, by ${known.predictor}` : "", known.fallback ? `; it fell back: ${known.fallback}` : "", "."),
      h("ul", { class: "chances" }, known.horizons_s.map((horizon, i) => h("li", { "data-key": String(horizon) },
        h("span", {}, `within ${span(horizon)}`), h("span", { class: "chance", "aria-hidden": "true" },
          h("span", { style: `width: ${(100 * known.probabilities[i]).toFixed(1)}%` })),
            h("strong", {}, percent(known.probabilities[i]))))));
  }

  function coldStart(told) {
    const head = h("h3", { id: "cold-head" }, "Its cold start, stage by stage");
    const measured = cold.data && cold.data.model === told.model ? cold.data.stages : null;
    const nodes = [...new Set((measured || []).map((stage) => stage.node))];
    const known = told.where.find((line) => line.load_s !== null);
    const parts = nodes.length
      ? nodes.slice(0, 3).map((node) => h("div", { "data-key": node }, h("h4", {}, node),
        stages(measured.filter((stage) => stage.node === node).map((stage) => (
        { name: STAGES[stage.stage] || stage.stage, mean: stage.mean_s, p90: stage.p90_s, count: stage.count,
          note: stage.count ? `${whole(stage.count)} measured` : stage.note || "nothing measures it" })))))
      : stages([
        { name: "queue for the link", mean: known ? known.queue_s : null,
          note: known ? "mean of this node's last loads" : "no node tells" },
        { name: STAGES.read, mean: known ? known.load_s : null,
          note: known ? "by its size over the measured link" : "no node that reports could load it" },
        { name: STAGES.copy, mean: null, note: "nothing measures it yet" },
        { name: `${STAGES.engine_start} and ${STAGES.warm_up}`, mean: null, note: "nothing measures it yet" },
      ]);
    return h("section", { "data-key": "cold", "aria-labelledby": "cold-head" }, head, parts,
      nodes.length > 3 ? h("p", { class: "small" }, `and on ${nodes.length - 3} more nodes`) : null);
  }

  function windowView(told) {
    const own = told.window;
    const since = own.since_s ? `, since ${clock(own.since_s, told.now_s, false)}` : "";
    return h("section", { "data-key": "window", "aria-labelledby": "window-head" }, h("h3", { id: "window-head" }, "Its window"),
      h("p", { class: "small" }, own.segment
        ? `Of its segment, “${own.segment}”${since}${own.pinned ? ", pinned" : ""}${own.why ? `: ${own.why}` : ""}.`
        : `Of all models that no segment holds${own.version ? "" : ": no window was tuned yet"}.`),
      h("dl", { class: "facts" },
        fact("Lead", own.lead_s >= 21600 ? "at any time" : own.lead_s === 0 ? "as the load takes" : span(own.lead_s),
          "how long before the expected use, beyond the load, it may begin"),
        fact("Horizon", own.horizon_s ? span(own.horizon_s) : "the expert's", "how far ahead the forecast looks"),
        fact("Hold", span(own.hold_s), "how long it stays when nobody uses it")));
  }

  function orders(told) {
    const head = h("h3", { id: "orders-head" }, "Its last orders");
    if (told.orders.length === 0) return h("section", { "data-key": "orders", "aria-labelledby": "orders-head" }, head,
      h("p", { class: "empty" }, "It was never prefetched, as far as orders are kept."));
    return h("section", { "data-key": "orders", "aria-labelledby": "orders-head" }, head,
      table("Its last orders", ["Decided", "Why", "What led to it", "What became of it", "Node"], told.orders.map((order) => {
        const [kind, words] = outcome(order.outcome);
        return {
          key: order.decision_id,
          cells: [
            h("span", { class: "time", title: moment(order.issued_s) }, clock(order.issued_s, told.now_s)), cause(order.cause),
            (order.contributions || []).map(([name, share]) => `${name} ${number(share, 2)}`).join(", ") || "–",
            h("span", {}, sign(kind, words), h("span", { class: "small line" }, course(order, told.now_s))), order.node,
          ],
        };
      })),
      h("p", { class: "next" }, command(`prefetcher explain ${quoted(told.model)}`)));
  }

  return { load, view, field, act };
}

function sayBin(at, one, band, bin, now) {
  const end = at + (one?.for || band?.for || bin);
  const forecast = band ? `, forecast ${number(band.mean, 2)} (${number(band.low, 2)} to ${number(band.high, 2)})` : "";
  return `${clock(at, now, false)} to ${clock(end, now, false)}: ${one ? count(one.value, "request") : "still to come"}${forecast}`;
}

function put(band) {
  return { at: band.at_s, for: band.for_s, mean: band.mean, low: band.low, high: band.high };
}

/** Forecasts are made more often than bins are long: of each bin's the first. */
function thinned(bands, bin) {
  const found = [];
  for (const band of bands) if (!found.length || band.at >= found[found.length - 1].at + 0.9 * bin) found.push(band);
  return found;
}

function course(order, now) {
  const parts = [];
  if (order.expected_use_s !== undefined) parts.push(`expected ${ago(order.expected_use_s, now)}`);
  if (order.ready_s) parts.push(`ready ${span(order.ready_s - order.issued_s)} after it was decided`);
  if (order.first_use_s && order.ready_s) {
    const after = order.first_use_s - order.ready_s;
    parts.push(`used ${span(Math.abs(after))} ${after < 0 ? "before" : "after"} that`);
  }
  if (order.why) parts.push(order.why);
  if (order.premature) parts.push("asked for soon after: premature");
  if (order.arm === "control") parts.push("control group");
  return parts.join("; ");
}

function fact(name, value, words) {
  return h("div", { "data-key": name }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", { class: "small" }, words)));
}

function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
