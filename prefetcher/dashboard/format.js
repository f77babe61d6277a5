// How numbers, sizes, spans and times are put. Times are seconds since 1970; `zone` is what the page's choice says.

const QUIET = "–";
let utc = false;

export function setZone(name) {
  utc = name === "utc";
}

export function zoneName() {
  return utc ? "UTC" : Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return QUIET;
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function whole(value) {
  return value === null || value === undefined ? QUIET : Math.round(value).toLocaleString("en");
}

export function percent(value, digits = 0) {
  if (value === null || value === undefined) return QUIET;
  if (value > 0 && value < 0.01 && digits === 0) return "<1\u00a0%";
  return `${(100 * value).toFixed(digits)}\u00a0%`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return QUIET;
  for (const [unit, one] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= one) return `${number(bytes / one, bytes / one >= 100 ? 3 : 2)}\u00a0${unit}`;
  }
  return `${Math.round(bytes)}\u00a0B`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return QUIET;
  const s = Math.max(0, seconds);
  if (s > 0 && s < 0.001) return "<1\u00a0ms";
  if (s > 0 && s < 1) return `${number(1000 * s, 2)}\u00a0ms`;
  if (s < 10) return `${number(s, 2)}\u00a0s`;
  if (s < 90) return `${Math.round(s)}\u00a0s`;
  if (s < 5400) return `${Math.round(s / 60)}\u00a0min`;
  return s < 172800 ? `${number(s / 3600, 2)}\u00a0h` : `${number(s / 86400, 2)}\u00a0days`;
}

export function ago(at, now) {
  if (at === null || at === undefined) return "never";
  const s = now - at;
  return s < -1 ? `in ${span(-s)}` : s < 1 ? "now" : `${span(s)} ago`;
}

/** A time of the day, with its day where that is not the day of `now`. */
export function clock(at, now, seconds = true) {
  if (at === null || at === undefined) return QUIET;
  const about = { hour: "2-digit", minute: "2-digit", hour12: false, ...(seconds ? { second: "2-digit" } : {}),
    ...(utc ? { timeZone: "UTC" } : {}) };
  const day = { weekday: "short", day: "numeric", month: "short", ...(utc ? { timeZone: "UTC" } : {}) };
  const when = new Date(1000 * at);
  const time = when.toLocaleTimeString("en-GB", about);
  const today = when.toLocaleDateString("en-GB", day) === new Date(1000 * (now ?? at)).toLocaleDateString("en-GB", day);
  return today ? time : `${when.toLocaleDateString("en-GB", day)} ${time}`;
}

/** A time to the minute, with its day and year. */
export function minute(at) {
  const about = { weekday: "short", year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false };
  return new Date(1000 * at).toLocaleString("en-GB", { ...about, ...(utc ? { timeZone: "UTC" } : {}) });
}

/** The same in full, for a title: with seconds and zone. */
export function moment(at) {
  const about = { weekday: "short", year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit",
    hour12: false };
  return at === null || at === undefined ? ""
    : `${new Date(1000 * at).toLocaleString("en-GB", { ...about, ...(utc ? { timeZone: "UTC" } : {}) })}, ${zoneName()}`;
}

/** What a field for a time has and gives: `2026-01-31T12:00` in the page's zone. Nothing, or what is no time, is null. */
export function fieldOf(at) {
  if (at === null || at === undefined) return "";
  const shift = utc ? 0 : 60 * new Date(1000 * at).getTimezoneOffset();
  return new Date(1000 * (at - shift)).toISOString().slice(0, 16);
}

export function timeOf(field) {
  const at = new Date(field + (utc ? "Z" : "")).getTime() / 1000;
  return Number.isFinite(at) ? at : null;
}

export function count(n, one, many = `${one}s`) {
  return `${whole(n)} ${n === 1 ? one : many}`;
}

const CAUSES = {
  forecast: "forecast", hint: "a hint", coactivation: "follows another", batch: "a batch job", manual: "by hand", demand: "a request waits",
};
export function cause(name) {
  return CAUSES[name] || name || QUIET;
}

const OUTCOMES = {
  open: ["quiet", "open: it still runs, or waits for its use"], timely: ["good", "hit: ready before it was used"],
  late: ["warn", "late: used while it was still loading"], useless: ["bad", "useless: given up unused"],
  displaced: ["warn", "displaced: made room unused"], superseded: ["quiet", "superseded before bytes moved"],
  cancelled: ["quiet", "cancelled while it loaded"], failed: ["bad", "failed to load"], lost: ["bad", "lost with its node"],
};
/** [kind of sign, words] of an outcome. */
export function outcome(name) {
  return OUTCOMES[name] || ["quiet", name];
}
