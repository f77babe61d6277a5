// Small charts: a bar of parts, figures over time with bands, a scale with a mark, stages in turn. Drawn by hand, to keep the page light.
// Each says its unit and zone, can be read by pointer and by arrow keys, and has its figures as a table beside it (`dom.figures`).

import { h, s } from "./dom.js";
import { clock, number, percent, span, zoneName } from "./format.js";

const LEFT = 46;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;
const STEPS_S = [60, 300, 600, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800];

/** What each chart's places say, by its key; and where people point. */
const drawn = new Map();
const pointed = new Map();

/** A bar of parts: [{name, value, kind}], of `total`; what is left of it stays empty. */
export function bar(parts, total, label) {
  const whole = Math.max(total, parts.reduce((sum, part) => sum + part.value, 0), 1e-9);
  return h("div", { class: "bar", role: "img", "aria-label": label },
    parts.filter((part) => part.value > 0).map((part) =>
      h("span", { class: `part ${part.kind}`, style: `width: ${(100 * part.value / whole).toFixed(3)}%`,
        title: part.title || part.name })));
}

/** What the kinds of a bar mean: [{name, kind}]. */
export function legend(parts) {
  return h("ul", { class: "legend" }, parts.map((part) =>
    h("li", {}, h("span", { class: `part ${part.kind}`, "aria-hidden": "true" }), part.name)));
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * ten).find((top) => top >= value * 0.9999);
}

function timeTicks(from, to, most) {
  const step = STEPS_S.find((each) => (to - from) / each <= most) || STEPS_S[STEPS_S.length - 1];
  const shift = zoneName() === "UTC" ? 0 : -60 * new Date(1000 * to).getTimezoneOffset();
  const ticks = [];
  for (let at = Math.ceil((from + shift) / step) * step - shift; at <= to; at += step) ticks.push(at);
  return { ticks, step };
}

/**
 * Figures over time. `about`: {key, label, unit, width, height, from, to, now, bars: [{at, for, value, kind}], bands: [{at, for, mean, low,
 * high}], ratio, mark: {value, name}}; `say(at, bar, band)` puts one place into words. Values are from 0 up.
 */
export function overTime(about, say) {
  const { key, from, to, bars = [], bands = [], mark } = about;
  const width = Math.max(240, about.width);
  const height = about.height || 170;
  const inner = { w: width - LEFT - RIGHT, h: height - TOP - BOTTOM };
  const highest = Math.max(0, ...bars.map((b) => b.value || 0), ...bands.map((b) => b.high), mark ? mark.value : 0);
  const top = about.ratio ? 1 : niceTop(highest);
  const x = (at) => LEFT + inner.w * Math.min(1, Math.max(0, (at - from) / (to - from)));
  const y = (value) => TOP + inner.h * (1 - Math.min(1, value / top));
  const { ticks, step } = timeTicks(from, to, Math.max(2, Math.floor(inner.w / 95)));
  const lines = [0, 0.5, 1].map((part) => part * top);

  const shapes = [];
  for (const band of bands) {
    const left = x(band.at);
    const wide = Math.max(1, x(band.at + band.for) - left);
    shapes.push(s("rect", { class: "band", x: left, y: y(band.high), width: wide, height: Math.max(1, y(band.low) - y(band.high)) }));
  }
  for (const one of bars) {
    if (!(one.value > 0)) continue;
    const left = x(one.at);
    const wide = Math.max(1.5, x(one.at + one.for) - left - 1);
    shapes.push(s("rect", { class: `column ${one.kind || ""}`, x: left, y: y(one.value), width: wide,
      height: Math.max(1, TOP + inner.h - y(one.value)) }));
  }
  for (const band of bands) {
    shapes.push(s("line", { class: "mean", x1: x(band.at), x2: Math.max(x(band.at) + 1, x(band.at + band.for)), y1: y(band.mean),
      y2: y(band.mean) }));
  }
  if (mark) shapes.push(s("line", { class: "limit", x1: LEFT, x2: LEFT + inner.w, y1: y(mark.value), y2: y(mark.value) }));
  if (about.now > from && about.now < to) {
    shapes.push(s("line", { class: "today", x1: x(about.now), x2: x(about.now), y1: TOP, y2: TOP + inner.h }),
      s("text", { class: "axis", x: x(about.now) + 4, y: TOP + 9 }, "now"));
  }
  const places = placesOf(bars, bands, say, x);
  const label = `${about.label}, ${about.unit}, times in ${zoneName()}`;
  drawn.set(key, { places, label });
  const at = place(key);
  return h("figure", { class: "chart", "data-key": `chart-${key}` },
    h("div", { class: "drawing" },
      s("svg", {
        width, height, viewBox: `0 0 ${width} ${height}`, "data-chart": key, tabindex: "0", role: "slider", "aria-label": label,
        "aria-valuemin": 0, "aria-valuemax": Math.max(0, places.length - 1), "aria-valuenow": at ? at.index : 0,
        "aria-valuetext": at ? at.text : "use the arrow keys to read the figures one by one",
      },
      lines.map((value) => [
        s("line", { class: "grid", x1: LEFT, x2: LEFT + inner.w, y1: y(value), y2: y(value) }),
        s("text", { class: "axis", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, about.ratio ? percent(value) : number(value, 2)),
      ]),
      ticks.map((tick) => s("text", { class: "axis", x: x(tick), y: height - 6, "text-anchor": x(tick) > width - 24 ? "end" : "middle" },
        step >= 86400 ? clock(tick, 0).slice(0, -9) : clock(tick, tick, false))),
      shapes,
      s("line", { class: "cursor", x1: at ? at.x : -9, x2: at ? at.x : -9, y1: TOP, y2: TOP + inner.h }))),
    h("p", { class: "readout", "data-readout": key }, at ? at.text
      : `Times in ${zoneName()}. Point at it, or use the arrow keys, to read the figures.`));
}

function placesOf(bars, bands, say, x) {
  const found = new Map();
  for (const one of bars) found.set(one.at, { at: one.at, for: one.for, bar: one });
  for (const band of bands) {
    // A forecast was made a moment after its bin began, or before.
    const near = [...found.values()].find((each) => each.bar && Math.abs(each.at - band.at) < each.for / 2);
    if (near) near.band ??= band;
    else found.set(band.at, { at: band.at, for: band.for, band });
  }
  return [...found.values()].sort((one, other) => one.at - other.at)
    .map((each, index) =>
      ({ index, from: x(each.at), x: (x(each.at) + x(each.at + each.for)) / 2, text: say(each.at, each.bar, each.band) }));
}

function place(key) {
  const found = drawn.get(key);
  const at = pointed.get(key);
  return found && at !== undefined && found.places.length ? found.places[Math.min(at, found.places.length - 1)] : null;
}

function show(svg, key) {
  const at = place(key);
  const cursor = svg.querySelector(".cursor");
  for (const end of ["x1", "x2"]) cursor.setAttribute(end, at ? at.x : -9);
  svg.setAttribute("aria-valuenow", at ? at.index : 0);
  if (at) svg.setAttribute("aria-valuetext", at.text);
  const readout = svg.closest("figure").querySelector("[data-readout]");
  if (at && readout.textContent !== at.text) readout.textContent = at.text;
}

/** Pointing at charts inside `root`, by pointer and by keys. Once for a page. */
export function pointable(root) {
  const move = (event) => {
    const svg = event.target.closest?.("svg[data-chart]");
    if (!svg) return;
    const key = svg.dataset.chart;
    const { places } = drawn.get(key) || { places: [] };
    const at = event.clientX - svg.getBoundingClientRect().left;
    const index = places.findLastIndex((each) => each.from <= at);
    if (index < 0) return;
    pointed.set(key, index);
    show(svg, key);
  };
  root.addEventListener("pointermove", move);
  root.addEventListener("pointerdown", move);
  root.addEventListener("keydown", (event) => {
    const svg = event.target.closest?.("svg[data-chart]");
    if (!svg) return;
    const key = svg.dataset.chart;
    const last = (drawn.get(key)?.places.length || 0) - 1;
    const now = pointed.get(key) ?? -1;
    const next = {
      ArrowRight: Math.min(last, now + 1), ArrowUp: Math.min(last, now + 1), ArrowLeft: Math.max(0, now - 1),
        ArrowDown: Math.max(0, now - 1),
      Home: 0, End: last, PageUp: Math.min(last, now + 10), PageDown: Math.max(0, now - 10),
    }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    pointed.set(key, next);
    show(svg, key);
  });
}

/** Waits on a scale from a millisecond to ten minutes, with the wait that is promised: marks = [{name, value}]. Those that read alike
 * share a point and its label. */
export function waitScale(marks, limit, label) {
  const alike = new Map();
  for (const { name, value } of marks.filter((mark) => mark.value !== null && mark.value !== undefined)) {
    const words = span(value);
    alike.set(words, { name: alike.has(words) ? `${alike.get(words).name}, ${name}` : name, value });
  }
  const points = [...alike].map(([words, { name, value }]) => ({ name: `${name} ${words}`, value }));
  const [least, most] = [Math.log(0.001), Math.log(600)];
  const share = (value) => Math.min(1, Math.max(0, (Math.log(Math.max(value, 1e-9)) - least) / (most - least)));
  const at = (value) => `${(100 * share(value)).toFixed(2)}%`;
  // A label at either end reads inwards.
  const side = (value) => (share(value) < 0.1 ? " first" : share(value) > 0.9 ? " last" : "");
  return h("div", { class: "scale", role: "img", "aria-label": `${label}: ${points.map((mark) => mark.name).join("; ")}` },
    h("div", { class: "track" },
      limit ? h("span", { class: "within", style: `width: ${at(limit)}` }) : null,
      points.map((mark, i) =>
        h("span", { class: `point${limit && mark.value > limit ? " over" : ""}`, style: `left: ${at(mark.value)}` },
          h("b", { class: `${["", "below", "higher"][i % 3]}${side(mark.value)}` }, mark.name))),
      limit ? h("span", { class: "promise", style: `left: ${at(limit)}` }) : null),
    h("div", { class: "ticks" }, [0.001, 0.01, 0.1, 1, 10, 60,
      600].map((tick) => h("span", { class: side(tick), style: `left: ${at(tick)}` }, span(tick)))));
}

/** Stages one after the other: [{name, mean, p90, note, count}], each from where the one before ends. */
export function stages(list) {
  const total = Math.max(1e-9, list.reduce((sum, stage) => sum + (stage.mean || 0), 0), ...list.map((stage) => stage.p90 || 0));
  let begin = 0;
  return h("ol", { class: "stages" }, list.map((stage) => {
    const left = begin;
    begin += stage.mean || 0;
    const measured = stage.mean !== null && stage.mean !== undefined;
    return h("li", { "data-key": stage.name, class: measured ? "" : "unmeasured" },
      h("span", { class: "name" }, stage.name),
      h("span", { class: "lane", "aria-hidden": "true" },
        measured
          ? h("span",
            { class: "piece",
              style: `left: ${(100 * left / total).toFixed(2)}%; width: ${Math.max(0.4, 100 * stage.mean / total).toFixed(2)}%` }) : null),
      h("span", { class: "said" },
        measured ? `${span(stage.mean)}${stage.p90 ? `, P90 ${span(stage.p90)}` : ""}${stage.note ? `; ${stage.note}` : ""}` : stage.note));
  }));
}
